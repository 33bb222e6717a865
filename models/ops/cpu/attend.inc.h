// Attention of one tile of query rows over one span of keys, and the folding of spans.
//
// Scores and weighted sums are chains in order of head element and of key position (scores with keys
// that lie one after the other: a chain for each lane, summed in one order), and spans are aligned
// by position, so a row's bits do not depend on which rows or chunks it is computed with.
namespace stoker::STOKER_ISA {

template <typename T>
STOKER_INLINE F load_head(const T* p, int64_t n) {
  return n >= kLanes ? Element<T>::get(p) : Element<T>::get_n(p, n);
}

// Vectors of neighbouring keys or values that are read at once, in an order that `put` undoes.
template <typename T>
struct Run {
  static constexpr int kVectors = 1;
  STOKER_INLINE void get(const T* p, F* x) { x[0] = Element<T>::get(p); }
  STOKER_INLINE void get_sums(const float* p, F* x) { x[0] = load(p); }
  STOKER_INLINE void put(const F* x, float* p) { store(p, x[0]); }
};
template <>
struct Run<Bf16> {
  static constexpr int kVectors = kWidened;
  STOKER_INLINE void get(const Bf16* p, F* x) { widen(&p->bits, x); }
  STOKER_INLINE void get_sums(const float* p, F* x) { take_apart(p, x); }
  STOKER_INLINE void put(const F* x, float* p) { put_together(x, p); }
};

// `n` rows of `width` elements, `step` apart, as floats without gaps; width is whole vectors.
template <typename T>
static void widen(const void* from, int64_t n, int64_t step, int64_t width, float* to) {
  const T* row = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i, row += step) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const int64_t left = std::min<int64_t>(kLanes, width - c);
      store_n(to + i * width + c, load_head(row + c, left), left);
    }
  }
}

// A span's blocks of keys or values, of one head: those at work, and those that will be wanted a
// round later, to be fetched a line at a time meanwhile: all at once, they would be waited for.
struct Blocks {
  const void* now[kSpan / kKeys];
  const void* later[kSpan / kKeys];  // without gaps
};

// Scores of kCount rows with kVectors * kLanes keys from `key` on. Element h of a block's keys is at
// h * step. With kFetch, as many lines of later blocks are fetched.
template <typename T, int kVectors, int kCount, bool kFetch>
static void score_block(const float* q, int64_t H, const Blocks& blocks, int64_t step, int64_t key,
                        float* scores) {
  constexpr int kRun = Run<T>::kVectors;
  constexpr int kBlocks = std::max(1, kVectors * kLanes / kKeys);
  // Rows of a block in a line of the cache: they take turns.
  constexpr int kTurns = std::min<int>(kBlocks, 64 / (kKeys * sizeof(T)));
  const T* later[kBlocks];
  STOKER_UNROLL for (int b = 0; b < kBlocks; ++b) {
    later[b] = static_cast<const T*>(blocks.later[key / kKeys + b]);
  }
  F total[kCount][kVectors];
  const T* column[kVectors];
  STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
    const int64_t at = key + v * kLanes;
    column[v] = static_cast<const T*>(blocks.now[at / kKeys]) + at % kKeys;
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) total[r][v] = zero();
  }
  for (int64_t h = 0; h < H; ++h) {
    STOKER_UNROLL for (int b = 0; kFetch && b < kBlocks; b += kTurns) {
      prefetch(later[b + h % kTurns] + h * kKeys);
    }
    STOKER_UNROLL for (int v = 0; v < kVectors; v += kRun) {
      F k[kRun];
      Run<T>::get(column[v] + h * step, k);
      STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
        const F x = set1(*again(q + r * H + h));
        STOKER_UNROLL for (int i = 0; i < kRun; ++i) {
          total[r][v + i] = fma(x, k[i], total[r][v + i]);
        }
      }
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; v += kRun) {
      Run<T>::put(&total[r][v], scores + r * kSpan + key + v * kLanes);
    }
  }
}

// The same for keys [key, end), whole blocks of them.
template <typename T, int kCount, bool kFetch, int kVectors = score_vectors(kCount)>
static void score_keys(const float* q, int64_t H, const Blocks& blocks, int64_t step, int64_t key,
                       int64_t end, float* scores) {
  for (; key + kVectors * kLanes <= end; key += kVectors * kLanes) {
    score_block<T, kVectors, kCount, kFetch>(q, H, blocks, step, key, scores);
  }
  if constexpr (kVectors * kLanes > kKeys) {
    score_keys<T, kCount, kFetch, kVectors / 2>(q, H, blocks, step, key, end, scores);
  }
}

