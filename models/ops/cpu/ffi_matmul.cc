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

constexpr size_t kFields = 10;  // of a weight in the attribute `weights`; see matmul.py

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
    default:
      return false;
  }
}

// Takes `count` times kTile values of a type from a record at `at`; type -1: none.
bool take(int64_t type, int64_t count, int64_t* at, bool* given, Type* to, int64_t* offset) {
  static constexpr int64_t kBytes[] = {4, 2, 2, 1, 1};  // by Type
  *given = type >= 0;
  if (!*given) return true;
  if (type > static_cast<int64_t>(Type::kU8)) return false;
  *to = static_cast<Type>(type);
  *offset = *at;
  *at += count * kTile * kBytes[type];
  return true;
}

// bits 0: dense, else 4 or 8; see `_fields` in matmul.py for the rest.
bool read_weight(const ffi::AnyBuffer& data, const int64_t* fields, int64_t C, int64_t R,
                 Weight* w) {
  const int64_t bits = fields[0];
  w->group = fields[1];
  w->block = fields[2];
  w->zero_point = static_cast<int32_t>(fields[3]);
  w->R = R;
  w->data = data.untyped_data();
  w->packed = bits != 0;
  if (!w->packed) return to_type(data.element_type(), &w->type) && has_shape(data, {R, C});
  if (bits != 4 && bits != 8) return false;
  w->byte_codes = bits == 8;
  if (w->block <= 0 || w->block > 32768 || w->block % (w->byte_codes ? 4 : 8)) return false;
  if (w->group <= 0 || w->group > C || w->group % w->block || w->zero_point < 0 || w->zero_point > 255) return false;
  Record& r = w->record;
  r.each = fields[4];
  r.supers = fields[5];
  if (r.each <= 0 || r.each > C || r.supers <= 0 || r.each % r.supers) return false;
  const int64_t columns = r.each * w->group;
  if (C % columns) return false;
  int64_t at = 0;
  Scales &s = r.scale, &m = r.minimum;
  if (!take(fields[8], r.supers, &at, &s.factored, &s.super_type, &s.super_offset) ||
      !take(fields[9], r.supers, &at, &m.factored, &m.super_type, &m.super_offset) ||
      !take(fields[6], r.each, &at, &s.given, &s.type, &s.offset) ||
      !take(fields[7], r.each, &at, &m.given, &m.type, &m.offset) || !s.given ||
      (m.factored && !m.given)) {
    return false;
  }
  r.codes = at;
  r.bytes = at + columns * kTile * bits / 8;
  return data.element_type() == ffi::DataType::U8 &&
         has_shape(data, {(R + kTile - 1) / kTile, C / columns, r.bytes});
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
        !read_weight(*data, fields.begin() + i * kFields, C, R, &weights[i])) {
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
