// Four lanes in the vector extension of GCC and Clang, which any processor can run; see
// vector_avx512.h for what each name means. Products are rounded before they are added.
namespace stoker::STOKER_ISA {

constexpr int kLanes = 4;
constexpr int kProductTiles = 1;  // tiles whose sums fit the registers at once
constexpr int product_vectors(Code) { return 1; }  // and vectors of a tile
constexpr bool kReadsHalves = false;  // a conversion takes several steps
constexpr int kScoreRows = 4;
constexpr int score_vectors(int) { return 2; }
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int16_t W __attribute__((vector_size(16)));
typedef uint16_t UW __attribute__((vector_size(16)));

STOKER_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
STOKER_INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }
STOKER_INLINE F set1(float x) { return F{x, x, x, x}; }
STOKER_INLINE I set1(int32_t x) { return I{x, x, x, x}; }
STOKER_INLINE F zero() { return set1(0.0f); }
STOKER_INLINE F load_n(const float* p, int64_t n) {
  F x = zero();
  std::memcpy(&x, p, static_cast<size_t>(n) * sizeof(float));
  return x;
}
STOKER_INLINE const float* again(const float* p) { return p; }
STOKER_INLINE F load(const float* p) { return load_n(p, kLanes); }
STOKER_INLINE void store_n(float* p, F x, int64_t n) {
  std::memcpy(p, &x, static_cast<size_t>(n) * sizeof(float));
}
STOKER_INLINE void store(float* p, F x) { store_n(p, x, kLanes); }
STOKER_INLINE F add(F a, F b) { return a + b; }
STOKER_INLINE F sub(F a, F b) { return a - b; }
STOKER_INLINE F mul(F a, F b) { return a * b; }
STOKER_INLINE F div(F a, F b) { return a / b; }
STOKER_INLINE F blend(I mask, F x, F other) { return F((mask & I(x)) | (~mask & I(other))); }
STOKER_INLINE F max(F a, F b) { return blend(a > b, a, b); }
STOKER_INLINE F min(F a, F b) { return blend(a < b, a, b); }
STOKER_INLINE F fma(F a, F b, F c) { return a * b + c; }
STOKER_INLINE F abs(F a) { return F(I(a) & set1(0x7fffffff)); }
STOKER_INLINE F where_above(F x, float limit, F y) { return F((x > set1(limit)) & I(y)); }
STOKER_INLINE F where_at_least(F x, float limit, F y) { return F((x >= set1(limit)) & I(y)); }
STOKER_INLINE bool any_at_least(F x, float limit) {
  const I found = x >= set1(limit);
  return (found[0] | found[1] | found[2] | found[3]) != 0;
}
STOKER_INLINE I first(int64_t n) { return I{0, 1, 2, 3} < set1(static_cast<int32_t>(n)); }
STOKER_INLINE F select(int64_t low, int64_t high, F x, F other) {
  return blend(first(high) & ~first(low), x, other);
}
STOKER_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
// Round half to even: adding 1.5 * 2^23 leaves the integer in the low bits. |x| < 2^22.
STOKER_INLINE I to_int(F x) { return I(x + set1(12582912.0f)) - set1(0x4b400000); }
STOKER_INLINE F round(F x) { return to_float(to_int(x)); }
STOKER_INLINE F scale_by_power(F x, F n) { return x * F((to_int(n) + set1(127)) << 23); }

