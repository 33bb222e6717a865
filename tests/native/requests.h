// Edits of logits that rows ask for, and what should come of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "edit.h"
#include "harness.h"

namespace {

// What every kind of row asks for, and a loop over the vocabulary that does the same.
struct Requests {
  explicit Requests(Random& random, int64_t S, int64_t V, int64_t C)
      : S(S), V(V), C(C), W((V + 31) / 32), history(S * C), prompt_lens(S), min_lens(S),
        bias_ids(S * N), end_ids(S * E), repetition(S), presence(S), frequency(S),
        bias_values(S * N), allowed(S * W), has_mask(S) {
    const auto token = [&] { return static_cast<int32_t>(std::fabs(random.real()) * 1e6f) % V; };
    for (int64_t i = 0; i < S * C; ++i) history.get()[i] = static_cast<int32_t>(token() / (1 + i % 3));
    for (int64_t s = 0; s < S; ++s) {
      prompt_lens.get()[s] = static_cast<int32_t>(C / 3);
      min_lens.get()[s] = static_cast<int32_t>(s % 3 == 1 ? C + 9 : 0);
      repetition.get()[s] = s % 4 < 2 ? 1.5f : 1.0f;
      presence.get()[s] = s % 3 == 0 ? 0.5f : 0.0f;
      frequency.get()[s] = s % 5 == 0 ? -0.25f : 0.0f;
      has_mask.get()[s] = s % 6 == 2;
      for (int64_t i = 0; i < N; ++i) {
        bias_ids.get()[s * N + i] = static_cast<int32_t>(s % 2 == 1 && i < V ? i : -1);
        bias_values.get()[s * N + i] = random.real();
      }
      for (int64_t i = 0; i < E; ++i) end_ids.get()[s * E + i] = static_cast<int32_t>(V - 1);
      for (int64_t w = 0; w < W; ++w) {
        uint32_t word = has_mask.get()[s] ? 0x5A0FF001u : ~0u;
        if (w == W - 1 && V % 32) word &= (1u << V % 32) - 1;
        allowed.get()[s * W + w] = word;
      }
    }
  }

  Edits edits() {
    return {history.get(),   prompt_lens.get(), repetition.get(), presence.get(),
            frequency.get(), bias_ids.get(),    bias_values.get(), allowed.get(),
            has_mask.get(),  end_ids.get(),     min_lens.get(),    C,
            N,               E};
  }

  float expected(int64_t s, int64_t position, int64_t v, float x) {
    for (int64_t i = 0; i < N; ++i) {
      if (bias_ids.get()[s * N + i] == v) x += bias_values.get()[s * N + i];
    }
    int64_t known = 0, said = 0;
    for (int64_t i = 0; i < position; ++i) {
      const bool same = history.get()[s * C + i] == v;
      known += same;
      said += same && i >= prompt_lens.get()[s];
    }
    if (known > 0) x = x < 0 ? x * repetition.get()[s] : x / repetition.get()[s];
    x = x - frequency.get()[s] * static_cast<float>(said);
    if (said > 0) x = x - presence.get()[s];
    const bool closed = position < min_lens.get()[s] && V > 1 && v == V - 1;
    const bool open = allowed.get()[s * W + v / 32] >> v % 32 & 1;
    // The mask's first token is never an end, where there are two.
    return open && !closed ? x : -std::numeric_limits<float>::infinity();
  }

  static constexpr int64_t N = 7, E = 2;
  int64_t S, V, C, W;
  Exact<int32_t> history, prompt_lens, min_lens, bias_ids, end_ids;
  Exact<float> repetition, presence, frequency, bias_values;
  Exact<uint32_t> allowed;
  Exact<bool> has_mask;
};

}  // namespace
