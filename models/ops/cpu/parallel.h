// Splits work over a pool without ever waiting for a thread that has not started.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace stoker {

// Where helper tasks run.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  // Runs `task` on `count` other threads, sooner or later.
  virtual void schedule(int64_t count, std::function<void()> task) = 0;
};

// Threads of the process, shared by all calls. A step makes a hundred calls some microseconds
// apart, and to wake a sleeping thread takes longer than most of them. So a thread that ran out of
// work looks for more for a while, giving way to any other that wants its core, before it sleeps.
class Crew : public Pool {
 public:
  explicit Crew(int64_t threads);
  int64_t threads() const override { return threads_; }
  void schedule(int64_t count, std::function<void()> task) override;

 private:
  int64_t threads_;
};

// Calls body(i) once for each i in [0, units), on the caller and on idle pool threads.
// Units are claimed from a counter. A helper that starts late finds the counter spent and leaves
// without touching `body`, so the caller waits only for units that somebody is working on: no
// deadlock when the pool is full, no collapse when another process holds the core.
void parallel_for(Pool& pool, int64_t units, const std::function<void(int64_t)>& body);

}  // namespace stoker
