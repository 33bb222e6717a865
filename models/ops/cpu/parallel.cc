#include "parallel.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

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

// Neighbouring units, claimed in order. Alone on its cache line.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Job {
  std::vector<Share> shares;  // one for each thread
  std::atomic<size_t> joined{0};
  std::atomic<int64_t> done{0};
  const std::function<void(int64_t)>* body;

  Job(size_t threads, int64_t units, const std::function<void(int64_t)>* body)
      : shares(threads), body(body) {
    const auto start = [&](size_t i) {
      return units * static_cast<int64_t>(i) / static_cast<int64_t>(threads);
    };
    for (size_t i = 0; i < threads; ++i) {
      shares[i].next.store(start(i), std::memory_order_relaxed);
      shares[i].end = start(i + 1);
    }
  }

  // A share of one's own, so that what was fetched ahead is in the cache of the core that needs
  // it; then what is left of the others'.
  void work() {
    const size_t own = joined.fetch_add(1, std::memory_order_relaxed);
    for (size_t i = 0; i < shares.size(); ++i) {
      Share& share = shares[(own + i) % shares.size()];
      int64_t count = 0;
      for (;; ++count) {
        const int64_t unit = share.next.fetch_add(1, std::memory_order_relaxed);
        if (unit >= share.end) break;
        (*body)(unit);
      }
      if (count) done.fetch_add(count, std::memory_order_release);
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
  const auto job = std::make_shared<Job>(static_cast<size_t>(helpers) + 1, units, &body);
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