// The same where one key lies after the other: sums of kLanes chains for each score.
template <typename T, int kKeysAtOnce, int kCount>
static void score_tokens(const float* q, int64_t H, const void* const* blocks, int64_t key,
                         float* scores) {
  F total[kCount][kKeysAtOnce];
  const T* token[kKeysAtOnce];
  STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
    const int64_t at = key + i;
    token[i] = static_cast<const T*>(blocks[at / kKeys]) + at % kKeys * H;
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) total[r][i] = zero();
  }
  for (int64_t h = 0; h < H; h += kLanes) {
    const int64_t left = std::min<int64_t>(kLanes, H - h);
    F k[kKeysAtOnce];
    STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) k[i] = load_head(token[i] + h, left);
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      const F x = load_n(q + r * H + h, left);
      STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) total[r][i] = fma(x, k[i], total[r][i]);
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
      scores[r * kSpan + key + i] = reduce_add(total[r][i]);
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
    if (softcap > 0) {
      s = mul(set1(softcap), hyperbolic_tangent(div(s, set1(softcap))));
      store(scores + key, s);
    }
    if (key < low || key + kLanes > high) {
      const int64_t from = std::clamp<int64_t>(low - key, 0, kLanes);
      const int64_t to = std::clamp<int64_t>(high - key, 0, kLanes);
      s = select(from, to, s, set1(kMinus));
      store(scores + key, s);
    }
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

// Calls body(row, later row, key) for values[from, to).
template <typename T, typename Body>
STOKER_INLINE void by_values(const Blocks& blocks, int64_t from, int64_t to, int64_t H,
                             const Body& body) {
  for (int64_t key = from; key < to;) {
    const T* row = static_cast<const T*>(blocks.now[key / kKeys]) + key % kKeys * H;
    const T* later = static_cast<const T*>(blocks.later[key / kKeys]) + key % kKeys * H;
    const int64_t end = std::min(to, (key / kKeys + 1) * kKeys);
    for (; key < end; ++key, row += H, later += H) body(row, later, key);
  }
}

// Adds values[from, to) times the weights of kCount rows to kVectors vectors of their sums, `skip`
// columns on. With kFetch, as many lines of later blocks are fetched.
template <typename T, int kCount, bool kFetch, int kVectors>
static void weigh_block(const float* weights, const Blocks& blocks, int64_t skip, int64_t from,
                        int64_t to, bool resume, int64_t H, float* out) {
  constexpr int kRun = Run<T>::kVectors, kLine = 64 / sizeof(T);
  F total[kCount][kVectors];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; v += kRun) {
      if (resume) {
        Run<T>::get_sums(out + r * H + skip + v * kLanes, &total[r][v]);
      } else {
        STOKER_UNROLL for (int i = 0; i < kRun; ++i) total[r][v + i] = zero();
      }
    }
  }
  by_values<T>(blocks, from, to, H, [&](const T* row, const T* later, int64_t key) {
    STOKER_UNROLL for (int at = 0; kFetch && at < kVectors * kLanes; at += kLine) {
      prefetch(later + skip + at);
    }
    STOKER_UNROLL for (int v = 0; v < kVectors; v += kRun) {
      F x[kRun];
      Run<T>::get(row + skip + v * kLanes, x);
      STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
        const F w = set1(*again(weights + r * kSpan + key));
        STOKER_UNROLL for (int i = 0; i < kRun; ++i) {
          total[r][v + i] = fma(w, x[i], total[r][v + i]);
        }
      }
    }
  });
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; v += kRun) {
      Run<T>::put(&total[r][v], out + r * H + skip + v * kLanes);
    }
  }
}

// The same for a vector of `width` columns.
template <typename T, int kCount>
static void weigh_part(const float* weights, const Blocks& blocks, int64_t skip, int64_t from,
                       int64_t to, bool resume, int64_t width, int64_t H, float* out) {
  F total[kCount];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    total[r] = resume ? load_n(out + r * H + skip, width) : zero();
  }
  by_values<T>(blocks, from, to, H, [&](const T* row, const T*, int64_t key) {
    const F x = load_head(row + skip, width);
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      total[r] = fma(set1(weights[r * kSpan + key]), x, total[r]);
    }
  });
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    store_n(out + r * H + skip, total[r], width);
  }
}

