// Eight lanes of AVX2 with FMA; see vector_avx512.h for what each name means.
namespace stoker::STOKER_ISA {

constexpr int kLanes = 8;
constexpr int kProductTiles = 1;  // tiles whose sums fit the registers at once
// And vectors of a tile: a byte's sums take two registers, see below.
constexpr int product_vectors(Code code) { return code == Code::kByte ? 1 : 2; }
constexpr bool kReadsHalves = true;
constexpr int kScoreRows = 6;
// Few rows take more vectors: a sum waits four cycles for its last addition.
constexpr int score_vectors(int rows) { return rows > 3 ? 2 : rows > 1 ? 4 : 8; }
using F = __m256;
using I = __m256i;

STOKER_INLINE I first(int64_t n) {
  const I lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), lanes);
}
// As assembly, since GCC drops a function that does nothing but __builtin_prefetch.
STOKER_INLINE void prefetch(const void* p) {
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}
STOKER_INLINE void prefetch_to_write(const void* p) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
}
STOKER_INLINE F zero() { return _mm256_setzero_ps(); }
STOKER_INLINE F set1(float x) { return _mm256_set1_ps(x); }
STOKER_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
// Where a number is, to be loaded once more: there are no registers in which to keep it.
STOKER_INLINE const float* again(const float* p) {
  asm volatile("" : "+r"(p));
  return p;
}
// Masks take time, masked stores much of it, and most vectors are whole.
STOKER_INLINE F load_n(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : _mm256_maskload_ps(p, first(n));
}
STOKER_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
STOKER_INLINE void store_n(float* p, F x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  _mm256_maskstore_ps(p, first(n), x);
}
STOKER_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
STOKER_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
STOKER_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
STOKER_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
STOKER_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
STOKER_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
STOKER_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
STOKER_INLINE F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
STOKER_INLINE F where_above(F x, float limit, F y) {
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(limit), _CMP_GT_OQ), y);
}
STOKER_INLINE F where_at_least(F x, float limit, F y) {
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(limit), _CMP_GE_OQ), y);
}
STOKER_INLINE bool any_at_least(F x, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, set1(limit), _CMP_GE_OQ)) != 0;
}
STOKER_INLINE F select(int64_t low, int64_t high, F x, F other) {
  const I mask = _mm256_andnot_si256(first(low), first(high));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}
