// Choosing a token for each row of logits, and the largest of each row.
#pragma once

#include <cstdint>

#include "edit.h"
#include "kernels.h"
#include "parallel.h"

namespace stoker {

// As of models/ops/xla/sample.py, which says what it means.
struct Sample {
  const float* logits;       // [B, V]
  const int32_t* slots;      // [B], rows of what follows with S; from S on, the last
  const int32_t* positions;  // [B]
  const float* uniform;      // [B]
  const float* temperature;  // [S]; at most 0: the best token
  const int32_t* top_k;      // [S]; at most 0: all
  const float* top_p;        // [S]
  const float* min_p;        // [S]
  Edits edits;
  int64_t B, S, V;
  int32_t* token;  // [B]
  float* total;    // [B], log of the summed exponentials of the logits before edits
};

void sample(Pool& pool, const Kernels& kernels, const Sample& s);

// `Sample::total` alone.
void logsumexp(Pool& pool, const Kernels& kernels, const float* logits, int64_t B, int64_t V,
               float* total);

struct Largest {
  const float* logits;  // [B, V]
  const bool* wanted;   // [B]
  int64_t B, V, count;
  float* value;  // [B, count], falling; -inf where there is none
  int32_t* id;   // [B, count], of equal values the smaller first; -1 where there is none
};

void largest(Pool& pool, const Kernels& kernels, const Largest& l);

}  // namespace stoker
