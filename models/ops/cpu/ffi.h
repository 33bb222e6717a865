// What the handlers need of XLA's foreign-function interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace stoker {

// As many threads as XLA computes with, or fewer.
inline Crew crew(const xla::ffi::ThreadPool& pool, int64_t limit) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  return Crew(limit > 0 ? std::min(threads, limit) : threads);
}

template <typename Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return dims.size() == shape.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

}  // namespace stoker
