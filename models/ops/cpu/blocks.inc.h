// Scores and weighted sums of a few query rows with blocks of keys and values.
//
// They are chains in order of head element and of key position (scores with keys that lie one after
// the other: a chain for each lane, summed in one order), so that a row's bits do not depend on the
// rows beside it.
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
// Two at once, where a block has as many: a row's number is loaded for each run.
template <>
struct Run<int8_t> {
  static constexpr int kVectors = std::clamp(kKeys / kLanes, 1, 2);
  STOKER_INLINE void get(const int8_t* p, F* x) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load_i8(p + v * kLanes);
  }
  STOKER_INLINE void get_sums(const float* p, F* x) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = load(p + v * kLanes);
  }
  STOKER_INLINE void put(const F* x, float* p) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) store(p + v * kLanes, x[v]);
  }
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

// Adds the run at `p`, times a number of each row, to vectors v and on of the rows' totals; numbers
// are x_step apart.
template <typename T, int kVectors, int kCount>
STOKER_INLINE void add_run(F (&total)[kCount][kVectors], int v, const T* p, const float* x,
                           int64_t x_step) {
  F run[Run<T>::kVectors];
  Run<T>::get(p, run);
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    const F factor = set1(*again(x + r * x_step));
    STOKER_UNROLL for (int i = 0; i < Run<T>::kVectors; ++i) {
      total[r][v + i] = fma(factor, run[i], total[r][v + i]);
    }
  }
}

// Totals as floats, each row's `step` after the one before.
template <typename T, int kVectors, int kCount>
STOKER_INLINE void put_totals(const F (&total)[kCount][kVectors], float* to, int64_t step) {
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; v += Run<T>::kVectors) {
      Run<T>::put(&total[r][v], to + r * step + v * kLanes);
    }
  }
}

// Blocks of keys or values, of one head: those at work, and those that will be wanted a round later,
// to be fetched a line at a time meanwhile: all at once, they would be waited for.
template <typename T, int64_t kCount>
struct BlocksOf {
  const T* now[kCount];
  const T* later[kCount];  // without gaps
};
using Blocks = BlocksOf<void, kSpan / kKeys>;  // of a span

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
      add_run(total, v, column[v] + h * step, q + h, H);
    }
  }
  put_totals<T>(total, scores + key, kSpan);
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
      add_run(total, v, row + skip + v * kLanes, weights + key, kSpan);
    }
  });
  put_totals<T>(total, out + skip, H);
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

}  // namespace stoker::STOKER_ISA
