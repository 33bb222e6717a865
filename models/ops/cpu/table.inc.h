// All kernels of the instruction set that the including file chose, and their table.
#include "rows.inc.h"
#include "product.inc.h"
#include "dense.inc.h"
#include "math.inc.h"
#include "attend.inc.h"
#include "sample.inc.h"

namespace stoker::STOKER_ISA {

// The kernels for kByte and kMinimum by number of tiles and rows.
#define STOKER_TILE_FNS(kernel, byte, minimum)          \
  {{kernel<byte, minimum, 1, kCounts + 1>...}, {        \
    kernel<byte, minimum, kProductTiles, kCounts + 1>...}}

template <int... kCounts>
static Kernels make_table(std::integer_sequence<int, kCounts...>) {
  return Kernels{
      kByteBias,
      quantize,
      interleave,
      expand,
      kProductTiles,
      {{STOKER_TILE_FNS(product, false, false), STOKER_TILE_FNS(product, false, true)},
       {STOKER_TILE_FNS(product, true, false), STOKER_TILE_FNS(product, true, true)}},
      {{STOKER_TILE_FNS(exact, false, false), STOKER_TILE_FNS(exact, false, true)},
       {STOKER_TILE_FNS(exact, true, false), STOKER_TILE_FNS(exact, true, true)}},
      {{dense<float, kCounts + 1>...},
       {dense<Bf16, kCounts + 1>...},
       {dense<Half, kCounts + 1>...}},
      {attend<float>, attend<Bf16>, attend<Half>},
      merge,
      scale,
      rotate,
      store_bf16,
      gated,
      rms_norm,
      peak,
      tally,
      mass,
      weigh,
      find,
  };
}

const Kernels& table() {
  static const Kernels all = make_table(std::make_integer_sequence<int, kMaxRows>{});
  return all;
}

}  // namespace stoker::STOKER_ISA
