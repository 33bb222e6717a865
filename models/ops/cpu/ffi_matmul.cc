// The handler of stoker_matmul: checks every shape and type, then multiplies.
#include <string>
#include <vector>

#include "ffi.h"
#include "ffi_weight.h"
#include "matmul.h"

namespace stoker {
namespace {

ffi::Error matmul(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> other,
                  ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int64_t> fields, int64_t before_index, float eps, bool exact,
                  int64_t isa, int64_t limit) {
  const auto dims = x.dimensions();
  if (dims.size() != 2) return ffi::Error::InvalidArgument("matmul: x is not a matrix");
  const int64_t T = dims[0], C = dims[1];
  const auto before = static_cast<Before>(before_index);
  const bool fits = before == Before::kNothing ||
                    (before == Before::kNorm ? has_shape(other, {C}) : has_shape(other, {T, C}));
  if (before_index < 0 || before > Before::kClamped || before == Before::kRows || !fits) {
    return ffi::Error::InvalidArgument("matmul: the second input does not fit x");
  }
  const size_t count = fields.size() / kFields;
  if (count == 0 || fields.size() % kFields || rets.size() != count + 1 || args.size() != count) {
    return ffi::Error::InvalidArgument("matmul: weights and results do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("matmul: instruction set not available");
  std::vector<Weight> weights(count);
  for (size_t i = 0; i < count; ++i) {
    auto out = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!out.has_value() || (*out)->dimensions()[0] != T) {
      return ffi::Error::InvalidArgument("matmul: result " + std::to_string(i) + " has wrong rows");
    }
    weights[i].out = (*out)->typed_data();
    const int64_t R = (*out)->dimensions()[1];
    const auto data = args.get<ffi::AnyBuffer>(i);
    if (!data.has_value() ||
        !read_weight(*data, fields.begin() + i * kFields, -1, C, R, &weights[i])) {
      return ffi::Error::InvalidArgument("matmul: weight " + std::to_string(i) +
                                         " does not have the shapes and types it claims");
    }
  }
  auto scratch = rets.get<ffi::BufferR1<ffi::U8>>(count);
  const int n = static_cast<int>(count);
  if (!scratch.has_value() ||
      (*scratch)->element_count() < scratch_bytes(weights.data(), n, T, C, before, exact)) {
    return ffi::Error::InvalidArgument("matmul: too little scratch");
  }
  Crew pool = crew(threads, limit);
  const Input input{x.typed_data(), other.typed_data(), before, eps};
  const int64_t starts[] = {0, T};
  multiply(pool, *table, input, {starts, 1}, C, weights.data(), n, exact, (*scratch)->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stoker

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_matmul, stoker::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("weights")
                                  .Attr<int64_t>("before")
                                  .Attr<float>("eps")
                                  .Attr<bool>("exact")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));

extern "C" int stoker_best_isa() { return static_cast<int>(stoker::best_isa()); }
