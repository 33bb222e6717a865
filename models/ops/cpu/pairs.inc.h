// Attention over bfloat16 pages by products of pairs: twice as many an instruction, of queries and
// weights that are rounded to bfloat16 as the pages are. Sums are chains of pairs in order of head
// element and of key position, pairs being aligned by position, so that a row's bits do not depend
// on its neighbours. For AVX-512 with BF16.
namespace stoker::STOKER_ISA {

STOKER_INLINE F dot2(F acc, I a, I b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
STOKER_INLINE I set_pair(const uint16_t* p) {
  int32_t both;
  __builtin_memcpy(&both, p, 4);
  return set1(both);
}
STOKER_INLINE I load_words_n(const Bf16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, p);
}
// Words of the low and of the high half, one after the other.
STOKER_INLINE I zip_halves(I x) {
  const I order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                   7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, x);
}
// The first sixteen words of a and of b, one after the other; then the last ones.
STOKER_INLINE void zip(I a, I b, I* first, I* last) {
  *first = zip_halves(_mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1));
  *last = zip_halves(_mm512_shuffle_i64x2(a, b, 0xee));
}
// Sixteen words at a and at b, one after the other.
STOKER_INLINE I zip(const Bf16* a, const Bf16* b) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  return zip_halves(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// As store_bf16, in an instruction, for which tiny numbers are zero.
static void narrow(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = std::min<int64_t>(kLanes, n - i);
    const __m256i words = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load_n(x + i, m)));
    _mm256_mask_storeu_epi16(out + i, first(m), words);
  }
}

constexpr int kRoundBlocks = Heads<Bf16>::kLength / kKeys;
using PairBlocks = BlocksOf<Bf16, kRoundBlocks>;  // of a round

// As score_block, of keys as they lie or in pairs.
template <int kVectors, int kCount, bool kPaired>
static void score_pairs(const uint16_t* q, int64_t H, const PairBlocks& blocks, int64_t step,
                        float* scores) {
  F total[kCount][kVectors];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = zero();
  }
  for (int64_t h = 0; h < H; h += 2) {
    I k[kVectors];
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      const Bf16* column = blocks.now[v] + h * step;
      if constexpr (!kPaired) prefetch(blocks.later[v] + h * kKeys);
      k[v] = kPaired ? _mm512_loadu_si512(column) : zip(column, column + step);
    }
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      const I x = set_pair(q + r * H + h);
      STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = dot2(total[r][v], x, k[v]);
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(scores + r * kSpan + v * kLanes, total[r][v]);
    }
  }
}

// As score_tokens.
template <int kKeysAtOnce, int kCount>
static void score_token_pairs(const uint16_t* q, int64_t H, const Bf16* tokens, float* scores) {
  F total[kCount][kKeysAtOnce];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) total[r][i] = zero();
  }
  for (int64_t h = 0; h < H; h += 32) {
    I k[kKeysAtOnce];
    STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
      k[i] = load_words_n(tokens + i * H + h, H - h);
    }
    STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
      const I x = load_words_n(reinterpret_cast<const Bf16*>(q + r * H + h), H - h);
      STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) total[r][i] = dot2(total[r][i], x, k[i]);
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
      scores[r * kSpan + i] = reduce_add(total[r][i]);
    }
  }
}

// A pair of values at `row` and a token later; what lies outside [from, to) counts as zero, since
// the cells of no living key may hold anything. The lanes are columns, `width` of 32.
STOKER_INLINE void value_pair(const Bf16* row, int64_t H, int64_t key, int64_t from, int64_t to,
                              int64_t width, I* first, I* last) {
  zip(load_words_n(row, key >= from ? width : 0), load_words_n(row + H, key + 1 < to ? width : 0),
      first, last);
}

// As weigh_block, of values as they lie or in pairs; with two vectors only their first `width`
// lanes. `weights` of a row are kLength, those of the round that `blocks` are.
template <int kLength, int kVectors, int kCount, bool kPaired>
static void weigh_pairs(const uint16_t* weights, const PairBlocks& blocks, int64_t skip,
                        int64_t from, int64_t to, bool resume, int64_t width, int64_t H,
                        float* out) {
  constexpr bool kPart = kVectors == 2;
  const auto lanes = [&](int v) {
    return kPart ? std::clamp<int64_t>(width - v * kLanes, 0, kLanes) : kLanes;
  };
  F total[kCount][kVectors];
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      total[r][v] = resume ? load_n(out + r * H + v * kLanes, lanes(v)) : zero();
    }
  }
  for (int64_t key = from / 2 * 2; key < to;) {
    const int64_t at = (kPaired ? 2 * skip : skip) + key % kKeys * H;
    const Bf16 *row = blocks.now[key / kKeys] + at, *later = blocks.later[key / kKeys] + at;
    const int64_t end = std::min(to, (key / kKeys + 1) * kKeys);
    for (; key < end; key += 2, row += 2 * H, later += 2 * H) {
      I x[kVectors];
      STOKER_UNROLL for (int v = 0; !kPaired && v < kVectors; v += 2) {
        prefetch(later + v * kLanes);
        prefetch(later + H + v * kLanes);
      }
      STOKER_UNROLL for (int v = 0; v < kVectors; v += 2) {
        if (kPaired) {
          x[v] = load_words_n(row + 2 * v * kLanes, 2 * lanes(v));
          x[v + 1] = load_words_n(row + 2 * (v + 1) * kLanes, 2 * lanes(v + 1));
        } else {
          value_pair(row + v * kLanes, H, key, from, to, kPart ? width : 32, &x[v], &x[v + 1]);
        }
      }
      STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
        const I w = set_pair(weights + r * kLength + key);
        STOKER_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = dot2(total[r][v], w, x[v]);
      }
    }
  }
  STOKER_UNROLL for (int r = 0; r < kCount; ++r) {
    STOKER_UNROLL for (int v = 0; v < kVectors; ++v) {
      store_n(out + r * H + v * kLanes, total[r][v], lanes(v));
    }
  }
}

