// Exponentials and what is made of them: gates, norms, rounding to bfloat16.
namespace stoker::STOKER_ISA {

// e^x within 2e-7 + 5e-8 |x| of itself; 0 below -87. That is 2^(n + f) for x / ln 2 = n + f, with n
// whole: rounding x / ln 2 is what grows with |x|, where e^x has become small. The polynomial is
// the minimax one for 2^f on [-1/2, 1/2] that is 1 at 0 (error 1e-7).
STOKER_INLINE F exponential(F x) {
  const F power = mul(min(max(x, set1(-87.0f)), set1(88.0f)), set1(1.44269504088896341f));
  const F n = round(power), f = sub(power, n);
  F p = fma(set1(1.3264724657e-3f), f, set1(9.6715129770e-3f));
  p = fma(p, f, set1(5.5507337515e-2f));
  p = fma(p, f, set1(2.4022242078e-1f));
  p = fma(p, f, set1(6.9314697759e-1f));
  p = fma(p, f, set1(1.0f));
  return where_above(x, -87.0f, scale_by_power(p, n));
}

STOKER_INLINE F hyperbolic_tangent(F x) {
  const F twice = exponential(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(twice, set1(1.0f))));
}

STOKER_INLINE F sigmoid_times(F x, float rate) {
  return div(x, add(set1(1.0f), exponential(mul(x, set1(-rate)))));
}

// GPT-OSS: g * sigmoid(1.702 g) * (u + 1), with g at most 7 and u within 7 of zero. What is not a
// number comes second, where minima and maxima let it through.
STOKER_INLINE F clamped_swiglu(F gate, F up) {
  const F limit = set1(7.0f), bounded = min(limit, max(set1(-7.0f), up));
  return mul(sigmoid_times(min(limit, gate), 1.702f), add(bounded, set1(1.0f)));
}

STOKER_INLINE F activation(F x, int kind) {
  if (kind == 0) return sigmoid_times(x, 1.0f);
  const F cube = mul(mul(x, x), x);
  const F inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), hyperbolic_tangent(inner)));
}

static void scale(const float* x, float factor, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    store_n(out + i, mul(load_n(x + i, m), set1(factor)), m);
  }
}

// x [H] times `factor`, with element i turned by an angle against element i + half: the rotary
// embedding of the first 2 * half elements; half 0 leaves all as they are.
static void rotate(const float* x, const float* cos, const float* sin, int64_t half, int64_t H,
                   float factor, float* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, half - i);
    const F c = load_n(cos + i, m), s = load_n(sin + i, m);
    const F first = load_n(x + i, m), second = load_n(x + half + i, m);
    store_n(out + i, mul(sub(mul(first, c), mul(second, s)), set1(factor)), m);
    store_n(out + half + i, mul(add(mul(second, c), mul(first, s)), set1(factor)), m);
  }
  scale(x + 2 * half, factor, H - 2 * half, out + 2 * half);
}

static void gated(const float* gate, const float* up, int64_t n, int kind, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    const F g = load_n(gate + i, m), u = load_n(up + i, m);
    store_n(out + i, kind == 2 ? clamped_swiglu(g, u) : mul(activation(g, kind), u), m);
  }
}

static void rms_norm(const float* x, const float* weight, int64_t D, float eps, float* out) {
  F squares = zero();
  for (int64_t i = 0; i < D; i += kLanes) {
    const F v = load_n(x + i, std::min<int64_t>(kLanes, D - i));
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(D);
  const F factor = set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < D; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, D - i);
    store_n(out + i, mul(mul(load_n(x + i, m), factor), load_n(weight + i, m)), m);
  }
}

static void mix(const float* const* rows, const float* factor, int64_t count, int64_t n,
                float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    F total = zero();
    for (int64_t j = 0; j < count; ++j) {
      total = fma(load_n(rows[j] + i, m), set1(factor[j]), total);
    }
    store_n(out + i, total, m);
  }
}

// Round to nearest, ties to even; NaN stays NaN.
static void store_bf16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    const I bits = as_int(load_n(x + i, m)), top = high_words(bits);
    const I odd = and_bits(top, set1(1));
    const I rounded = high_words(add(add(bits, set1(0x7fff)), odd));
    store_low_words_n(out + i, where_nan(bits, or_bits(top, set1(0x40)), rounded), m);
  }
}

}  // namespace stoker::STOKER_ISA