// The same for columns [h, H).
template <typename T, int kCount, bool kFetch, int kVectors = score_vectors(kCount)>
static void weigh_rows(const float* weights, const Blocks& blocks, int64_t from, int64_t to,
                       bool resume, int64_t H, float* out, int64_t h = 0) {
  for (; h + kVectors * kLanes <= H; h += kVectors * kLanes) {
    weigh_block<T, kCount, kFetch, kVectors>(weights, blocks, h, from, to, resume, H, out);
  }
  if constexpr (kVectors > Run<T>::kVectors) {
    weigh_rows<T, kCount, kFetch, kVectors / 2>(weights, blocks, from, to, resume, H, out, h);
  } else {
    for (; h < H; h += kLanes) {
      weigh_part<T, kCount>(weights, blocks, h, from, to, resume, std::min<int64_t>(kLanes, H - h),
                            H, out);
    }
  }
}

// Calls body(row, integral count) over `rows` in blocks of at most kScoreRows.
template <int kCount = kScoreRows, typename Body>
STOKER_INLINE void by_rows(int64_t rows, const Body& body, int64_t row = 0) {
  for (; rows - row >= kCount; row += kCount) body(row, std::integral_constant<int, kCount>{});
  if constexpr (kCount > 1) by_rows<kCount - 1>(rows, body, row);
}

// The pages of type T of one head, a round of keys at a time.
template <typename T>
struct Heads {
  static constexpr int kLength = 4 * kKeys;  // keys at work while the next are fetched
  const AttentionTile& tile;
  const int64_t head_bytes;

  explicit Heads(const AttentionTile& tile)
      : tile(tile), head_bytes(tile.head_step * static_cast<int64_t>(sizeof(T))) {}

  const T* block(const void* const* pages, int64_t index, int64_t head) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(pages[index]) + head * head_bytes);
  }

  // Fetches keys or values [key, end).
  void fetch(const void* const* pages, int64_t head, int64_t key, int64_t end, bool keys) const {
    constexpr int64_t kBytes = kKeys * static_cast<int64_t>(sizeof(T));
    const bool packed = !keys || tile.key_step == kKeys || tile.key_step == 0;
    const int64_t rows = packed ? 64 / kBytes : 1;
    const int64_t step = packed ? kKeys : tile.key_step;
    for (; key < end; key += kKeys) {
      const T* from = block(pages, key / kKeys, head);
      for (int64_t h = 0; h < tile.H; h += rows) prefetch(from + h * step);
    }
  }

  // Sees to it that what comes next is there when this round is done.
  void ask(const void* const* pages, int64_t head, int64_t key, int64_t end, bool keys) const {
    fetch(pages, head, key, end, keys);
  }
};

// One head at work. Its pages are read as they are by few rows; for many, a round of keys or values
// is widened to floats once.
template <typename T, bool kWide>
struct Round : Heads<T> {
  using Heads<T>::kLength, Heads<T>::tile;
  using Read = std::conditional_t<kWide, float, T>;
  alignas(64) float wide[kWide ? kMaxHead * kLength : 1];
  Blocks blocks;
  const int64_t first, end;  // blocks of the span that are looked at
  const bool meanwhile;      // each block fetches the one a round later, if blocks have no gaps

  Round(const AttentionTile& tile, int64_t from, int64_t to)
      : Heads<T>(tile),
        first(from / kKeys),
        end((to + kKeys - 1) / kKeys),
        meanwhile(!kWide && tile.key_step == kKeys) {}

  void ask(const void* const* pages, int64_t head, int64_t key, int64_t end, bool keys) const {
    if (!meanwhile) this->fetch(pages, head, key, end, keys);
  }

  // What is wanted a round after block `b`: keys, then values, then what comes next.
  const void* later(int64_t b, int64_t head, bool keys) const {
    int64_t at = b + kLength / kKeys;
    if (keys) {
      if (at < end) return this->block(tile.k, at, head);
      at += first - end;
    }
    if (at < end) return this->block(tile.v, at, head);
    at -= end;
    return at * kKeys < tile.next_keys ? this->block(tile.next, at, head) : blocks.now[b];
  }

