// What checks of the kernels share; included once.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

using namespace stoker;

int failures = 0;

void expect(bool good, const char* what, const char* name, double error) {
  if (good) return;
  std::printf("FAILED %s %s: %g\n", what, name, error);
  ++failures;
}

// Starts a thread for each task, so that helpers come late and out of order.
class Threads : public Pool {
 public:
  explicit Threads(int64_t count) : count_(count) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t threads() const override { return count_; }
  void schedule(int64_t count, std::function<void()> task) override {
    for (int64_t i = 0; i < count; ++i) threads_.emplace_back(task);
  }

 private:
  int64_t count_;
  std::vector<std::thread> threads_;
};

class Random {
 public:
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float real() { return static_cast<float>(bits() % 20001) / 10000.0f - 1.0f; }
  std::vector<float> reals(int64_t n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = real();
    return x;
  }

 private:
  uint64_t state_ = 12345;
};

// A buffer without slack and without the alignment that XLA gives.
template <typename T>
struct Exact {
  explicit Exact(int64_t n) : data(new T[static_cast<size_t>(n)]()) {}
  std::unique_ptr<T[]> data;
  T* get() { return data.get(); }
};

}  // namespace
