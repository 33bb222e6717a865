// Runs the kernels on odd shapes under the address and undefined-behaviour sanitizers, on every
// instruction set of this processor, with real threads. Each buffer has exactly its own size, so
// one element too far is found. Built and run by tests/models/ops/cpu/test_native.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "attends.h"
#include "edit.h"
#include "groups.h"
#include "harness.h"
#include "matmul.h"
#include "requests.h"
#include "routes.h"
#include "sample.h"

namespace {

struct Shape {
  int64_t T, C, R, group, block;
  bool byte_codes, minimum, super, halves, table = false;
};

void check_product(Random& random, const Kernels& table, const char* name, const Shape& s) {
  const int64_t tiles = (s.R + kTile - 1) / kTile, groups = s.C / s.group;
  Weight w;
  w.packed = true;
  w.code = s.byte_codes ? Code::kByte : s.table ? Code::kTable : Code::kNibble;
  for (int i = 0; i < 16; ++i) w.table[i] = static_cast<uint8_t>(i * i % 128);
  w.R = s.R;
  w.group = s.group;
  w.block = s.block;
  w.zero_point = s.byte_codes ? 128 : s.minimum ? 0 : 8;
  // A record: factors, scales, minima, codes.
  Record& r = w.record;
  r.each = groups % 2 ? 1 : 2;
  r.supers = 1;
  int64_t at = 0;
  const auto take = [&](int64_t count, int64_t bytes) {
    const int64_t offset = at;
    at += count * kTile * bytes;
    return offset;
  };
  if (s.super) {
    r.scale.factored = true;
    r.scale.super_offset = take(r.supers, 4);
  }
  r.scale.given = true;
  r.scale.type = s.super ? Type::kI8 : s.halves ? Type::kF16 : Type::kF32;
  const int64_t width = s.super ? 1 : s.halves ? 2 : 4;
  r.scale.offset = take(r.each, width);
  if (s.minimum) {
    r.minimum.given = true;
    r.minimum.type = s.halves ? Type::kF16 : Type::kF32;
    r.minimum.offset = take(r.each, s.halves ? 2 : 4);
  }
  r.codes = at;
  const int64_t code_bytes = r.each * s.group * kTile / (s.byte_codes ? 1 : 2);
  r.bytes = at + code_bytes;
  const int64_t records = groups / r.each, tile_bytes = records * r.bytes;
  Exact<uint8_t> data(tiles * tile_bytes);
  std::vector<double> unit(static_cast<size_t>(tiles * groups * kTile)), least(unit.size());
  // Halves that are whole 1024ths have few bits: their exponent is all there is to write.
  const auto put = [&](uint8_t* to, bool half) {
    const float value = half ? 0.5f + static_cast<float>(random.bits() % 2) * 0.25f : random.real();
    const uint16_t bits = value == 0.5f ? 0x3800 : 0x3a00;
    std::memcpy(to, half ? static_cast<const void*>(&bits) : &value, half ? 2 : 4);
    return static_cast<double>(value);
  };
  for (int64_t i = 0; i < tiles * records; ++i) {
    uint8_t* record = data.get() + i * r.bytes;
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const double factor = s.super ? put(record + r.scale.super_offset + lane * 4, false) : 1;
      for (int64_t g = 0; g < r.each; ++g) {
        const size_t cell = static_cast<size_t>((i * r.each + g) * kTile + lane);
        uint8_t* to = record + r.scale.offset + (g * kTile + lane) * width;
        if (s.super) {
          *to = static_cast<uint8_t>(random.bits() % 64);
          unit[cell] = *to * factor;
        } else {
          unit[cell] = put(to, s.halves);
        }
        if (!s.minimum) continue;
        const int64_t bytes = s.halves ? 2 : 4;
        least[cell] = put(record + r.minimum.offset + (g * kTile + lane) * bytes, s.halves);
      }
    }
    for (int64_t c = 0; c < code_bytes; ++c) {
      record[r.codes + c] = static_cast<uint8_t>(random.bits());
    }
  }
  w.data = data.get();