STOKER_INLINE I load_bytes(const uint8_t* p) {
  I x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
STOKER_INLINE I low_nibbles(I x) { return x & set1(0x0f0f0f0f); }
STOKER_INLINE I high_nibbles(I x) { return (x >> 4) & set1(0x0f0f0f0f); }
STOKER_INLINE I load_table(const uint8_t* p) { return load_bytes(p); }
STOKER_INLINE I look_up(I table, I x) {
  uint8_t entries[16], bytes[16];
  std::memcpy(entries, &table, 16);
  std::memcpy(bytes, &x, 16);
  for (uint8_t& byte : bytes) byte = entries[byte];
  return load_bytes(bytes);
}
STOKER_INLINE I byte_of_lane(I x, int j) { return (x >> (8 * j)) & set1(255); }
STOKER_INLINE I add(I a, I b) { return I(U(a) + U(b)); }
STOKER_INLINE void store_int8(int8_t* p, I x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(std::clamp(x[i], -128, 127));
}
STOKER_INLINE void store_quads(int8_t* p, const I* x) {
  for (int i = 0; i < 4; ++i) store_int8(p + 4 * i, x[i]);
}
STOKER_INLINE F as_float(I x) { return F(x); }
STOKER_INLINE I as_int(F x) { return I(x); }
STOKER_INLINE I mul(I a, I b) { return a * b; }
STOKER_INLINE I max(I a, I b) { return I(blend(a > b, F(a), F(b))); }
STOKER_INLINE I load_n(const int32_t* p, int64_t n) {
  I x = set1(0);
  std::memcpy(&x, p, static_cast<size_t>(n) * sizeof(int32_t));
  return x;
}
STOKER_INLINE void store_n(int32_t* p, I x, int64_t n) {
  std::memcpy(p, &x, static_cast<size_t>(n) * sizeof(int32_t));
}
STOKER_INLINE I and_bits(I a, I b) { return a & b; }
STOKER_INLINE I or_bits(I a, I b) { return a | b; }
STOKER_INLINE I high_words(I x) { return I(U(x) >> 16); }
STOKER_INLINE I where_nan(I bits, I x, I other) {
  return I(blend((bits & set1(0x7fffffff)) > set1(0x7f800000), F(x), F(other)));
}
STOKER_INLINE void store_low_words_n(uint16_t* p, I x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(x[i]);
}
STOKER_INLINE int32_t reduce_max(I x) {
  return std::max(std::max(x[0], x[2]), std::max(x[1], x[3]));
}
STOKER_INLINE int32_t reduce_add(I x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// Even and odd bytes apart: 255 * 127 fits the 16 bits of each product.
template <Code>
struct Dot {
  I sum;
  STOKER_INLINE Dot start(int32_t init) { return {set1(init)}; }
  STOKER_INLINE void add4(Dot& dot, I w, const int8_t* a) {
    const UW even_w = UW(w) & UW(set1(0x00ff00ff));
    const UW odd_w = UW(w) >> 8;
    const uint32_t even_a = static_cast<uint16_t>(a[0]) | static_cast<uint32_t>(a[2]) << 16;
    const uint32_t odd_a = static_cast<uint16_t>(a[1]) | static_cast<uint32_t>(a[3]) << 16;
    const U even = U(W(even_w) * W(set1(static_cast<int32_t>(even_a))));
    const U odd = U(W(odd_w) * W(set1(static_cast<int32_t>(odd_a))));
    const I low = (I(even << 16) >> 16) + (I(odd << 16) >> 16);
    dot.sum = dot.sum + low + (I(even) >> 16) + (I(odd) >> 16);
  }
  STOKER_INLINE I end(const Dot& dot, int32_t) { return dot.sum; }
};
STOKER_INLINE void reduce_add4(const I* x, int32_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]);
}
STOKER_INLINE void reduce_max4(const I* x, int32_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_max(x[i]);
}

// Half precision: exponents are rebased, subnormals counted in units of 2^-24 (XLA's threads flush
// subnormal floats to zero, so these must not become one on the way).
STOKER_INLINE F widen_half(I x) {
  const I exponent = x & set1(0x7c00), mantissa = x & set1(0x3ff);
  const I normal = ((x & set1(0x7fff)) << 13) + set1(112 << 23);
  const I subnormal = I(to_float(mantissa) * set1(0x1p-24f));
  const I special = (mantissa << 13) | set1(0x7f800000);
  const I is_subnormal = exponent == set1(0), is_special = exponent == set1(0x7c00);
  const I bits = (is_subnormal & subnormal) | (is_special & special) |
                 (~is_subnormal & ~is_special & normal);
  return F(bits | ((x & set1(0x8000)) << 16));
}
STOKER_INLINE I load_words_n(const uint16_t* p, int64_t n) {
  I x = set1(0);
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
STOKER_INLINE F load_half_n(const uint16_t* p, int64_t n) { return widen_half(load_words_n(p, n)); }
STOKER_INLINE F load_half(const uint16_t* p) { return load_half_n(p, kLanes); }
STOKER_INLINE F load_bf16_n(const uint16_t* p, int64_t n) { return F(load_words_n(p, n) << 16); }
STOKER_INLINE F load_bf16(const uint16_t* p) { return load_bf16_n(p, kLanes); }
constexpr int kWidened = 1;
STOKER_INLINE void widen(const uint16_t* p, F* x) { x[0] = load_bf16(p); }
STOKER_INLINE void take_apart(const float* p, F* x) { x[0] = load(p); }
STOKER_INLINE void put_together(const F* x, float* p) { store(p, x[0]); }
STOKER_INLINE F load_i8(const int8_t* p) { return to_float(I{p[0], p[1], p[2], p[3]}); }
STOKER_INLINE F load_u8(const uint8_t* p) { return to_float(I{p[0], p[1], p[2], p[3]}); }

STOKER_INLINE float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
STOKER_INLINE float reduce_max(F x) {
  return std::max(std::max(x[0], x[2]), std::max(x[1], x[3]));
}

STOKER_INLINE void transpose(F* r) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = x;
    }
  }
}

}  // namespace stoker::STOKER_ISA
