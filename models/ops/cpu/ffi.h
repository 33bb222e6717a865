// What both handlers need of XLA's foreign-function interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace stoker {

// XLA's intra-op pool, perhaps limited to fewer threads.
class XlaPool : public Pool {
 public:
  XlaPool(xla::ffi::ThreadPool& pool, int64_t limit) : pool_(pool) {
    threads_ = std::max<int64_t>(1, pool.num_threads());
    if (limit > 0) threads_ = std::min(threads_, limit);
  }
  int64_t threads() const override { return threads_; }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  xla::ffi::ThreadPool& pool_;
  int64_t threads_;
};

template <typename Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return dims.size() == shape.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

}  // namespace stoker