  const int64_t starts[] = {0, s.T};
  const std::vector<float> x = random.reals(s.T * s.C);
  const auto weight = [&](int64_t row, int64_t c) {
    const int64_t tile = row / kTile, lane = row % kTile, half = s.block / 2;
    const int64_t columns = r.each * s.group, record = c / columns;
    const int64_t block = c % columns / s.block, in = c % columns % s.block;
    const int64_t quad = s.byte_codes ? c % columns / 4 : block * s.block / 8 + in % half / 4;
    const uint8_t* codes = data.get() + tile * tile_bytes + record * r.bytes + r.codes;
    const uint8_t byte = codes[quad * 64 + lane * 4 + c % 4];
    const int stored = s.byte_codes ? byte : in < half ? byte & 15 : byte >> 4;
    const int code = s.table ? w.table[stored] : stored;
    const size_t cell = static_cast<size_t>((tile * groups + c / s.group) * kTile + lane);
    return (code - w.zero_point) * unit[cell] + least[cell];
  };
  for (const bool exact : {false, true}) {
    for (const int64_t threads : {1, 3}) {
      Exact<float> out(s.T * s.R);
      w.out = out.get();
      const Input input{x.data(), nullptr, Before::kNothing, 0};
      Exact<uint8_t> scratch(
          static_cast<int64_t>(scratch_bytes(&w, 1, s.T, s.C, input.before, exact)));
      {
        Threads pool(threads);
        multiply(pool, table, input, {starts, 1}, s.C, &w, 1, exact, scratch.get());
      }
      double worst = 0, largest = 0;
      for (int64_t t = 0; t < s.T; ++t) {
        for (int64_t r = 0; r < s.R; ++r) {
          double want = 0, size = 0;
          for (int64_t c = 0; c < s.C; ++c) {
            const double term = weight(r, c) * x[static_cast<size_t>(t * s.C + c)];
            want += term;
            size += std::fabs(term);
          }
          worst = std::max(worst, std::fabs(out.get()[t * s.R + r] - want));
          largest = std::max(largest, size);
        }
      }
      const double slack = (exact ? 1e-5 : 1e-2) * largest + 1e-6;
      expect(worst <= slack, exact ? "exact" : "int8", name, worst);
    }
  }
}

void check_dense(Random& random, const Kernels& table, const char* name, int64_t T, int64_t C,
                 int64_t R) {
  Exact<float> weight(R * C);
  Exact<uint16_t> narrow(R * C);
  for (int64_t i = 0; i < R * C; ++i) {
    // Values that bfloat16 holds, in both widths.
    uint32_t bits;
    const float value = random.real();
    std::memcpy(&bits, &value, 4);
    narrow.get()[i] = static_cast<uint16_t>(bits >> 16);
    bits &= 0xffff0000u;
    std::memcpy(weight.get() + i, &bits, 4);
  }
  const std::vector<float> x = random.reals(T * C);
  for (const Type type : {Type::kF32, Type::kBF16}) {
    Exact<float> out(T * R);
    Weight w;
    w.type = type;
    w.data = type == Type::kF32 ? static_cast<void*>(weight.get()) : narrow.get();
    w.R = R;
    w.out = out.get();
    {
      Threads pool(2);
      const int64_t starts[] = {0, T};
      const Input input{x.data(), nullptr, Before::kNothing, 0};
      multiply(pool, table, input, {starts, 1}, C, &w, 1, false, nullptr);
    }
    double worst = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t r = 0; r < R; ++r) {
        double want = 0;
        for (int64_t c = 0; c < C; ++c) {
          want += static_cast<double>(weight.get()[r * C + c]) * x[static_cast<size_t>(t * C + c)];
        }
        worst = std::max(worst, std::fabs(out.get()[t * R + r] - want));
      }
    }
    expect(worst < 1e-5 * static_cast<double>(C), "dense", name, worst);
  }
}

void check_edit(Random& random, int64_t V) {
  for (const int64_t C : {0, 1, 50, 3000}) {
    Requests requests(random, 12, V, C);
    for (int64_t s = 0; s < requests.S; ++s) {
      Exact<float> logits(V), edited(V);
      for (int64_t v = 0; v < V; ++v) logits.get()[v] = edited.get()[v] = 3 * random.real();
      const int64_t position = C - s % 2 * (C / 4);
      edit(requests.edits(), s, position, edited.get(), V);
      bool same = true, changed = false;
      for (int64_t v = 0; v < V; ++v) {
        same = same && edited.get()[v] == requests.expected(s, position, v, logits.get()[v]);
        changed = changed || edited.get()[v] != logits.get()[v];
      }
      expect(same, "edit", "of slot", static_cast<double>(s));
      expect(!changed || wants_edits(requests.edits(), s, position), "wants_edits", "of slot",
             static_cast<double>(s));
    }
  }
}

