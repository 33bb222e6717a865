// Sixteen lanes of AVX-512 with VNNI. The names here are the whole vocabulary of the kernels.
namespace stoker::STOKER_ISA {

constexpr int kLanes = 16;
constexpr int kProductTiles = 2;  // tiles whose sums fit the registers at once
constexpr int product_vectors(Code) { return 1; }  // and vectors of a tile
constexpr bool kReadsHalves = true;  // the conversion costs nothing beside the products
constexpr int kScoreRows = 6;  // register block of attention: rows by vectors of keys or values
constexpr int score_vectors(int) { return 4; }
using F = __m512;
using I = __m512i;

STOKER_INLINE __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
// As assembly, since GCC drops a function that does nothing but __builtin_prefetch.
STOKER_INLINE void prefetch(const void* p) {
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}
STOKER_INLINE void prefetch_to_write(const void* p) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
}
STOKER_INLINE F zero() { return _mm512_setzero_ps(); }
STOKER_INLINE F set1(float x) { return _mm512_set1_ps(x); }
STOKER_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
STOKER_INLINE const float* again(const float* p) { return p; }  // registers suffice
STOKER_INLINE F load_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
STOKER_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
STOKER_INLINE void store_n(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
STOKER_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
STOKER_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
STOKER_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
STOKER_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
STOKER_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
STOKER_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
STOKER_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
STOKER_INLINE F abs(F a) { return _mm512_abs_ps(a); }
// y where x > limit, else zero.
STOKER_INLINE F where_above(F x, float limit, F y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_GT_OQ), y);
}
STOKER_INLINE F where_at_least(F x, float limit, F y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_GE_OQ), y);
}
STOKER_INLINE bool any_at_least(F x, float limit) {
  return _mm512_cmp_ps_mask(x, set1(limit), _CMP_GE_OQ) != 0;
}
// x in lanes [low, high), else other.
STOKER_INLINE F select(int64_t low, int64_t high, F x, F other) {
  const __mmask16 mask = first(high) & static_cast<__mmask16>(~first(low));
  return _mm512_mask_mov_ps(other, mask, x);
}
// To the nearest integer, ties to even.
STOKER_INLINE F round(F x) { return _mm512_roundscale_ps(x, 8); }
// x * 2^n for whole n in [-126, 127].
STOKER_INLINE F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }

STOKER_INLINE I set1(int32_t x) { return _mm512_set1_epi32(x); }
STOKER_INLINE I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
STOKER_INLINE I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
STOKER_INLINE I high_nibbles(I x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
// A table of sixteen bytes, and its entries at the nibbles of each byte of x.
STOKER_INLINE I load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
STOKER_INLINE I look_up(I table, I x) { return _mm512_shuffle_epi8(table, x); }
STOKER_INLINE I byte_of_lane(I x, int j) {
  return _mm512_and_si512(_mm512_srli_epi32(x, static_cast<unsigned>(8 * j)), set1(255));
}
STOKER_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
STOKER_INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
STOKER_INLINE I to_int(F x) { return _mm512_cvtps_epi32(x); }
STOKER_INLINE void store_int8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
}
// Four signed bytes from each of four vectors' lanes 0..3, then from lanes 4..7, and so on.
STOKER_INLINE void store_quads(int8_t* p, const I* x) {
  const I words[2] = {_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3])};
  _mm512_storeu_si512(p, _mm512_packs_epi16(words[0], words[1]));
}
STOKER_INLINE F as_float(I x) { return _mm512_castsi512_ps(x); }
STOKER_INLINE I as_int(F x) { return _mm512_castps_si512(x); }
STOKER_INLINE I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
STOKER_INLINE I max(I a, I b) { return _mm512_max_epi32(a, b); }
STOKER_INLINE I load_n(const int32_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi32(first(n), p);
}
STOKER_INLINE void store_n(int32_t* p, I x, int64_t n) {
  _mm512_mask_storeu_epi32(p, first(n), x);
}
STOKER_INLINE I and_bits(I a, I b) { return _mm512_and_si512(a, b); }
STOKER_INLINE I or_bits(I a, I b) { return _mm512_or_si512(a, b); }
STOKER_INLINE I high_words(I x) { return _mm512_srli_epi32(x, 16); }
// x where `bits` are those of a NaN, else other.
STOKER_INLINE I where_nan(I bits, I x, I other) {
  const F number = as_float(bits);
  return _mm512_mask_mov_epi32(other, _mm512_cmp_ps_mask(number, number, _CMP_UNORD_Q), x);
}
STOKER_INLINE void store_low_words_n(uint16_t* p, I x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(x));
}
STOKER_INLINE int32_t reduce_add(I x) { return _mm512_reduce_add_epi32(x); }
STOKER_INLINE int32_t reduce_max(I x) { return _mm512_reduce_max_epi32(x); }
// Sums or maxima over the lanes of four vectors at once.
template <typename Op>
STOKER_INLINE void reduce4(const I* x, int32_t* out, const Op& op) {
  const I low = op(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const I high = op(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  I all = op(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  all = op(all, _mm512_shuffle_i32x4(all, all, 0x4e));
  all = op(all, _mm512_shuffle_i32x4(all, all, 0xb1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(all));
}
STOKER_INLINE void reduce_add4(const I* x, int32_t* out) {
  reduce4(x, out, [](auto a, auto b) { return add(a, b); });
}
STOKER_INLINE void reduce_max4(const I* x, int32_t* out) {
  reduce4(x, out, [](auto a, auto b) { return max(a, b); });
}
// A sum from `init` on of products of each lane's four unsigned bytes with the four signed bytes at
// `a`, over the columns of a block.
template <Code>
struct Dot {
  I sum;
  STOKER_INLINE Dot start(int32_t init) { return {set1(init)}; }
  STOKER_INLINE void add4(Dot& dot, I w, const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
    dot.sum = _mm512_dpbusd_epi32(dot.sum, w, _mm512_set1_epi32(four));
  }
  STOKER_INLINE I end(const Dot& dot, int32_t) { return dot.sum; }
};

STOKER_INLINE F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
STOKER_INLINE F load_half_n(const uint16_t* p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
STOKER_INLINE F widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
STOKER_INLINE F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
STOKER_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}
// bfloat16 numbers as kWidened vectors, in an order of which floats are put back or taken apart.
constexpr int kWidened = 1;
STOKER_INLINE void widen(const uint16_t* p, F* x) { x[0] = load_bf16(p); }
STOKER_INLINE void take_apart(const float* p, F* x) { x[0] = load(p); }
STOKER_INLINE void put_together(const F* x, float* p) { store(p, x[0]); }
STOKER_INLINE F load_i8(const int8_t* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
STOKER_INLINE F load_u8(const uint8_t* p) {
  return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Sums and maxima over lanes pair lane i with i + 8, then + 4, + 2, + 1.
STOKER_INLINE float reduce_add(F x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
STOKER_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

// rows[i] lane j -> rows[j] lane i.
STOKER_INLINE void transpose(F* r) {
  F t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace stoker::STOKER_ISA
