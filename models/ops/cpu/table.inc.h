// All kernels of the instruction set that the including file chose, and their table.
#include "rows.inc.h"
#include "product.inc.h"
#include "dense.inc.h"
#include "math.inc.h"
#include "attend.inc.h"

namespace stoker::STOKER_ISA {

template <int... kCounts>
static Kernels make_table(std::integer_sequence<int, kCounts...>) {
  return Kernels{
      kByteBias,
      quantize,
      interleave,
      expand,
      {{{product<false, false, kCounts + 1>...}, {product<false, true, kCounts + 1>...}},
       {{product<true, false, kCounts + 1>...}, {product<true, true, kCounts + 1>...}}},
      {{{exact<false, false, kCounts + 1>...}, {exact<false, true, kCounts + 1>...}},
       {{exact<true, false, kCounts + 1>...}, {exact<true, true, kCounts + 1>...}}},
      {{dense<float, kCounts + 1>...}, {dense<Bf16, kCounts + 1>...}, {dense<Half, kCounts + 1>...}},
      {attend<float>, attend<Bf16>, attend<Half>},
      merge,
      scale,
      store_bf16,
      gated,
      rms_norm,
  };
}

const Kernels& table() {
  static const Kernels all = make_table(std::make_integer_sequence<int, kMaxRows>{});
  return all;
}

}  // namespace stoker::STOKER_ISA
