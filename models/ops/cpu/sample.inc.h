// Passes over a block of one row of logits. Lane i of sixteen adds up elements i, i + 16, ...
// whatever the instruction set, and products are rounded before they are added: the same bits
// everywhere, so that the same token is drawn.
namespace stoker::STOKER_ISA {

constexpr int kStride = 16;
constexpr int kParts = kStride / kLanes;

// Elements [0, m) of x, and `fill` in the other lanes; any m.
STOKER_INLINE F load_some(const float* x, int64_t m, float fill) {
  if (m <= 0) return set1(fill);
  return m >= kLanes ? load(x) : select(0, m, load_n(x, m), set1(fill));
}

// body(part, v) for each vector of x [n]; what is missing of the last sixteen is `fill`.
template <typename Body>
STOKER_INLINE void for_vectors(const float* x, int64_t n, float fill, Body body) {
  int64_t i = 0;
  for (; i + kStride <= n; i += kStride) {
    STOKER_UNROLL
    for (int part = 0; part < kParts; ++part) body(i, part, load(x + i + part * kLanes));
  }
  if (i == n) return;
  STOKER_UNROLL
  for (int part = 0; part < kParts; ++part) {
    const int64_t at = part * kLanes;
    body(i, part, load_some(x + i + at, n - i - at, fill));
  }
}

STOKER_INLINE float reduce_parts(const F* sums) {
  if constexpr (kParts == 1) return reduce_add(sums[0]);
  if constexpr (kParts == 2) return reduce_add(add(sums[0], sums[1]));
  if constexpr (kParts == 4) return reduce_add(add(add(sums[0], sums[2]), add(sums[1], sums[3])));
}

// 2^x for x in [-125, 0], to about 2e-7 of it: a minimax polynomial on [-1/2, 1/2].
STOKER_INLINE F power_of_two(F x) {
  const F n = round(x), f = sub(x, n);
  F p = set1(0.00132647273f);
  p = add(mul(p, f), set1(0.00967151299f));
  p = add(mul(p, f), set1(0.0555073358f));
  p = add(mul(p, f), set1(0.240222424f));
  p = add(mul(p, f), set1(0.693147004f));
  p = add(mul(p, f), set1(1.0f));
  return scale_by_power(p, n);
}

// The weight of logits x: 2^((x - peak) * rate) where x >= least, else 0. The power must be at least
// 2^-125 from `least` on; below, whatever comes of it is thrown away.
STOKER_INLINE F weight(F x, float least, float peak, float rate) {
  return where_at_least(x, least, power_of_two(mul(sub(x, set1(peak)), set1(rate))));
}

// The largest of x [n], at least -FLT_MAX, and 0, or NaN where x holds NaN or +inf; then the
// largest means nothing.
static float peak(const float* x, int64_t n, float* poison) {
  const F lowest = set1(-std::numeric_limits<float>::max());
  F largest[kParts], bad[kParts];
  for (int part = 0; part < kParts; ++part) {
    largest[part] = lowest;
    bad[part] = zero();
  }
  for_vectors(x, n, -std::numeric_limits<float>::infinity(), [&](int64_t, int part, F v) {
    const F finite = max(lowest, v);  // NaN stays NaN: of two, max gives the second
    largest[part] = max(largest[part], finite);
    bad[part] = add(bad[part], sub(finite, finite));
  });
  *poison = reduce_parts(bad);
  F all = largest[0];
  for (int part = 1; part < kParts; ++part) all = max(all, largest[part]);
  return reduce_max(all);
}

// How many of x [n] are at least `least`.
static float tally(const float* x, int64_t n, float least) {
  F sums[kParts];
  for (F& sum : sums) sum = zero();
  for_vectors(x, n, std::numeric_limits<float>::quiet_NaN(), [&](int64_t, int part, F v) {
    sums[part] = add(sums[part], where_at_least(v, least, set1(1.0f)));
  });
  return reduce_parts(sums);
}

// The sum of their weights, and how many they are.
static float mass(const float* x, int64_t n, float least, float peak, float rate, float* count) {
  F sums[kParts], ones[kParts];
  for (int part = 0; part < kParts; ++part) sums[part] = ones[part] = zero();
  for_vectors(x, n, std::numeric_limits<float>::quiet_NaN(), [&](int64_t, int part, F v) {
    sums[part] = add(sums[part], weight(v, least, peak, rate));
    ones[part] = add(ones[part], where_at_least(v, least, set1(1.0f)));
  });
  *count = reduce_parts(ones);
  return reduce_parts(sums);
}

// Each weight.
static void weigh(const float* x, int64_t n, float least, float peak, float rate, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    store_n(out + i, weight(load_n(x + i, m), least, peak, rate), m);
  }
}

// The places of those of x [n] that are at least `least`, rising; returns their number.
static int64_t find(const float* x, int64_t n, float least, int32_t* out) {
  int64_t count = 0;
  for_vectors(x, n, std::numeric_limits<float>::quiet_NaN(), [&](int64_t i, int part, F v) {
    if (!any_at_least(v, least)) return;
    const int64_t first = i + part * kLanes;
    for (int64_t j = first; j < std::min<int64_t>(n, first + kLanes); ++j) {
      if (x[j] >= least) out[count++] = static_cast<int32_t>(j);
    }
  });
  return count;
}

}  // namespace stoker::STOKER_ISA
