// Splits work over a pool without ever waiting for a thread that has not started.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace stoker {

// Where helper tasks run: XLA's intra-op pool, or plain threads in the native test.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(std::function<void()> task) = 0;
};

// Calls body(i) once for each i in [0, units), on the caller and on idle pool threads.
// Units are claimed from a counter. A helper that starts late finds the counter spent and leaves
// without touching `body`, so the caller waits only for units that somebody is working on: no
// deadlock when the pool is full, no collapse when another process holds the core.
void parallel_for(Pool& pool, int64_t units, const std::function<void(int64_t)>& body);

}  // namespace stoker