  // Blocks of the round from `key` on, of one head.
  void take(const void* const* pages, int64_t head, int64_t key, bool keys) {
    for (int64_t i = 0; i < kLength / kKeys; ++i) {
      const int64_t b = key / kKeys + i;
      blocks.now[b] = this->block(pages, b, head);
      if constexpr (kWide) {
        float* to = wide + i * kKeys * tile.H;
        if (keys) {
          widen<T>(blocks.now[b], tile.H, tile.key_step, kKeys, to);
        } else {
          widen<T>(blocks.now[b], kKeys, tile.H, tile.H, to);
        }
        blocks.now[b] = to;
      }
      blocks.later[b] = meanwhile ? later(b, head, keys) : blocks.now[b];
    }
  }

  void score(int64_t head, int64_t key, float* scores) {
    const int64_t to = std::min(key + kLength, end * kKeys);
    if (tile.key_step == 0) {
      take(tile.k, head, key, false);  // they lie as values do
      by_rows(tile.rows, [&](int64_t r, auto count) {
        constexpr int kCount = decltype(count)::value, kTokens = score_vectors(kScoreRows);
        const float* q = tile.q + (head * tile.rows + r) * tile.H;
        for (int64_t at = key; at < to; at += kTokens) {
          score_tokens<Read, kTokens, kCount>(q, tile.H, blocks.now, at, scores + r * kSpan);
        }
      });
      return;
    }
    const int64_t step = kWide ? kKeys : tile.key_step;
    take(tile.k, head, key, true);
    by_rows(tile.rows, [&](int64_t r, auto count) {
      const float* q = tile.q + (head * tile.rows + r) * tile.H;
      score_keys<Read, decltype(count)::value, !kWide>(q, tile.H, blocks, step, key, to,
                                                       scores + r * kSpan);
    });
  }

  void weigh(int64_t head, int64_t key, int64_t from, int64_t to, const float* scores) {
    take(tile.v, head, key, false);
    by_rows(tile.rows, [&](int64_t r, auto count) {
      weigh_rows<Read, decltype(count)::value, !kWide>(scores + r * kSpan, blocks, std::max(key, from),
                                               std::min(key + kLength, to), key > from, tile.H,
                                               tile.out + (head * tile.rows + r) * tile.H);
    });
  }
};

// All heads of a tile, each round by the same operations whatever the rows.
template <typename Round>
static void attend_by(const AttentionTile& tile) {
  alignas(64) float scores[kMaxQueries * kSpan];
  const int64_t H = tile.H, heads = tile.heads;
  int64_t from = tile.keys, to = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (tile.low[r] >= tile.high[r]) continue;
    from = std::min<int64_t>(from, tile.low[r]);
    to = std::max<int64_t>(to, tile.high[r]);
  }
  if (from >= to) std::fill(tile.out, tile.out + heads * tile.rows * H, 0.0f);
  constexpr int64_t kLength = Round::kLength;
  const int64_t start = from / kLength * kLength;
  Round round(tile, start, to);
  for (int64_t head = 0; head < heads; ++head) {
    round.fetch(tile.k, head, start, std::min(start + kLength, to), true);
  }
  for (int64_t key = start; key < to; key += kLength) {
    const bool last = key + kLength >= to;
    const int64_t next = last ? start : key + kLength;
    for (int64_t head = 0; head < heads; ++head) {
      round.ask(last ? tile.v : tile.k, head, next, std::min(next + kLength, to), !last);
      round.score(head, key, scores + head * tile.rows * kSpan);
    }
  }
  for (int64_t row = 0; row < heads * tile.rows; ++row) {
    const int64_t r = row % tile.rows;
    soften(scores + row * kSpan + start, to - start, tile.low[r] - start, tile.high[r] - start,
           tile.softcap, tile.peak + row, tile.total + row);
  }
  for (int64_t key = start; key < to; key += kLength) {
    const int64_t next = key + kLength;
    for (int64_t head = 0; head < heads; ++head) {
      if (next < to) {
        round.ask(tile.v, head, next, std::min(next + kLength, to), false);
      } else {
        round.ask(tile.next, head, 0, tile.next_keys, true);
      }
      round.weigh(head, key, from, to, scores + head * tile.rows * kSpan);
    }
  }
}

template <typename T>
static void attend(const AttentionTile& tile) {
  if (std::is_same_v<T, float> || tile.rows < 2 * kScoreRows) {
    attend_by<Round<T, false>>(tile);
  } else {
    attend_by<Round<T, true>>(tile);
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