// One head at work, as Round. Few rows read pages as they are; for many, a round of keys or values
// is put in pairs once.
template <bool kPaired>
struct PairRound : Heads<Bf16> {
  alignas(64) uint16_t q[kQueryFloats];
  alignas(64) Bf16 pairs[kPaired ? kMaxHead * kLength : 1];
  alignas(64) uint16_t weights[kMaxQueries * kLength];
  PairBlocks blocks;

  PairRound(const AttentionTile& tile, int64_t from, int64_t to)
      : Heads<Bf16>(tile, from, to, !kPaired) {
    narrow(tile.q, tile.heads * tile.rows * tile.H, q);
  }

  void take(const void* const* pages, int64_t head, int64_t key, bool keys) {
    for (int64_t i = 0; i < kRoundBlocks; ++i) {
      const int64_t b = key / kKeys + i;
      blocks.now[i] = block(pages, b, head);
      blocks.later[i] = meanwhile ? later(b, head, keys) : blocks.now[i];
    }
  }

  void pair_keys() {
    Bf16* to = pairs;
    for (const Bf16*& keys : blocks.now) {
      const Bf16* from = keys;
      keys = to;
      for (int64_t h = 0; h < tile.H; h += 2, from += 2 * tile.key_step, to += 2 * kKeys) {
        _mm512_storeu_si512(to, zip(from, from + tile.key_step));
      }
    }
  }

  void pair_values(int64_t from, int64_t to) {
    Bf16* out = pairs;
    int64_t key = 0;
    for (const Bf16*& values : blocks.now) {
      const Bf16* row = values;
      values = out;
      for (int64_t i = 0; i < kKeys; i += 2, key += 2, row += 2 * tile.H, out += 2 * tile.H) {
        if (key + 1 < from || key >= to) continue;
        for (int64_t h = 0; h < tile.H; h += 32) {
          const int64_t width = std::min<int64_t>(32, tile.H - h);
          I first_columns, last_columns;
          value_pair(row + h, tile.H, key, from, to, width, &first_columns, &last_columns);
          float* columns = reinterpret_cast<float*>(out + 2 * h);
          store_n(columns, as_float(first_columns), std::min<int64_t>(kLanes, width));
          store_n(columns + kLanes, as_float(last_columns), std::max<int64_t>(0, width - kLanes));
        }
      }
    }
  }

  void score(int64_t head, int64_t key, float* scores) {
    take(tile.k, head, key, true);
    if (tile.key_step == 0) {
      constexpr int kTokens = score_vectors(kScoreRows);
      for (int64_t at = 0; at < kLength; at += kTokens) {
        by_rows(tile.rows, [&](int64_t r, auto count) {
          score_token_pairs<kTokens, decltype(count)::value>(
              q + (head * tile.rows + r) * tile.H, tile.H,
              blocks.now[at / kKeys] + at % kKeys * tile.H, scores + r * kSpan + key + at);
        });
      }
      return;
    }
    if constexpr (kPaired) pair_keys();
    by_rows(tile.rows, [&](int64_t r, auto count) {
      score_pairs<kRoundBlocks, decltype(count)::value, kPaired>(
          q + (head * tile.rows + r) * tile.H, tile.H, blocks, kPaired ? kKeys : tile.key_step,
          scores + r * kSpan + key);
    });
  }

  void weigh(int64_t head, int64_t key, int64_t from, int64_t to, const float* scores) {
    take(tile.v, head, key, false);
    const bool resume = key > from;
    from = std::max<int64_t>(0, from - key);
    to = std::min<int64_t>(kLength, to - key);
    if constexpr (kPaired) pair_values(from, to);
    for (int64_t r = 0; r < tile.rows; ++r) {
      narrow(scores + r * kSpan + key, kLength, weights + r * kLength);
    }
    by_rows(tile.rows, [&](int64_t r, auto count) {
      constexpr int kCount = decltype(count)::value;
      const uint16_t* own = weights + r * kLength;
      float* out = tile.out + (head * tile.rows + r) * tile.H;
      int64_t h = 0;
      for (; h + 4 * kLanes <= tile.H; h += 4 * kLanes) {
        weigh_pairs<kLength, 4, kCount, kPaired>(own, blocks, h, from, to, resume, 64, tile.H,
                                                 out + h);
      }
      for (; h < tile.H; h += 2 * kLanes) {
        weigh_pairs<kLength, 2, kCount, kPaired>(own, blocks, h, from, to, resume,
                                                 std::min<int64_t>(32, tile.H - h), tile.H,
                                                 out + h);
      }
    });
  }
};

void attend_rounded(const AttentionTile& tile) {
  if (tile.rows < 2 * kScoreRows) {
    attend_by<PairRound<false>>(tile);
  } else {
    attend_by<PairRound<true>>(tile);
  }
}

}  // namespace stoker::STOKER_ISA
