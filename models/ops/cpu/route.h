// What goes on around a mixture of experts, and norms of rows.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "parallel.h"

namespace stoker {

// Which experts each row goes to, as of models/ops/xla/routing.py, which says what it means.
struct Route {
  const float* logits;  // [T, E]
  const float* bias;    // [E], added to scores for the choice alone; null: none
  int64_t T, E, count;  // of E experts, `count` for each row
  bool sigmoid;         // scores; else the softmax
  bool normalise;
  int64_t groups, used_groups, group_top;  // groups divides E
  float scale;
  float* share;     // [T, count]
  int32_t* chosen;  // [T, count], of equal scores the smaller first
};

void route(Pool& pool, const Route& r);

// Sorts pairs of a row and one of its experts by expert; those of equal experts keep their order.
struct Deal {
  const int32_t* chosen;  // [T, count]
  int64_t T, count;
  int64_t first, held;  // experts [first, first + held); pairs of others come last
  int32_t* row;         // [T * count], the row of each pair in the new order
  int32_t* place;       // [T, count], where in it each pair is
  int32_t* size;        // [held], pairs of each expert
};

void deal(const Deal& d);

// Sums of rows, weighted: out[t] = sum over j of share[t, j] * x[place[t, j]], in order of j.
struct Combine {
  const float* x;        // [N, D]
  const int32_t* place;  // [T, count], each in [0, N)
  const float* share;    // [T, count]
  int64_t T, count, D;
  float* out;  // [T, D]
};

void combine(Pool& pool, const Kernels& kernels, const Combine& c);

// The RMS norm of each row of x [T, D], times weight [D].
void rms_norm(Pool& pool, const Kernels& kernels, const float* x, const float* weight, int64_t T,
              int64_t D, float eps, float* out);

}  // namespace stoker
