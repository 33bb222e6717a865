// The arithmetic peak: products of registers, with nothing to load. Timed by the caller.

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Chains that do not wait for each other, enough to hide any latency.
constexpr int kChains = 12;

#if defined(__x86_64__)

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) int64_t Int8Avx512(int64_t rounds,
                                                                                  int seed) {
  __m512i sums[kChains] = {};
  const __m512i a = _mm512_set1_epi8(static_cast<char>(seed | 1));
  const __m512i b = _mm512_set1_epi8(static_cast<char>(seed | 2));
  for (int64_t i = 0; i < rounds; ++i) {
    for (__m512i& sum : sums) {
      sum = _mm512_dpbusd_epi32(sum, a, b);
      asm volatile("" : "+v"(sum));
    }
  }
  return rounds * kChains * 128;
}

__attribute__((target("avx512f"))) int64_t Float32Avx512(int64_t rounds, int seed) {
  __m512 sums[kChains] = {};
  const __m512 a = _mm512_set1_ps(static_cast<float>(seed));
  for (int64_t i = 0; i < rounds; ++i) {
    for (__m512& sum : sums) {
      sum = _mm512_fmadd_ps(a, a, sum);
      asm volatile("" : "+v"(sum));
    }
  }
  return rounds * kChains * 32;
}

// As for nibbles: eight products are summed in 16 bits before they are widened.
__attribute__((target("avx2"))) int64_t Int8Avx2(int64_t rounds, int seed) {
  constexpr int kNarrow = 8;
  __m256i sums[kChains / 2] = {}, wide[kChains / 2] = {};
  const __m256i a = _mm256_set1_epi8(static_cast<char>(seed | 1));
  __m256i b = _mm256_set1_epi8(static_cast<char>(seed | 2));
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < kNarrow; ++j) {
      for (__m256i& sum : sums) {
        asm volatile("" : "+x"(b));  // or products would be computed once
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
        asm volatile("" : "+x"(sum));
      }
    }
    for (int c = 0; c < kChains / 2; ++c) {
      wide[c] = _mm256_add_epi32(wide[c], _mm256_madd_epi16(sums[c], ones));
      asm volatile("" : "+x"(wide[c]));
      sums[c] = _mm256_setzero_si256();
    }
  }
  return rounds * kNarrow * (kChains / 2) * 64;
}

__attribute__((target("avx2,fma"))) int64_t Float32Avx2(int64_t rounds, int seed) {
  __m256 sums[kChains] = {};
  const __m256 a = _mm256_set1_ps(static_cast<float>(seed));
  for (int64_t i = 0; i < rounds; ++i) {
    for (__m256& sum : sums) {
      sum = _mm256_fmadd_ps(a, a, sum);
      asm volatile("" : "+x"(sum));
    }
  }
  return rounds * kChains * 16;
}

#endif

}  // namespace

// Runs `rounds` rounds on the calling thread with the instructions of `isa` (see kernels.h), of
// int8 products or else of float32 ones. Returns the operations done, two to a multiply-add; 0
// where the instruction set has no such measurement.
extern "C" int64_t stoker_peak(int isa, int int8, int64_t rounds, int seed) {
#if defined(__x86_64__)
  if (isa == 3) return int8 ? Int8Avx512(rounds, seed) : Float32Avx512(rounds, seed);
  if (isa == 2) return int8 ? Int8Avx2(rounds, seed) : Float32Avx2(rounds, seed);
#endif
  (void)isa, (void)int8, (void)rounds, (void)seed;
  return 0;
}
