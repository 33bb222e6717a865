// All kernels of the instruction set that the including file chose, and their table.
#include "rows.inc.h"
#include "product.inc.h"
#include "dense.inc.h"
#include "math.inc.h"
#include "blocks.inc.h"
#include "attend.inc.h"
#include "sample.inc.h"

namespace stoker::STOKER_ISA {

// A kernel's instances for what the flags say, by number of tiles and rows.
#define STOKER_TILE_FNS(kernel, ...)              \
  {{kernel<__VA_ARGS__, 1, kCounts + 1>...}, {    \
    kernel<__VA_ARGS__, kProductTiles, kCounts + 1>...}}
// Without and with scales that are halves.
#define STOKER_PRODUCTS(code, minimum)                       \
  {STOKER_TILE_FNS(product, Code::code, minimum, false),     \
   STOKER_TILE_FNS(product, Code::code, minimum, kReadsHalves)}

template <int... kCounts>
static Kernels make_table(std::integer_sequence<int, kCounts...>) {
  return Kernels{
      quantize,
      quantize_row,
      interleave,
      expand,
      kReadsHalves,
      kProductTiles,
      {{STOKER_PRODUCTS(kNibble, false), STOKER_PRODUCTS(kNibble, true)},
       {STOKER_PRODUCTS(kByte, false), STOKER_PRODUCTS(kByte, true)},
       {STOKER_PRODUCTS(kTable, false), {}}},
      {{STOKER_TILE_FNS(exact, Code::kNibble, false), STOKER_TILE_FNS(exact, Code::kNibble, true)},
       {STOKER_TILE_FNS(exact, Code::kByte, false), STOKER_TILE_FNS(exact, Code::kByte, true)},
       {STOKER_TILE_FNS(exact, Code::kTable, false), {}}},
      {{dense<float, kCounts + 1>...},
       {dense<Bf16, kCounts + 1>...},
       {dense<Half, kCounts + 1>...}},
      {attend<float>, attend<Bf16>, nullptr, attend<int8_t>},
      nullptr,
      merge,
      scale,
      rotate,
      store_bf16,
      gated,
      rms_norm,
      mix,
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
