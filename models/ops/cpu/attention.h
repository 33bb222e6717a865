// Paged grouped-query attention: append, then attend over live pages.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"
#include "parallel.h"

namespace stoker {

// Shapes as in models/ops/layout.py; see there for the meaning of the layout.
struct Attention {
  const float* q;  // [T, N, H]
  const float* k;  // [T, K, H]
  const float* v;
  const float* cos;  // [T, half]: what q and k are turned by on their way; see Kernels::rotate
  const float* sin;
  int64_t half;
  void* k_pages;   // [P, K, H, Z], updated in place; Z is a multiple of kKeys. Null: keys are the
                   // values, as of latent attention, with K = 1; then `k` is not looked at
  void* v_pages;   // [P, K, Z, H], likewise
  float* k_scales;  // [P, K, Z] of kI8 pages, what their codes are times, likewise; else null
  float* v_scales;
  Type type;       // of the pages: kF32, kBF16, or kI8 where keys are not the values
  const int32_t* query_start;  // [S + 1]
  const int32_t* kv_lens;      // [S]
  const int32_t* page_table;   // [S, M]
  int64_t T, N, K, H, S, M, P, Z;
  int64_t window;  // tokens that a row sees, itself included; 0: all
  float softcap;   // 0: none
  float scale;
  int64_t rank;        // of latent attention: elements before those that cos and sin turn
  const float* norm;   // [rank] of it: what these go through an RMS norm with; null: none
  float eps;
  const float* sinks;  // [N] scores that weigh in every softmax and have no value; null: none
  bool rounded;    // queries and weights may be rounded to bfloat16 where pages are
  float* out;      // [T, N, H]
  // Of several: pages hold the Z tokens of each `shares * Z` from share * Z on, and rows see those
  // alone. A row is appended where it belongs to them.
  int64_t share = 0, shares = 1;
  float* lse = nullptr;  // [T, N] logarithms of summed exponentials, kNothing of no score; null:
                         // not wanted, and every row sees something
};

constexpr float kNothing = -1e30f;

// Empty, or what is wrong with the layout; then nothing has been written.
std::string attend(Pool& pool, const Kernels& kernels, const Attention& a);

}  // namespace stoker
