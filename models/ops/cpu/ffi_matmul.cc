// The handler of stoker_matmul: checks every shape and type, then multiplies.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ffi.h"
#include "matmul.h"

namespace stoker {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kFields = 5;  // of a weight in the attribute `weights`; see matmul.py

bool to_type(ffi::DataType from, Type* to) {
  switch (from) {
    case ffi::DataType::F32:
      *to = Type::kF32;
      return true;
    case ffi::DataType::BF16:
      *to = Type::kBF16;
      return true;
    case ffi::DataType::F16:
      *to = Type::kF16;
      return true;
    case ffi::DataType::S8:
      *to = Type::kI8;
      return true;
    case ffi::DataType::U8:
      *to = Type::kU8;
      return true;
    default:
      return false;
  }
}

// Scales or minima [tiles, groups, kTile].
bool read_values(const ffi::RemainingArgs& args, size_t* next, int64_t tiles, Scales* to) {
  const auto values = args.get<ffi::AnyBuffer>((*next)++);
  if (!values.has_value() || !to_type(values->element_type(), &to->type)) return false;
  to->values = values->untyped_data();
  return has_shape(*values, {tiles, to->groups, kTile});
}

// Their factors [tiles, supers, kTile].
bool read_factors(const ffi::RemainingArgs& args, size_t* next, int64_t tiles, Scales* to) {
  const auto factor = args.get<ffi::AnyBuffer>((*next)++);
  if (!factor.has_value() || !to_type(factor->element_type(), &to->super_type)) return false;
  if (factor->dimensions().size() != 3) return false;
  to->supers = factor->dimensions()[1];
  to->super = factor->untyped_data();
  return to->supers > 0 && to->groups % to->supers == 0 &&
         has_shape(*factor, {tiles, to->supers, kTile});
}

// bits 0: dense, else 4 or 8. flags: 1 minimum, 2 factors of scales, 4 factors of minima.
bool read_weight(const ffi::RemainingArgs& args, size_t* next, const int64_t* fields, int64_t C,
                 int64_t R, Weight* w) {
  const int64_t bits = fields[0], flags = fields[4];
  w->group = fields[1];
  w->block = fields[2];
  w->zero_point = static_cast<int32_t>(fields[3]);
  w->R = R;
  const auto data = args.get<ffi::AnyBuffer>((*next)++);
  if (!data.has_value()) return false;
  w->data = data->untyped_data();
  w->packed = bits != 0;
  if (!w->packed) {
    return to_type(data->element_type(), &w->type) && w->type <= Type::kF16 &&
           has_shape(*data, {R, C});
  }
  if (bits != 4 && bits != 8) return false;
  w->byte_codes = bits == 8;
  const int64_t step = w->byte_codes ? 4 : 8, tiles = (R + kTile - 1) / kTile;
  if (w->block <= 0 || w->block > 32768 || w->block % step || w->group <= 0) return false;
  if (w->group % w->block || C % w->group || w->zero_point < 0 || w->zero_point > 255) return false;
  if (data->element_type() != ffi::DataType::U8) return false;
  if (!has_shape(*data, {tiles, C / step, 4 * kTile})) return false;
  w->scale.groups = w->minimum.groups = C / w->group;
  if (!read_values(args, next, tiles, &w->scale)) return false;
  if ((flags & 1) && !read_values(args, next, tiles, &w->minimum)) return false;
  if ((flags & 2) && !read_factors(args, next, tiles, &w->scale)) return false;
  return !(flags & 4) || ((flags & 1) && read_factors(args, next, tiles, &w->minimum));
}

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
  if (before_index < 0 || before > Before::kGelu || !fits) {
    return ffi::Error::InvalidArgument("matmul: the second input does not fit x");
  }
  const size_t count = fields.size() / kFields;
  if (count == 0 || fields.size() % kFields || rets.size() != count + 1) {
    return ffi::Error::InvalidArgument("matmul: weights and results do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("matmul: instruction set not available");
  std::vector<Weight> weights(count);
  size_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    auto out = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!out.has_value() || (*out)->dimensions()[0] != T) {
      return ffi::Error::InvalidArgument("matmul: result " + std::to_string(i) + " has wrong rows");
    }
    weights[i].out = (*out)->typed_data();
    const int64_t R = (*out)->dimensions()[1];
    if (!read_weight(args, &next, fields.begin() + i * kFields, C, R, &weights[i])) {
      return ffi::Error::InvalidArgument("matmul: weight " + std::to_string(i) +
                                         " does not have the shapes and types it claims");
    }
  }
  auto scratch = rets.get<ffi::BufferR1<ffi::U8>>(count);
  const int n = static_cast<int>(count);
  if (next != args.size() || !scratch.has_value() ||
      (*scratch)->element_count() < scratch_bytes(weights.data(), n, T, C, before, exact)) {
    return ffi::Error::InvalidArgument("matmul: wrong number of arguments or too little scratch");
  }
  Crew pool = crew(threads, limit);
  const Input input{x.typed_data(), other.typed_data(), before, eps};
  multiply(pool, *table, input, T, C, weights.data(), n, exact, (*scratch)->typed_data());
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
