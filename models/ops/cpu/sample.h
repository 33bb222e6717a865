// Choosing a token for each row of logits, and the largest of each row.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "parallel.h"

namespace stoker {

// As of models/ops/xla/sample.py, which says what it means.
struct Sample {
  const float* logits;       // [B, V]
  const float* temperature;  // [B]; at most 0: the best token
  const int32_t* top_k;      // [B]; at most 0: all
  const float* top_p;        // [B]
  const float* min_p;        // [B]
  const float* uniform;      // [B]
  int64_t B, V;
  int32_t* token;  // [B]
  float* total;    // [B], log of the summed exponentials
};

void sample(Pool& pool, const Kernels& kernels, const Sample& s);

struct Largest {
  const float* logits;  // [B, V]
  const bool* wanted;   // [B]
  int64_t B, V, count;
  float* value;  // [B, count], falling; -inf where there is none
  int32_t* id;   // [B, count], of equal values the smaller first; -1 where there is none
};

void largest(Pool& pool, const Kernels& kernels, const Largest& l);

}  // namespace stoker
