#include "parallel.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

namespace stoker {
namespace {

constexpr auto kPatience = std::chrono::microseconds(200);  // before a thread sleeps
constexpr int kSpins = 200;                                 // before a thread gives way

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Tasks that wait for a thread, and the threads. Lives as long as the process: its threads may
// look at it until the very end.
class Workers {
 public:
  static Workers& all() {
    static Workers* workers = new Workers;
    return *workers;
  }

  void grow(int64_t count) {
    if (started_.load(std::memory_order_relaxed) >= count) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (; started_.load(std::memory_order_relaxed) < count; started_.fetch_add(1)) {
      std::thread([this] { run(); }).detach();
    }
  }

  void add(int64_t count, const std::function<void()>& task) {
    bool wake;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < count; ++i) tasks_.push_back(task);
      waiting_.store(static_cast<int64_t>(tasks_.size()), std::memory_order_release);
      wake = sleeping_ > 0;
    }
    if (wake) awake_.notify_all();
  }

 private:
  // Whether a task came up within a while.
  bool look() const {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 0; waiting_.load(std::memory_order_acquire) == 0; ++spins) {
      if (spins < kSpins) {
        relax();
      } else if (std::chrono::steady_clock::now() - start < kPatience) {
        std::this_thread::yield();
      } else {
        return false;
      }
    }
    return true;
  }

  void run() {
    for (;;) {
      const bool found = look();
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!found) {
          ++sleeping_;
          awake_.wait(lock, [this] { return !tasks_.empty(); });
          --sleeping_;
        }
        if (tasks_.empty()) continue;
        task = std::move(tasks_.front());
        tasks_.pop_front();
        waiting_.store(static_cast<int64_t>(tasks_.size()), std::memory_order_release);
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable awake_;
  std::deque<std::function<void()>> tasks_;
  int64_t sleeping_ = 0;
  std::atomic<int64_t> waiting_{0};
  std::atomic<int64_t> started_{0};
};

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

}  // namespace

Crew::Crew(int64_t threads) : threads_(threads) { Workers::all().grow(threads - 1); }

void Crew::schedule(int64_t count, std::function<void()> task) {
  Workers::all().add(count, task);
}

void parallel_for(Pool& pool, int64_t units, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(pool.threads(), units) - 1;
  if (helpers <= 0) {
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
    return;
  }
  auto job = std::make_shared<Job>();
  job->units = units;
  job->body = &body;
  pool.schedule(helpers, [job] { job->work(); });
  job->work();
  // The rest are units under way.
  for (int spins = 0; job->done.load(std::memory_order_acquire) < units; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace stoker
