// Attention of one tile of query rows over one span of keys, and the folding of spans.
//
// Scores and weighted sums are chains in order of head element and of key position, and spans are
// aligned by position, so a row's bits do not depend on which rows or chunks it is computed with.
namespace stoker::STOKER_ISA {

constexpr int kKeyBlock = kScoreVectors * kLanes;

template <typename T>
STOKER_INLINE F load_head(const void* row, int64_t h, int64_t n) {
  const T* p = static_cast<const T*>(row) + h;
  return n >= kLanes ? Element<T>::get(p) : Element<T>::get_n(p, n);
}

// keys [count, H] into columns [H, kKeyBlock]; columns past `count` become zero.
template <typename T>
static void transpose_keys(const void* const* keys, int64_t count, int64_t H, float* columns) {
  for (int64_t h = 0; h < H; h += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, H - h);
    for (int64_t key = 0; key < kKeyBlock; key += kLanes) {
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = key + i < count ? load_head<T>(keys[key + i], h, n) : zero();
      }
      transpose(block);
      for (int64_t i = 0; i < n; ++i) store(columns + (h + i) * kKeyBlock + key, block[i]);
    }
  }
}

template <int kCount>
static void score_block(const float* q, int64_t H, const float* columns, float* scores) {
  F total[kCount][kScoreVectors];
  for (int r = 0; r < kCount; ++r) {
    for (int v = 0; v < kScoreVectors; ++v) total[r][v] = zero();
  }
  for (int64_t h = 0; h < H; ++h) {
    F k[kScoreVectors];
    for (int v = 0; v < kScoreVectors; ++v) k[v] = load(columns + h * kKeyBlock + v * kLanes);
    for (int r = 0; r < kCount; ++r) {
      const F x = set1(q[r * H + h]);
      for (int v = 0; v < kScoreVectors; ++v) total[r][v] = fma(x, k[v], total[r][v]);
    }
  }
  for (int r = 0; r < kCount; ++r) {
    for (int v = 0; v < kScoreVectors; ++v) store(scores + r * kSpan + v * kLanes, total[r][v]);
  }
}

// Scores of one row into weights e^(score - peak), masked ones zero.
static void soften(float* scores, int64_t keys, int64_t low, int64_t high, float softcap,
                   float* peak_out, float* total_out) {
  constexpr float kMinus = -std::numeric_limits<float>::infinity();
  F peak = set1(kMinus);
  for (int64_t key = 0; key < keys; key += kLanes) {
    F s = load(scores + key);
    if (softcap > 0) s = mul(set1(softcap), hyperbolic_tangent(div(s, set1(softcap))));
    const int64_t from = std::clamp<int64_t>(low - key, 0, kLanes);
    const int64_t to = std::clamp<int64_t>(high - key, 0, kLanes);
    s = select(from, to, s, set1(kMinus));
    store(scores + key, s);
    peak = max(peak, s);
  }
  const float largest = reduce_max(peak);
  F total = zero();
  const F shift = set1(largest == kMinus ? 0.0f : largest);
  for (int64_t key = 0; key < keys; key += kLanes) {
    const F w = exponential(sub(load(scores + key), shift));
    store(scores + key, w);
    total = add(total, w);
  }
  *peak_out = largest;
  *total_out = reduce_add(total);
}

template <typename T, int kCount>
static void weigh_block(const float* weights, const void* const* values, int64_t from, int64_t to,
                        int64_t H, int64_t h, float* out) {
  F total[kCount][kScoreVectors];
  for (int r = 0; r < kCount; ++r) {
    for (int v = 0; v < kScoreVectors; ++v) total[r][v] = zero();
  }
  const int64_t vectors = std::min<int64_t>(kScoreVectors, (H - h + kLanes - 1) / kLanes);
  if (vectors == kScoreVectors && h + kKeyBlock <= H) {
    for (int64_t key = from; key < to; ++key) {
      F x[kScoreVectors];
      for (int v = 0; v < kScoreVectors; ++v) {
        x[v] = Element<T>::get(static_cast<const T*>(values[key]) + h + v * kLanes);
      }
      for (int r = 0; r < kCount; ++r) {
        const F w = set1(weights[r * kSpan + key]);
        for (int v = 0; v < kScoreVectors; ++v) total[r][v] = fma(w, x[v], total[r][v]);
      }
    }
  } else {
    for (int v = 0; v < vectors; ++v) {
      const int64_t at = h + v * kLanes, n = std::min<int64_t>(kLanes, H - at);
      for (int64_t key = from; key < to; ++key) {
        const F x = load_head<T>(values[key], at, n);
        for (int r = 0; r < kCount; ++r) {
          total[r][v] = fma(set1(weights[r * kSpan + key]), x, total[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kCount; ++r) {
    for (int v = 0; v < vectors; ++v) {
      const int64_t at = h + v * kLanes;
      store_n(out + r * H + at, total[r][v], std::min<int64_t>(kLanes, H - at));
    }
  }
}

// Calls body(row, integral count) over `rows` in blocks of at most kScoreRows.
template <int kCount = kScoreRows, typename Body>
STOKER_INLINE void by_rows(int64_t rows, const Body& body, int64_t row = 0) {
  for (; rows - row >= kCount; row += kCount) body(row, std::integral_constant<int, kCount>{});
  if constexpr (kCount > 1) by_rows<kCount - 1>(rows, body, row);
}

template <typename T>
static void attend(const AttentionTile& tile) {
  alignas(64) float columns[kMaxHead * kKeyBlock];
  alignas(64) float scores[kMaxQueries * kSpan];
  const int64_t H = tile.H;
  int64_t from = tile.keys, to = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.low[r] >= tile.high[r]) continue;
    from = std::min<int64_t>(from, tile.low[r]);
    to = std::max<int64_t>(to, tile.high[r]);
  }
  const int64_t start = from / kKeyBlock * kKeyBlock;
  for (int64_t key = start; key < to; key += kKeyBlock) {
    transpose_keys<T>(tile.k + key, std::min<int64_t>(kKeyBlock, tile.keys - key), H, columns);
    by_rows(tile.rows, [&](int64_t row, auto count) {
      score_block<decltype(count)::value>(tile.q + row * H, H, columns,
                                          scores + row * kSpan + key);
    });
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    soften(scores + r * kSpan + start, to - start, tile.low[r] - start, tile.high[r] - start,
           tile.softcap, tile.peak + r, tile.total + r);
  }
  for (int64_t h = 0; h < H; h += kKeyBlock) {
    by_rows(tile.rows, [&](int64_t row, auto count) {
      weigh_block<T, decltype(count)::value>(scores + row * kSpan, tile.v, from, to, H, h,
                                             tile.out + row * H);
    });
  }
}

static void merge(int64_t rows, int64_t H, float* peak, float* total, float* out,
                  const float* next_peak, const float* next_total, const float* next_out) {
  constexpr float kMinus = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; ++r) {
    const float top = std::max(peak[r], next_peak[r]);
    if (top == kMinus) continue;
    float factors[kLanes] = {peak[r] - top, next_peak[r] - top};
    store(factors, exponential(load(factors)));
    const F old_factor = set1(factors[0]), new_factor = set1(factors[1]);
    for (int64_t h = 0; h < H; h += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, H - h);
      const F later = mul(load_n(next_out + r * H + h, n), new_factor);
      store_n(out + r * H + h, fma(load_n(out + r * H + h, n), old_factor, later), n);
    }
    total[r] = total[r] * factors[0] + next_total[r] * factors[1];
    peak[r] = top;
  }
}

}  // namespace stoker::STOKER_ISA
