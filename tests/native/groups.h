// Products of grouped rows, against the same rows alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "harness.h"
#include "matmul.h"

namespace {

// Rows of groups, some without any, through a gate, a packed and a dense weight, must have the bits
// of each row alone. Matrices of the first and the last group, which are idle, are not even there.
void check_groups(Random& random, const Kernels& table, const char* name) {
  const int64_t C = 64, R = 37, E = 6, T = 23, tiles = (R + kTile - 1) / kTile;
  const int64_t starts[E + 1] = {0, 0, 9, 9, 10, T, T};
  const int64_t record = kTile * 4 + 32 * kTile, bytes = tiles * (C / 32) * record;
  Exact<uint8_t> codes(4 * bytes);  // of groups 1 to 4: 0 and 5 are idle
  for (int64_t i = 0; i < 4 * bytes; i += record) {
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const float scale = random.real();
      std::memcpy(codes.get() + i + 4 * lane, &scale, 4);
    }
    for (int64_t c = kTile * 4; c < record; ++c) codes.get()[i + c] = static_cast<uint8_t>(random.bits());
  }
  Exact<float> dense(4 * R * C), bias(E * R);
  for (int64_t i = 0; i < 4 * R * C; ++i) dense.get()[i] = random.real();
  for (int64_t i = 0; i < E * R; ++i) bias.get()[i] = random.real();
  const std::vector<float> x = random.reals(T * C), up = random.reals(T * C);
  Weight packed;
  packed.packed = true;
  packed.code = Code::kByte;
  packed.group = packed.block = 32;
  packed.zero_point = 128;
  packed.record.scale.given = true;
  packed.record.codes = kTile * 4;
  packed.record.bytes = record;
  packed.data = codes.get() - bytes;
  packed.bytes = bytes;
  packed.R = R;
  packed.bias = bias.get();
  Weight plain;
  plain.data = dense.get() - R * C;
  plain.bytes = R * C * 4;
  plain.R = R;
  for (const bool exact : {false, true}) {
    Exact<float> out(2 * T * R), alone(2 * R);
    Weight both[2] = {packed, plain};
    const auto run = [&](int64_t threads, const Groups& groups, int64_t first, float* to) {
      const int64_t rows = groups.starts[groups.count];
      both[0].out = to;
      both[1].out = to + rows * R;
      const Input input{x.data() + first * C, up.data() + first * C, Before::kClamped, 0};
      Exact<uint8_t> scratch(
          static_cast<int64_t>(scratch_bytes(both, 2, rows, C, input.before, exact)));
      Threads pool(threads);
      multiply(pool, table, input, groups, C, both, 2, exact, scratch.get());
    };
    run(3, {starts, E}, 0, out.get());
    bool same = true;
    for (int64_t t = 0; t < T; ++t) {
      int64_t one[E + 1] = {};
      for (int64_t i = 0; i <= E; ++i) one[i] = starts[i] > t;
      run(1, {one, E}, t, alone.get());
      for (int64_t r = 0; r < R; ++r) {
        same = same && alone.get()[r] == out.get()[t * R + r];
        same = same && alone.get()[R + r] == out.get()[(T + t) * R + r];
      }
    }
    expect(same, exact ? "exact groups" : "groups", name, 0);
    // Rows that are gathered, here backwards and the last thrice, as rows that lie so.
    Exact<int32_t> from(T);
    Exact<float> gathered(T * C), want(2 * T * R);
    for (int64_t t = 0; t < T; ++t) {
      from.get()[t] = static_cast<int32_t>(std::min<int64_t>(T - 1, T + 1 - t));
      std::copy_n(x.data() + from.get()[t] * C, C, gathered.get() + t * C);
    }
    const auto multiplied = [&](const Input& input, float* to) {
      both[0].out = to;
      both[1].out = to + T * R;
      Exact<uint8_t> scratch(
          static_cast<int64_t>(scratch_bytes(both, 2, T, C, input.before, exact)));
      Threads pool(3);
      multiply(pool, table, input, {starts, E}, C, both, 2, exact, scratch.get());
    };
    multiplied({gathered.get(), nullptr, Before::kNothing, 0}, want.get());
    multiplied({x.data(), nullptr, Before::kRows, 0, from.get()}, out.get());
    expect(std::equal(want.get(), want.get() + 2 * T * R, out.get()), "gathered rows", name, 0);
  }
}

}  // namespace
