// Chooses an instruction set by what the processor says it has.
#include "kernels.h"

namespace stoker {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// The table of AVX-512, and what only some processors with it have.
const Kernels& avx512_table() {
  static const Kernels all = [] {
    Kernels table = avx512::table();
    if (__builtin_cpu_supports("avx512bf16")) table.attend_rounded = avx512_bf16::attend_rounded;
    return table;
  }();
  return all;
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

}  // namespace

Isa best_isa() {
  static const Isa best = has_avx512() ? Isa::kAvx512 : has_avx2() ? Isa::kAvx2 : Isa::kPortable;
  return best;
}

const Kernels* kernels(Isa isa) {
  const Isa best = best_isa();
  if (isa == Isa::kBest) isa = best;
  if (isa > best) return nullptr;
  switch (isa) {
    case Isa::kPortable:
      return &portable::table();
#if defined(__x86_64__)
    case Isa::kAvx2:
      return &avx2::table();
    case Isa::kAvx512:
      return &avx512_table();
#endif
    default:
      return nullptr;
  }
}

}  // namespace stoker
