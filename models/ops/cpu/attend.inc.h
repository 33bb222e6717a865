// Attention of one tile of query rows over one span of keys, and the folding of spans.
//
// Spans are aligned by position and scores and sums are chains in a fixed order (blocks.inc.h), so a
// row's bits do not depend on which rows or chunks it is computed with.
namespace stoker::STOKER_ISA {

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
  const int64_t first, end;  // blocks of the span that are looked at
  const bool meanwhile;      // each block fetches the one a round later, if blocks have no gaps

  Heads(const AttentionTile& tile, int64_t from, int64_t to, bool as_they_are)
      : tile(tile),
        head_bytes(tile.head_step * static_cast<int64_t>(sizeof(T))),
        first(from / kKeys),
        end((to + kKeys - 1) / kKeys),
        meanwhile(as_they_are && tile.key_step == kKeys) {}

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
    if (!meanwhile) fetch(pages, head, key, end, keys);
  }

  // What is wanted a round after block `b`: keys, then values, then what comes next.
  const T* later(int64_t b, int64_t head, bool keys) const {
    int64_t at = b + kLength / kKeys;
    if (keys) {
      if (at < end) return block(tile.k, at, head);
      at += first - end;
    }
    if (at < end) return block(tile.v, at, head);
    at -= end;
    const bool known = at * kKeys < tile.next_keys;
    return known ? block(tile.next, at, head) : block(keys ? tile.k : tile.v, b, head);
  }
};

// Multiplies what each row has for keys [from, to) by its head's scales of these keys.
static void times_scales(const AttentionTile& tile, const float* const* scales, int64_t from,
                         int64_t to, float* numbers) {
  for (int64_t head = 0; head < tile.heads; ++head) {
    for (int64_t key = from; key < to; key += kLanes) {
      const F factor = load(scales[key / kKeys] + head * tile.scale_step + key % kKeys);
      for (int64_t r = 0; r < tile.rows; ++r) {
        float* at = numbers + (head * tile.rows + r) * kSpan + key;
        store(at, mul(load(at), factor));
      }
    }
  }
}

// One head at work. Its pages are read as they are by few rows; for many, a round of keys or values
// is widened to floats once.
template <typename T, bool kWide>
struct Round : Heads<T> {
  using Heads<T>::kLength, Heads<T>::tile, Heads<T>::end, Heads<T>::meanwhile;
  using Read = std::conditional_t<kWide, float, T>;
  alignas(64) float wide[kWide ? kMaxHead * kLength : 1];
  Blocks blocks;

  Round(const AttentionTile& tile, int64_t from, int64_t to)
      : Heads<T>(tile, from, to, !kWide) {}

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
      blocks.later[b] = meanwhile ? this->later(b, head, keys) : blocks.now[b];
      if (std::is_same_v<T, int8_t> && keys) {
        prefetch(tile.k_scale[b] + head * tile.scale_step);
        prefetch(tile.v_scale[b] + head * tile.scale_step);
      }
    }
  }

  void score(int64_t head, int64_t key, float* scores) {
    const int64_t to = std::min(key + kLength, end * kKeys);
    if (tile.key_step == 0) {
      take(tile.k, head, key, false);  // they lie as values do
      constexpr int kTokens = score_vectors(kScoreRows);
      // All rows meet a few tokens before the next: those are wide.
      for (int64_t at = key; at < to; at += kTokens) {
        by_rows(tile.rows, [&](int64_t r, auto count) {
          score_tokens<Read, kTokens, decltype(count)::value>(
              tile.q + (head * tile.rows + r) * tile.H, tile.H, blocks.now, at, scores + r * kSpan);
        });
      }
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
      weigh_rows<Read, decltype(count)::value, !kWide>(
          scores + r * kSpan, blocks, std::max(key, from), std::min(key + kLength, to), key > from,
          tile.H, tile.out + (head * tile.rows + r) * tile.H);
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
  if (tile.k_scale) times_scales(tile, tile.k_scale, start, to, scores);
  for (int64_t row = 0; row < heads * tile.rows; ++row) {
    const int64_t r = row % tile.rows;
    soften(scores + row * kSpan + start, to - start, tile.low[r] - start, tile.high[r] - start,
           tile.softcap, tile.peak + row, tile.total + row);
  }
  if (tile.v_scale) times_scales(tile, tile.v_scale, start, to, scores);
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
