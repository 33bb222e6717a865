#include "parallel.h"

#include <algorithm>

namespace stoker {
namespace {

struct Job {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t units;
  const std::function<void(int64_t)>* body;

  void work() {
    for (;;) {
      const int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) return;
      (*body)(unit);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void parallel_for(Pool& pool, int64_t units, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(pool.threads(), units) - 1;
  if (helpers <= 0) {
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
    return;
  }
  auto job = std::make_shared<Job>();
  job->units = units;
  job->body = &body;
  for (int64_t i = 0; i < helpers; ++i) pool.schedule([job] { job->work(); });
  job->work();
  // The rest are units under way; spin for about their length, then let their thread have the core.
  for (int spins = 0; job->done.load(std::memory_order_acquire) < units; ++spins) {
    if (spins < 4000) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace stoker
