// The handler of stoker_grouped_matmul: checks every shape, type and size, then multiplies.
#include <algorithm>
#include <string>
#include <vector>

#include "ffi.h"
#include "ffi_weight.h"
#include "matmul.h"

namespace stoker {
namespace {

// First rows of the groups, and the end of the last. Empty unless sizes are 0 or more and at most T.
std::vector<int64_t> starts_of(const int32_t* sizes, int64_t groups, int64_t T) {
  std::vector<int64_t> starts{0};
  for (int64_t i = 0; i < groups; ++i) {
    if (sizes[i] < 0) return {};
    starts.push_back(starts.back() + sizes[i]);
  }
  return starts.back() <= T ? starts : std::vector<int64_t>{};
}

// Arguments after `sizes` are weights, then a bias for each; an empty one is none.
ffi::Error grouped(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> other,
                   ffi::BufferR1<ffi::S32> rows, ffi::BufferR1<ffi::S32> sizes,
                   ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Span<const int64_t> fields, int64_t before_index, bool exact, int64_t isa,
                   int64_t limit) {
  const auto dims = x.dimensions();
  if (dims.size() != 2) return ffi::Error::InvalidArgument("grouped: x is not a matrix");
  const auto before = static_cast<Before>(before_index);
  const bool gathers = before == Before::kRows;
  const int64_t T = gathers ? rows.dimensions()[0] : dims[0];
  const int64_t C = dims[1], E = sizes.dimensions()[0];
  if (before_index < 0 || before > Before::kClamped || before == Before::kNorm ||
      !has_shape(other, {dims[0], C})) {
    return ffi::Error::InvalidArgument("grouped: the second input does not fit x");
  }
  const size_t count = fields.size() / kFields;
  if (count == 0 || fields.size() % kFields || rets.size() != count + 1 ||
      args.size() != 2 * count) {
    return ffi::Error::InvalidArgument("grouped: weights and results do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("grouped: instruction set not available");
  std::vector<Weight> weights(count);
  for (size_t i = 0; i < count; ++i) {
    auto out = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!out.has_value() || (*out)->dimensions()[0] != T) {
      return ffi::Error::InvalidArgument("grouped: result " + std::to_string(i) +
                                         " has wrong rows");
    }
    weights[i].out = (*out)->typed_data();
    const int64_t R = (*out)->dimensions()[1];
    const auto data = args.get<ffi::AnyBuffer>(i);
    const auto bias = args.get<ffi::BufferR2<ffi::F32>>(count + i);
    if (!data.has_value() || !bias.has_value() ||
        !read_weight(*data, fields.begin() + i * kFields, E, C, R, &weights[i]) ||
        !(bias->element_count() == 0 || has_shape(*bias, {E, R}))) {
      return ffi::Error::InvalidArgument("grouped: weight " + std::to_string(i) +
                                         " does not have the shapes and types it claims");
    }
    if (bias->element_count()) weights[i].bias = bias->typed_data();
  }
  auto scratch = rets.get<ffi::BufferR1<ffi::U8>>(count);
  const int n = static_cast<int>(count);
  if (!scratch.has_value() ||
      (*scratch)->element_count() < scratch_bytes(weights.data(), n, T, C, before, exact)) {
    return ffi::Error::InvalidArgument("grouped: too little scratch");
  }
  const std::vector<int64_t> starts = starts_of(sizes.typed_data(), E, T);
  if (starts.empty()) {
    return ffi::Error::InvalidArgument("grouped: sizes of groups must be 0 or more and sum to " +
                                       std::to_string(T) + " or fewer");
  }
  for (const Weight& w : weights) std::fill(w.out + starts.back() * w.R, w.out + T * w.R, 0.0f);
  const int32_t* from = rows.typed_data();
  for (int64_t t = 0; gathers && t < T; ++t) {
    if (from[t] < 0 || from[t] >= dims[0]) {
      return ffi::Error::InvalidArgument("grouped: rows must be 0 or more and below " +
                                         std::to_string(dims[0]));
    }
  }
  Crew pool = crew(threads, limit);
  const Input input{x.typed_data(), other.typed_data(), before, 0.0f, from};
  multiply(pool, *table, input, {starts.data(), E}, C, weights.data(), n, exact,
           (*scratch)->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stoker

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_grouped_matmul, stoker::grouped,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("weights")
                                  .Attr<int64_t>("before")
                                  .Attr<bool>("exact")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));
