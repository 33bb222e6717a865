// Packed weights times activation rows: integer dot products, or exact float32.
//
// Every output element is one chain of operations in order of its columns, the same whatever the
// number of rows beside it, so its bits do not depend on its neighbours.
namespace stoker::STOKER_ISA {

// One vector of scales; the type is known where this is inlined, so nothing is decided in loops.
template <Type kType>
STOKER_INLINE F load_scale(const void* values, int64_t index) {
  if constexpr (kType == Type::kF32) return load(static_cast<const float*>(values) + index);
  const uint16_t* half = static_cast<const uint16_t*>(values) + index;
  if constexpr (kType == Type::kBF16) return load_bf16(half);
  if constexpr (kType == Type::kF16) return load_half(half);
  if constexpr (kType == Type::kI8) return load_i8(static_cast<const int8_t*>(values) + index);
  return load_u8(static_cast<const uint8_t*>(values) + index);
}

template <Type kType>
static void expand_type(const Scales& scales, int64_t first_block, int64_t blocks, int64_t repeat,
                        float* out) {
  int64_t group = first_block / repeat, used = first_block % repeat;
  for (int64_t b = 0; b < blocks; ++b, out += kTile) {
    for (int lane = 0; lane < kTile; lane += kLanes) {
      store(out + lane, load_scale<kType>(scales.values, group * kTile + lane));
    }
    if (++used == repeat) ++group, used = 0;
  }
}

template <Type kType>
static void multiply_super(const Scales& scales, int64_t first_block, int64_t blocks,
                           int64_t repeat, float* out) {
  const int64_t each = scales.groups / scales.supers * repeat;  // blocks that share a factor
  int64_t super = first_block / each, used = first_block % each;
  for (int64_t b = 0; b < blocks; ++b, out += kTile) {
    for (int lane = 0; lane < kTile; lane += kLanes) {
      const F factor = load_scale<kType>(scales.super, super * kTile + lane);
      store(out + lane, mul(load(out + lane), factor));
    }
    if (++used == each) ++super, used = 0;
  }
}

static void expand(const Scales& scales, int64_t first_block, int64_t blocks, int64_t repeat,
                   float* out) {
  using Fn = void (*)(const Scales&, int64_t, int64_t, int64_t, float*);
  static constexpr Fn kExpand[] = {expand_type<Type::kF32>, expand_type<Type::kBF16>,
                                   expand_type<Type::kF16>, expand_type<Type::kI8>,
                                   expand_type<Type::kU8>};
  static constexpr Fn kSuper[] = {multiply_super<Type::kF32>, multiply_super<Type::kBF16>,
                                  multiply_super<Type::kF16>, multiply_super<Type::kI8>,
                                  multiply_super<Type::kU8>};
  kExpand[static_cast<int>(scales.type)](scales, first_block, blocks, repeat, out);
  if (scales.super) {
    kSuper[static_cast<int>(scales.super_type)](scales, first_block, blocks, repeat, out);
  }
}

template <bool kByte, int kTiles, int kCount>
STOKER_INLINE void dot_block(const uint8_t* w, int64_t tile_bytes, const int8_t* a, int64_t block,
                             int64_t ahead, I (&dot)[kTiles][kCount]) {
  const int8_t* a_high = a + block / 2 * kCount;
  const int64_t step = kByte ? 4 : 8;
  for (int64_t c = 0; c < block; c += step, w += 4 * kTile) {
    I low[kTiles], high[kTiles];
    STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
      low[i] = load_bytes(w + i * tile_bytes);
      prefetch(w + i * tile_bytes + ahead);
      if constexpr (!kByte) {
        high[i] = high_nibbles(low[i]);
        low[i] = low_nibbles(low[i]);
      }
    }
    STOKER_UNROLL for (int t = 0; t < kCount; ++t, a += 4) {
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) dot[i][t] = dot4<!kByte>(dot[i][t], low[i], a);
    }
    if constexpr (!kByte) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t, a_high += 4) {
        STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
          dot[i][t] = dot4<true>(dot[i][t], high[i], a_high);
        }
      }
    }
  }
}

// Sums of kTiles vectors of outputs for kCount rows, kept in registers over all blocks.
template <int kTiles, int kCount>
struct Sums {
  F total[kTiles][kCount];

  STOKER_INLINE void start(Sums& s, const Tiles& tiles, int lane) {
    STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const int64_t at = i * kTile + lane;
        const float* old = tiles.out + t * tiles.ld + at;
        s.total[i][t] = tiles.resume ? load_n(old, width(tiles, at)) : zero();
      }
    }
  }

  STOKER_INLINE void finish(const Sums& s, const Tiles& tiles, int lane) {
    STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const int64_t at = i * kTile + lane;
        store_n(tiles.out + t * tiles.ld + at, s.total[i][t], width(tiles, at));
      }
    }
  }

  // Lanes from column `at` on that are outputs.
  STOKER_INLINE int64_t width(const Tiles& tiles, int64_t at) {
    return std::clamp<int64_t>(tiles.valid - at, 0, kLanes);
  }
};