// Rows of width V through every filter, plain or edited: greedy against a plain loop, draws within
// what may be drawn.
void check_sample(Random& random, const Kernels& table, const char* name, int64_t V) {
  const int64_t B = 12, C = 20;
  Exact<float> logits(B * V), temperature(B), top_p(B), min_p(B), uniform(B), total(B), sums(B);
  Exact<int32_t> top_k(B), token(B), slots(B), positions(B);
  Requests requests(random, B, V, C);
  for (int64_t i = 0; i < B * V; ++i) logits.get()[i] = 3 * random.real();
  for (int64_t r = 0; r < B; ++r) {
    temperature.get()[r] = static_cast<float>(r % 3);
    top_k.get()[r] = static_cast<int32_t>(r % 4 == 1 ? 5 : 0);
    top_p.get()[r] = r % 4 == 2 ? 0.5f : 1.0f;
    min_p.get()[r] = r % 4 == 3 ? 0.5f : 0.0f;
    uniform.get()[r] = static_cast<float>(r) / static_cast<float>(B);
    slots.get()[r] = static_cast<int32_t>(r == B - 1 ? B + 5 : r);
    positions.get()[r] = static_cast<int32_t>(C);
  }
  // One row of equal logits, one of nothing, one that is broken.
  for (int64_t i = 0; i < V; ++i) {
    logits.get()[5 * V + i] = 1.0f;
    logits.get()[7 * V + i] = -std::numeric_limits<float>::infinity();
  }
  logits.get()[8 * V + V / 2] = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t threads : {1, 3}) {
    {
      Threads pool(threads);
      Sample s{logits.get(),      slots.get(), positions.get(), uniform.get(),
               temperature.get(), top_k.get(), top_p.get(),     min_p.get(),
               requests.edits(),  B,           B,               V,
               token.get(),       total.get()};
      sample(pool, table, s);
      logsumexp(pool, table, logits.get(), B, V, sums.get());
    }
    for (int64_t r = 0; r < B; ++r) {
      std::vector<float> row(logits.get() + r * V, logits.get() + (r + 1) * V);
      for (int64_t i = 0; i < V; ++i) {
        row[static_cast<size_t>(i)] = requests.expected(r, C, i, row[static_cast<size_t>(i)]);
      }
      const int64_t best = std::max_element(row.begin(), row.end()) - row.begin();
      const int32_t chosen = token.get()[r];
      expect(chosen >= 0 && chosen < V, "sample in range", name, chosen);
      expect(std::isfinite(total.get()[r]) == (r != 7 && r != 8), "sample total", name, total.get()[r]);
      if (r == 7 || r == 8) continue;
      expect(total.get()[r] == sums.get()[r], "logsumexp", name, sums.get()[r]);
      if (r % 3 == 0) expect(chosen == best, "sample greedy", name, chosen);
      int64_t larger = 0;
      for (const float x : row) larger += x > row[static_cast<size_t>(chosen)];
      if (r % 4 == 1) expect(larger < 5, "sample top_k", name, static_cast<double>(larger));
    }
  }
  const int64_t count = 9;
  Exact<float> value(B * count);
  Exact<int32_t> id(B * count);
  Exact<bool> wanted(B);
  for (int64_t r = 0; r < B; ++r) wanted.get()[r] = r % 5 != 0;
  {
    Threads pool(2);
    largest(pool, table, {logits.get(), wanted.get(), B, V, count, value.get(), id.get()});
  }
  for (int64_t r = 0; r < B; ++r) {
    if (r == 7) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t at = id.get()[r * count + i];
      const bool none = r % 5 == 0 || r == 8 || i >= V;
      expect(none ? at == -1 : logits.get()[r * V + at] == value.get()[r * count + i], "largest",
             name, at);
    }
  }
}

}  // namespace

int main() {
  const char* names[] = {"best", "portable", "avx2", "avx512vnni"};
  Random random;
  for (const int64_t V : {1, 15, 32, 33, 700}) check_edit(random, V);
  for (int isa = 1; isa <= static_cast<int>(best_isa()); ++isa) {
    const Kernels* table = kernels(static_cast<Isa>(isa));
    if (!table) continue;
    for (const Shape& shape : {
             Shape{1, 32, 16, 32, 32, false, false, false, true},
             Shape{9, 64, 17, 32, 32, false, true, false, true},
             Shape{8, 256, 33, 16, 16, true, false, true, false},
             Shape{13, 60, 5, 12, 12, true, true, false, false},
             Shape{3, 144, 31, 24, 24, false, true, false, true},
             Shape{2, 128, 1, 64, 32, false, false, true, false},
             Shape{33, 2304, 18, 32, 32, false, true, false, false},
             Shape{70, 512, 70, 32, 32, true, false, false, true},
             Shape{9, 96, 33, 32, 32, false, false, false, true, true},
             Shape{5, 144, 17, 24, 24, false, false, false, false, true},
         }) {
      check_product(random, *table, names[isa], shape);
    }
    check_groups(random, *table, names[isa]);
    check_experts(random, *table, names[isa]);
    for (const int64_t C : {1, 7, 16, 33, 100}) check_dense(random, *table, names[isa], 11, C, 21);
    for (const Sizes& sizes : {
             Sizes{9, 3, 64, 16, 0, 0.0f, Type::kF32},
             Sizes{9, 3, 64, 16, 0, 0.0f, Type::kBF16},
             Sizes{5, 1, 104, 16, 40, 0.0f, Type::kBF16},
             Sizes{4, 4, 80, 48, 16, 0.0f, Type::kF32},
             Sizes{4, 2, 13, 32, 270, 3.0f, Type::kBF16},
             Sizes{2, 1, 512, 32, 0, 0.0f, Type::kBF16},
             Sizes{3, 1, 1, 16, 1, 0.0f, Type::kF32},
             Sizes{9, 3, 64, 16, 0, 0.0f, Type::kI8},
             Sizes{4, 2, 13, 32, 270, 3.0f, Type::kI8},
         }) {
      check_attention(random, *table, names[isa], sizes);
    }
    for (const int64_t V : {1, 15, 16, 17, 512, 700, 3000}) check_sample(random, *table, names[isa], V);
    std::printf("%s done\n", names[isa]);
  }
  return failures != 0;
}
