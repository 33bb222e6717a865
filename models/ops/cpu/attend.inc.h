// Attention of one tile of query rows over one span of keys, and the folding of spans.
//
// Scores and weighted sums are chains in order of head element and of key position, and spans are
// aligned by position, so a row's bits do not depend on which rows or chunks it is computed with.
namespace stoker::STOKER_ISA {


template <typename T>
STOKER_INLINE F load_head(const void* row, int64_t h, int64_t n) {
  const T* p = static_cast<const T*>(row) + h;
  return n >= kLanes ? Element<T>::get(p) : Element<T>::get_n(p, n);
}

// keys [n, H] into columns [H, n], n = kVectors * kLanes; those outside [from, to) are not read,
// but zero.
template <typename T, int kVectors>
static void transpose_keys(const void* const* keys, int64_t skip, int64_t from, int64_t to,
                           int64_t H, float* columns) {
  constexpr int kKeys = kVectors * kLanes;
  for (int64_t h = 0; h < H; h += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, H - h);
    for (int64_t key = 0; key < kKeys; key += kLanes) {
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const bool live = key + i >= from && key + i < to;
        block[i] = live ? load_head<T>(keys[key + i], skip + h, n) : zero();
      }
      transpose(block);
      for (int64_t i = 0; i < n; ++i) store(columns + (h + i) * kKeys + key, block[i]);
    }
  }
}

template <int kVectors, int kCount>
static void score_block(const float* q, int64_t H, const float* columns, float* scores) {
  F total[kCount][kVectors];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = zero();
  }
  for (int64_t h = 0; h < H; ++h) {
    F k[kVectors];
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      k[v] = load(columns + (h * kVectors + v) * kLanes);
    }
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      const F x = set1(q[r * H + h]);
      STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = fma(x, k[v], total[r][v]);
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(scores + r * kSpan + v * kLanes, total[r][v]);
    }
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

// Adds values[from, to) times the weights of kCount rows to kVectors vectors of their sums; with
// one vector only its first `width` lanes.
template <typename T, int kCount, int kVectors>
static void weigh_block(const float* weights, const void* const* values, int64_t skip,
                        int64_t from, int64_t to, bool resume, int64_t width, int64_t H,
                        float* out) {
  constexpr bool kPart = kVectors == 1;
  F total[kCount][kVectors];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      const float* old = out + r * H + v * kLanes;
      total[r][v] = !resume ? zero() : kPart ? load_n(old, width) : load(old);
    }
  }
  for (int64_t key = from; key < to; ++key) {
    F x[kVectors];
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      x[v] = load_head<T>(values[key], skip + v * kLanes, kPart ? width : kLanes);
    }
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      const F w = set1(weights[r * kSpan + key]);
      STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = fma(w, x[v], total[r][v]);
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* to_row = out + r * H + v * kLanes;
      if (kPart) {
        store_n(to_row, total[r][v], width);
      } else {
        store(to_row, total[r][v]);
      }
    }
  }
}

// The same for all H columns.
template <typename T, int kCount>
static void weigh_rows(const float* weights, const void* const* values, int64_t skip, int64_t from,
                       int64_t to, bool resume, int64_t H, float* out) {
  int64_t h = 0;
  for (; h + kScoreVectors * kLanes <= H; h += kScoreVectors * kLanes) {
    weigh_block<T, kCount, kScoreVectors>(weights, values, skip + h, from, to, resume, kLanes, H,
                                          out + h);
  }
  for (; h < H; h += kLanes) {
    weigh_block<T, kCount, 1>(weights, values, skip + h, from, to, resume,
                              std::min<int64_t>(kLanes, H - h), H, out + h);
  }
}

// Calls body(row, integral count) over `rows` in blocks of at most kScoreRows.
template <int kCount = kScoreRows, typename Body>
STOKER_INLINE void by_rows(int64_t rows, const Body& body, int64_t row = 0) {
  for (; rows - row >= kCount; row += kCount) body(row, std::integral_constant<int, kCount>{});
  if constexpr (kCount > 1) by_rows<kCount - 1>(rows, body, row);
}

// Heads of one token are neighbours in memory, but each head's keys are far apart, which defeats
// the processor's own prefetching. So while one block is worked on, the next is asked for in order
// of its addresses, all heads together.
template <typename T, int kVectors>
static void attend_by(const AttentionTile& tile) {
  constexpr int kKeys = kVectors * kLanes;
  constexpr int kBlock = std::max(32, kKeys);  // keys at work while the next are fetched
  alignas(64) float columns[kMaxHead * kKeys];
  alignas(64) float scores[kMaxQueries * kSpan];
  const int64_t H = tile.H, heads = tile.heads;
  int64_t from = tile.keys, to = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.low[r] >= tile.high[r]) continue;
    from = std::min<int64_t>(from, tile.low[r]);
    to = std::max<int64_t>(to, tile.high[r]);
  }
  const int64_t start = from / kBlock * kBlock;
  const int64_t row_bytes = heads * H * static_cast<int64_t>(sizeof(T));
  const auto ask = [&](const void* const* rows, int64_t key, int64_t end) {
    end = std::min(end, to);
    for (key = std::max(key, from); key < end; ++key) {
      const char* row = static_cast<const char*>(rows[key]);
      for (int64_t byte = 0; byte < row_bytes; byte += 64) prefetch(row + byte);
    }
  };

  ask(tile.k, start, start + kBlock);
  for (int64_t block = start; block < to; block += kBlock) {
    const int64_t end = std::min(block + kBlock, to);
    const bool last = end == to;
    const int64_t next = last ? start : end;
    for (int64_t head = 0; head < heads; ++head) {
      ask(last ? tile.v : tile.k, next + kBlock * head / heads,
          next + kBlock * (head + 1) / heads);
      for (int64_t key = block; key < end; key += kKeys) {
        transpose_keys<T, kVectors>(tile.k + key, head * H, from - key, to - key, H, columns);
        by_rows(tile.rows, [&](int64_t r, auto count) {
          const int64_t row = head * tile.rows + r;
          score_block<kVectors, decltype(count)::value>(tile.q + row * H, H, columns,
                                              scores + row * kSpan + key);
        });
      }
    }
  }
  for (int64_t row = 0; row < heads * tile.rows; ++row) {
    const int64_t r = row % tile.rows;
    soften(scores + row * kSpan + start, to - start, tile.low[r] - start, tile.high[r] - start,
           tile.softcap, tile.peak + row, tile.total + row);
  }
  if (from >= to) std::fill(tile.out, tile.out + heads * tile.rows * H, 0.0f);
  for (int64_t block = start; block < to; block += kBlock) {
    const int64_t first = std::max(block, from), end = std::min(block + kBlock, to);
    for (int64_t head = 0; head < heads; ++head) {
      ask(tile.v, end + kBlock * head / heads, end + kBlock * (head + 1) / heads);
      by_rows(tile.rows, [&](int64_t r, auto count) {
        const int64_t row = head * tile.rows + r;
        weigh_rows<T, decltype(count)::value>(scores + row * kSpan, tile.v, head * H, first, end,
                                              block > start, H, tile.out + row * H);
      });
    }
  }
}

// Few rows gain from short blocks, whose keys the caches hold; many, from long ones.
template <typename T>
static void attend(const AttentionTile& tile) {
  if (tile.rows < 2 * kScoreRows) {
    attend_by<T, kScoreVectors / 2>(tile);
  } else {
    attend_by<T, kScoreVectors>(tile);
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