template <bool kByte, bool kMinimum, int kTiles, int kCount>
static void product(const Tiles& tiles) {
  const int64_t block = tiles.block, bytes = block * kTile / (kByte ? 1 : 2);
  for (int lane = 0; lane < kTile; lane += kLanes) {
    Sums<kTiles, kCount> sums;
    sums.start(sums, tiles, lane);
    const uint8_t* w = tiles.payload + lane * 4;
    const int8_t* a = tiles.x.codes;
    const float *unit = tiles.x.scale, *sum = tiles.x.sum;
    const int32_t* init = tiles.x.init;
    const float *scale = tiles.scale + lane, *minimum = tiles.minimum + lane;
    for (int64_t b = 0; b < tiles.blocks; ++b) {
      I dot[kTiles][kCount];
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const I first_value = set1(init[t]);
        STOKER_UNROLL for (int i = 0; i < kTiles; ++i) dot[i][t] = first_value;
      }
      if (block == 32) {  // the common case, unrolled
        dot_block<kByte, kTiles, kCount>(w, tiles.tile_bytes, a, 32, tiles.ahead, dot);
      } else {
        dot_block<kByte, kTiles, kCount>(w, tiles.tile_bytes, a, block, tiles.ahead, dot);
      }
      F s[kTiles], m[kTiles];
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
        s[i] = load(scale + i * tiles.stride * kTile);
        if constexpr (kMinimum) m[i] = load(minimum + i * tiles.stride * kTile);
      }
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const F u = set1(unit[t]), all = set1(sum[t]);
        STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
          F& total = sums.total[i][t];
          total = fma(to_float(dot[i][t]), mul(s[i], u), total);
          if constexpr (kMinimum) total = fma(m[i], all, total);
        }
      }
      w += bytes;
      a += block * kCount;
      unit += kCount;
      sum += kCount;
      init += kCount;
      scale += kTile;
      minimum += kTile;
    }
    sums.finish(sums, tiles, lane);
  }
}

// One vector of codes of each tile, four columns each, times float activations.
template <int kTiles, int kCount>
STOKER_INLINE void exact_columns(const I (&codes)[kTiles], int zero_point, const float* a,
                                 F (&part)[kTiles][kCount]) {
  STOKER_UNROLL for (int j = 0; j < 4; ++j) {
    F w[kTiles];
    STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
      w[i] = to_float(add(byte_of_lane(codes[i], j), set1(-zero_point)));
    }
    STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
      const F x = set1(a[j * kCount + t]);
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) part[i][t] = fma(w[i], x, part[i][t]);
    }
  }
}

template <bool kByte, bool kMinimum, int kTiles, int kCount>
static void exact(const Tiles& tiles) {
  const int64_t block = tiles.block, step = kByte ? 4 : 8;
  const uint8_t* payload = tiles.payload;
  for (int lane = 0; lane < kTile; lane += kLanes) {
    Sums<kTiles, kCount> sums;
    sums.start(sums, tiles, lane);
    const uint8_t* w = payload + lane * 4;
    for (int64_t b = 0; b < tiles.blocks; ++b) {
      const float* a = tiles.x.values + b * block * kCount;
      F part[kTiles][kCount];
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
        STOKER_UNROLL for (int t = 0; t < kCount; ++t) part[i][t] = zero();
      }
      for (int64_t c = 0; c < block; c += step, w += 4 * kTile) {
        I low[kTiles], high[kTiles];
        STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
          low[i] = load_bytes(w + i * tiles.tile_bytes);
          if constexpr (!kByte) {
            high[i] = high_nibbles(low[i]);
            low[i] = low_nibbles(low[i]);
          }
        }
        if constexpr (kByte) {
          exact_columns<kTiles, kCount>(low, tiles.zero_point, a + c * kCount, part);
        } else {
          exact_columns<kTiles, kCount>(low, tiles.zero_point, a + c / 2 * kCount, part);
          exact_columns<kTiles, kCount>(high, tiles.zero_point, a + (c + block) / 2 * kCount, part);
        }
      }
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
        const int64_t at = (i * tiles.stride + b) * kTile + lane;
        const F s = load(tiles.scale + at);
        STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
          F& total = sums.total[i][t];
          total = fma(part[i][t], s, total);
          if constexpr (kMinimum) {
            total = fma(load(tiles.minimum + at), set1(tiles.x.sum[b * kCount + t]), total);
          }
        }
      }
    }
    sums.finish(sums, tiles, lane);
  }
}

}  // namespace stoker::STOKER_ISA