STOKER_INLINE F round(F x) { return _mm256_round_ps(x, 8); }
STOKER_INLINE F scale_by_power(F x, F n) {
  const I biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

STOKER_INLINE I set1(int32_t x) { return _mm256_set1_epi32(x); }
STOKER_INLINE I load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
STOKER_INLINE I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
STOKER_INLINE I high_nibbles(I x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
STOKER_INLINE I load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
STOKER_INLINE I look_up(I table, I x) { return _mm256_shuffle_epi8(table, x); }
STOKER_INLINE I byte_of_lane(I x, int j) {
  return _mm256_and_si256(_mm256_srli_epi32(x, 8 * j), set1(255));
}
STOKER_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
STOKER_INLINE F to_float(I x) { return _mm256_cvtepi32_ps(x); }
STOKER_INLINE I to_int(F x) { return _mm256_cvtps_epi32(x); }
STOKER_INLINE void store_int8(int8_t* p, I x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
STOKER_INLINE void store_quads(int8_t* p, const I* x) {
  const I words[2] = {_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3])};
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_packs_epi16(words[0], words[1]));
}
STOKER_INLINE F as_float(I x) { return _mm256_castsi256_ps(x); }
STOKER_INLINE I as_int(F x) { return _mm256_castps_si256(x); }
STOKER_INLINE I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
STOKER_INLINE I max(I a, I b) { return _mm256_max_epi32(a, b); }
STOKER_INLINE I load_n(const int32_t* p, int64_t n) { return _mm256_maskload_epi32(p, first(n)); }
STOKER_INLINE void store_n(int32_t* p, I x, int64_t n) {
  if (n >= kLanes) return _mm256_storeu_si256(reinterpret_cast<I*>(p), x);
  _mm256_maskstore_epi32(p, first(n), x);
}
STOKER_INLINE I and_bits(I a, I b) { return _mm256_and_si256(a, b); }
STOKER_INLINE I or_bits(I a, I b) { return _mm256_or_si256(a, b); }
STOKER_INLINE I high_words(I x) { return _mm256_srli_epi32(x, 16); }
STOKER_INLINE I where_nan(I bits, I x, I other) {
  const F number = as_float(bits);
  const F mask = _mm256_cmp_ps(number, number, _CMP_UNORD_Q);
  return as_int(_mm256_blendv_ps(as_float(other), as_float(x), mask));
}
STOKER_INLINE void store_low_words_n(uint16_t* p, I x, int64_t n) {
  const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
  const __m128i packed = _mm_packus_epi32(low, high);
  if (n >= kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  uint16_t words[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words), packed);
  std::memcpy(p, words, static_cast<size_t>(n) * sizeof(uint16_t));
}
template <typename Op>
STOKER_INLINE void reduce4(const I* x, int32_t* out, const Op& op) {
  const I low = op(_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]));
  const I high = op(_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3]));
  I all = op(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
  all = op(all, _mm256_permute2x128_si256(all, all, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(all));
}
STOKER_INLINE void reduce_add4(const I* x, int32_t* out) {
  reduce4(x, out, [](auto a, auto b) { return add(a, b); });
}
STOKER_INLINE void reduce_max4(const I* x, int32_t* out) {
  reduce4(x, out, [](auto a, auto b) { return max(a, b); });
}
STOKER_INLINE int32_t reduce_max(I x) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
STOKER_INLINE int32_t reduce_add(I x) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// Four activations in every lane.
STOKER_INLINE I four_of(const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}
STOKER_INLINE I add_pairs(I acc, I w, I a) {
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, a));
  asm("" : "+x"(acc));  // else GCC adds up products first, for which registers do not suffice
  return acc;
}
// Products with nibbles are summed in 16 bits, to be widened once: of the 32 columns that a block
// has at most, half fall on a lane, and 16 * 15 * 127 fits.
template <Code kCode>
struct Dot {
  I sum;
  STOKER_INLINE Dot start(int32_t) { return {_mm256_setzero_si256()}; }
  STOKER_INLINE void add4(Dot& dot, I w, const int8_t* a) {
    dot.sum = add_pairs(dot.sum, w, four_of(a));
  }
  STOKER_INLINE I end(const Dot& dot, int32_t init) {
    return add(_mm256_madd_epi16(dot.sum, _mm256_set1_epi16(1)), set1(init));
  }
};
// A byte is two nibbles.
template <>
struct Dot<Code::kByte> {
  I low, high;
  STOKER_INLINE Dot start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  STOKER_INLINE void add4(Dot& dot, I w, const int8_t* a) {
    const I four = four_of(a);
    dot.low = add_pairs(dot.low, low_nibbles(w), four);
    dot.high = add_pairs(dot.high, high_nibbles(w), four);
  }
  STOKER_INLINE I end(const Dot& dot, int32_t init) {
    const I low = _mm256_madd_epi16(dot.low, _mm256_set1_epi16(1));
    return add(add(low, _mm256_madd_epi16(dot.high, _mm256_set1_epi16(16))), set1(init));
  }
};
// Entries of a table lie up to 127 apart: the sum of two products is all that fits 16 bits.
template <>
struct Dot<Code::kTable> {
  I sum;
  STOKER_INLINE Dot start(int32_t init) { return {set1(init)}; }
  STOKER_INLINE void add4(Dot& dot, I w, const int8_t* a) {
    const I pairs = _mm256_maddubs_epi16(w, four_of(a));
    dot.sum = add(dot.sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(dot.sum));
  }
  STOKER_INLINE I end(const Dot& dot, int32_t) { return dot.sum; }
};

STOKER_INLINE F load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
STOKER_INLINE F widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
STOKER_INLINE F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Sixteen at once are cheaper: the even ones are shifted, the odd ones masked.
constexpr int kWidened = 2;
STOKER_INLINE void widen(const uint16_t* p, F* x) {
  const I words = load_bytes(reinterpret_cast<const uint8_t*>(p));
  x[0] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  x[1] = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-0x10000)));
}
STOKER_INLINE void take_apart(const float* p, F* x) {
  const F a = load(p), b = load(p + kLanes);
  const F low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
  x[0] = _mm256_shuffle_ps(low, high, 0x88);
  x[1] = _mm256_shuffle_ps(low, high, 0xdd);
}
STOKER_INLINE void put_together(const F* x, float* p) {
  const F a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
  store(p, _mm256_permute2f128_ps(a, b, 0x20));
  store(p + kLanes, _mm256_permute2f128_ps(a, b, 0x31));
}
STOKER_INLINE F load_half_n(const uint16_t* p, int64_t n) {
  uint16_t copy[8] = {};
  std::memcpy(copy, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_half(copy);
}
STOKER_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  uint16_t copy[8] = {};
  std::memcpy(copy, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(copy);
}
STOKER_INLINE F load_i8(const int8_t* p) {
  return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
STOKER_INLINE F load_u8(const uint8_t* p) {
  return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

STOKER_INLINE float reduce_add(F x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
STOKER_INLINE float reduce_max(F x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

STOKER_INLINE void transpose(F* r) {
  F t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace stoker::STOKER_ISA
