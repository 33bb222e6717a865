// Reads what a foreign call says of its weights, and checks it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi.h"
#include "matmul.h"

namespace stoker {

namespace ffi = xla::ffi;

constexpr size_t kFields = 12;  // of a weight in the attribute `weights`; see matmul.py

inline bool to_type(ffi::DataType from, Type* to) {
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
inline bool take(int64_t type, int64_t count, int64_t* at, bool* given, Type* to, int64_t* offset) {
  static constexpr int64_t kBytes[] = {4, 2, 2, 1, 1};  // by Type
  *given = type >= 0;
  if (!*given) return true;
  if (type > static_cast<int64_t>(Type::kU8)) return false;
  *to = static_cast<Type>(type);
  *offset = *at;
  *at += count * kTile * kBytes[type];
  return true;
}

// Whether a buffer has `shape` for each of `groups` groups; -1: without an axis of groups.
inline bool is_grouped(const ffi::AnyBuffer& data, int64_t groups, std::vector<int64_t> shape) {
  if (groups >= 0) shape.insert(shape.begin(), groups);
  const auto dims = data.dimensions();
  return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end());
}

// bits 0: dense, else 4 or 8; see `_fields` in matmul.py for the rest.
inline bool read_weight(const ffi::AnyBuffer& data, const int64_t* fields, int64_t groups, int64_t C,
                        int64_t R, Weight* w) {
  const int64_t bits = fields[0];
  w->group = fields[1];
  w->block = fields[2];
  w->zero_point = static_cast<int32_t>(fields[3]);
  w->R = R;
  w->data = data.untyped_data();
  w->packed = bits != 0;
  if (!w->packed) {
    if (!to_type(data.element_type(), &w->type)) return false;
    w->bytes = R * C * (w->type == Type::kF32 ? 4 : 2);
    return is_grouped(data, groups, {R, C});
  }
  if (bits != 4 && bits != 8) return false;
  const bool table = fields[10] != 0 || fields[11] != 0;
  if (table && (bits != 4 || fields[7] >= 0)) return false;
  w->code = bits == 8 ? Code::kByte : table ? Code::kTable : Code::kNibble;
  std::memcpy(w->table, fields + 10, sizeof(w->table));
  if (w->block <= 0 || w->block > kMaxBlock || w->block % (bits == 8 ? 4 : 8)) return false;
  if (w->group <= 0 || w->group > C || w->group % w->block) return false;
  if (w->zero_point < 0 || w->zero_point > 255) return false;
  Record& r = w->record;
  r.each = fields[4];
  r.supers = fields[5];
  if (r.each <= 0 || r.each > C || r.supers <= 0 || r.each % r.supers) return false;
  const int64_t columns = r.each * w->group;
  if (C % columns) return false;
  if (w->code == Code::kNibble && fields[7] >= 0 && w->zero_point != 0) return false;
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
  const int64_t tiles = (R + kTile - 1) / kTile, records = C / columns;
  w->bytes = tiles * records * r.bytes;
  return data.element_type() == ffi::DataType::U8 &&
         is_grouped(data, groups, {tiles, records, r.bytes});
}

}  // namespace stoker
