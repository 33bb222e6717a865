// What requests change in a row of logits before a token is drawn.
#pragma once

#include <cstdint>

namespace stoker {

// One row for each slot; as of `Sampling` in models/ops/sampling.py, which says what they mean.
struct Edits {
  const int32_t* history;      // [S, C]
  const int32_t* prompt_lens;  // [S]
  const float* repetition;     // [S]
  const float* presence;       // [S]
  const float* frequency;      // [S]
  const int32_t* bias_ids;     // [S, N]; below 0: none
  const float* bias_values;    // [S, N]
  const uint32_t* allowed;     // [S, ceil(V / 32)]
  const bool* has_mask;        // [S]
  const int32_t* end_ids;      // [S, E]; below 0: none
  const int32_t* min_lens;     // [S]
  int64_t C, N, E;
};

// Whether the token at `position` of a slot is drawn from other logits than the model's.
bool wants_edits(const Edits& edits, int64_t slot, int64_t position);

// Edits logits [V] in place: biases, penalties, bans, in the order of models/ops/xla/edit.py and
// with its roundings.
void edit(const Edits& edits, int64_t slot, int64_t position, float* logits, int64_t V);

}  // namespace stoker
