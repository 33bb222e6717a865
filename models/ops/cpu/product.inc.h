// Packed weights times activation rows: integer dot products, or exact float32.
//
// Every output element is one chain of operations in order of its columns, the same whatever the
// number of rows beside it, so its bits do not depend on its neighbours.
namespace stoker::STOKER_ISA {

// One vector of scales; the type is known where this is inlined, so nothing is decided in loops.
template <Type kType>
STOKER_INLINE F load_scale(const uint8_t* p) {
  if constexpr (kType == Type::kF32) return load(reinterpret_cast<const float*>(p));
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p);
  if constexpr (kType == Type::kBF16) return load_bf16(half);
  if constexpr (kType == Type::kF16) return load_half(half);
  if constexpr (kType == Type::kI8) return load_i8(reinterpret_cast<const int8_t*>(p));
  return load_u8(p);
}

// The values of each block, or with kFactor, times the values that are there; `repeat` blocks share
// one, and a record has `each`.
template <Type kType, bool kFactor>
static void expand_type(const uint8_t* values, int64_t record_bytes, int64_t each, int64_t first,
                        int64_t blocks, int64_t repeat, float* out) {
  int64_t used = first % repeat, index = first / repeat % each;
  const uint8_t* record = values + first / repeat / each * record_bytes;
  for (int64_t b = 0; b < blocks; ++b, out += kTile) {
    const uint8_t* from = record + index * kTile * width(kType);
    for (int lane = 0; lane < kTile; lane += kLanes) {
      const F value = load_scale<kType>(from + lane * width(kType));
      store(out + lane, kFactor ? mul(load(out + lane), value) : value);
    }
    if (++used < repeat) continue;
    used = 0;
    if (++index == each) index = 0, record += record_bytes;
  }
}

static void expand(const uint8_t* tile, const Record& record, const Scales& scales, int64_t first,
                   int64_t blocks, int64_t repeat, float* out) {
  using Fn = void (*)(const uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float*);
  static constexpr Fn kExpand[] = {expand_type<Type::kF32, false>, expand_type<Type::kBF16, false>,
                                   expand_type<Type::kF16, false>, expand_type<Type::kI8, false>,
                                   expand_type<Type::kU8, false>};
  static constexpr Fn kFactor[] = {expand_type<Type::kF32, true>, expand_type<Type::kBF16, true>,
                                   expand_type<Type::kF16, true>, expand_type<Type::kI8, true>,
                                   expand_type<Type::kU8, true>};
  kExpand[static_cast<int>(scales.type)](tile + scales.offset, record.bytes, record.each, first,
                                         blocks, repeat, out);
  if (scales.factored) {
    kFactor[static_cast<int>(scales.super_type)](tile + scales.super_offset, record.bytes,
                                                 record.supers, first, blocks,
                                                 repeat * (record.each / record.supers), out);
  }
}

// Splits a vector of 4-bit codes into those of a block's first half and of its second.
template <Code kCode>
STOKER_INLINE void split_nibbles(I codes, I table, I* low, I* high) {
  *low = low_nibbles(codes);
  *high = high_nibbles(codes);
  if constexpr (kCode == Code::kTable) {
    *low = look_up(table, *low);
    *high = look_up(table, *high);
  }
}

template <Code kCode>
STOKER_INLINE I table_of(const Tiles& tiles) {
  if constexpr (kCode == Code::kTable) return load_table(tiles.table);
  return set1(0);
}

// How far vector i of a block of registers is from the first, where kVectors belong to each tile:
// tiles are `tile` bytes apart, lanes `lane` bytes.
template <int kVectors>
STOKER_INLINE int64_t vector_at(int i, int64_t tile, int64_t lane) {
  return i / kVectors * tile + i % kVectors * kLanes * lane;
}

template <Code kCode, int kVectors, int kAll, int kCount>
STOKER_INLINE void dot_block(const uint8_t* w, int64_t tile_bytes, const int8_t* a, int64_t block,
                             int64_t ahead, I table, Dot<kCode> (&dot)[kAll][kCount]) {
  constexpr bool kByte = kCode == Code::kByte;
  const int8_t* a_high = a + block / 2 * kCount;
  const int64_t step = kByte ? 4 : 8;
  for (int64_t c = 0; c < block; c += step, w += 4 * kTile) {
    I low[kAll], high[kAll];
    STOKER_UNROLL for (int i = 0; i < kAll; ++i) {
      const uint8_t* from = w + vector_at<kVectors>(i, tile_bytes, 4);
      low[i] = load_bytes(from);
      if (i % kVectors == 0) prefetch(from + ahead);
      if constexpr (!kByte) split_nibbles<kCode>(low[i], table, &low[i], &high[i]);
    }
    STOKER_UNROLL for (int t = 0; t < kCount; ++t, a += 4) {
      STOKER_UNROLL for (int i = 0; i < kAll; ++i) Dot<kCode>::add4(dot[i][t], low[i], a);
    }
    if constexpr (!kByte) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t, a_high += 4) {
        STOKER_UNROLL for (int i = 0; i < kAll; ++i) Dot<kCode>::add4(dot[i][t], high[i], a_high);
      }
    }
  }
}

constexpr int64_t kFarApart = 8192;  // outputs in a row

// Sums of kTiles * kVectors vectors of outputs for kCount rows, over all blocks.
template <int kTiles, int kVectors, int kCount>
struct Sums {
  static constexpr int kAll = kTiles * kVectors;
  F total[kAll][kCount];

  STOKER_INLINE void start(Sums& s, const Tiles& tiles, int lane) {
    STOKER_UNROLL for (int i = 0; i < kAll; ++i) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const int64_t at = vector_at<kVectors>(i, kTile, 1) + lane;
        const float* old = tiles.out + t * tiles.ld + at;
        s.total[i][t] = tiles.resume ? load_n(old, width(tiles, at)) : zero();
      }
    }
  }

  STOKER_INLINE void finish(const Sums& s, const Tiles& tiles, int lane) {
    STOKER_UNROLL for (int i = 0; i < kAll; ++i) {
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const int64_t at = vector_at<kVectors>(i, kTile, 1) + lane;
        float* to = tiles.out + t * tiles.ld + at;
        store_n(to, s.total[i][t], width(tiles, at));
        // Rows of logits fall on few sets of the caches: their lines must come early.
        if (kCount > 1 && tiles.ld >= kFarApart) prefetch_to_write(to + kTiles * kTile);
      }
    }
  }

  // Lanes from column `at` on that are outputs.
  STOKER_INLINE int64_t width(const Tiles& tiles, int64_t at) {
    return std::clamp<int64_t>(tiles.valid - at, 0, kLanes);
  }
};

template <Code kCode, bool kMinimum, bool kHalves, int kTiles, int kCount>
static void product(const Tiles& tiles) {
  constexpr bool kByte = kCode == Code::kByte;
  constexpr Type kType = kHalves ? Type::kF16 : Type::kF32;
  constexpr int kVectors = product_vectors(kCode), kAll = kTiles * kVectors;
  using Products = Dot<kCode>;
  constexpr bool kZeroPoint = !(kCode == Code::kNibble && kMinimum);
  const I table = table_of<kCode>(tiles);
  const int64_t block = tiles.block, bytes = block * kTile / (kByte ? 1 : 2);
  for (int lane = 0; lane < kTile; lane += kVectors * kLanes) {
    Sums<kTiles, kVectors, kCount> sums;
    sums.start(sums, tiles, lane);
    const uint8_t* w = tiles.payload + lane * 4;
    const int8_t* a = tiles.x.codes;
    const float *unit = tiles.x.scale, *sum = tiles.x.sum;
    const int32_t* init = tiles.x.init;
    const uint8_t* scale = tiles.scale + lane * width(kType);
    const uint8_t* minimum = tiles.minimum + lane * width(kType);
    for (int64_t b = 0, left = tiles.left; b < tiles.blocks; ++b) {
      Products dot[kAll][kCount];
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const Products start = Products::start(kZeroPoint ? init[t] : 0);
        STOKER_UNROLL for (int i = 0; i < kAll; ++i) dot[i][t] = start;
      }
      if (block == 32) {  // the common case, unrolled
        dot_block<kCode, kVectors>(w, tiles.tile_bytes, a, 32, tiles.ahead, table, dot);
      } else {
        dot_block<kCode, kVectors>(w, tiles.tile_bytes, a, block, tiles.ahead, table, dot);
      }
      F s[kAll], m[kAll];
      STOKER_UNROLL for (int i = 0; i < kAll; ++i) {
        const int64_t at = vector_at<kVectors>(i, tiles.scale_bytes, width(kType));
        s[i] = load_scale<kType>(scale + at);
        if constexpr (kMinimum) m[i] = load_scale<kType>(minimum + at);
        if (kHalves && i % kVectors == 0) prefetch(scale + at + tiles.ahead);
      }
      STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
        const F u = set1(unit[t]), all = set1(sum[t]);
        STOKER_UNROLL for (int i = 0; i < kAll; ++i) {
          F& total = sums.total[i][t];
          const I sum_of_block = Products::end(dot[i][t], kZeroPoint ? init[t] : 0);
          total = fma(to_float(sum_of_block), mul(s[i], u), total);
          if constexpr (kMinimum) total = fma(m[i], all, total);
        }
      }
      w += bytes;
      a += block * kCount;
      unit += kCount;
      sum += kCount;
      init += kCount;
      scale += kTile * width(kType);
      minimum += kTile * width(kType);
      if (--left == 0) {
        left = tiles.per_record;
        w += tiles.gap;
        scale += tiles.scale_gap;
        minimum += tiles.scale_gap;
      }
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

template <Code kCode, bool kMinimum, int kTiles, int kCount>
static void exact(const Tiles& tiles) {
  constexpr bool kByte = kCode == Code::kByte;
  const I table = table_of<kCode>(tiles);
  const int64_t block = tiles.block, step = kByte ? 4 : 8;
  const uint8_t* payload = tiles.payload;
  for (int lane = 0; lane < kTile; lane += kLanes) {
    Sums<kTiles, 1, kCount> sums;
    sums.start(sums, tiles, lane);
    const uint8_t* w = payload + lane * 4;
    for (int64_t b = 0, left = tiles.left; b < tiles.blocks; ++b) {
      const float* a = tiles.x.values + b * block * kCount;
      F part[kTiles][kCount];
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
        STOKER_UNROLL for (int t = 0; t < kCount; ++t) part[i][t] = zero();
      }
      for (int64_t c = 0; c < block; c += step, w += 4 * kTile) {
        I low[kTiles], high[kTiles];
        STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
          low[i] = load_bytes(w + i * tiles.tile_bytes);
          if constexpr (!kByte) split_nibbles<kCode>(low[i], table, &low[i], &high[i]);
        }
        if constexpr (kByte) {
          exact_columns<kTiles, kCount>(low, tiles.zero_point, a + c * kCount, part);
        } else {
          exact_columns<kTiles, kCount>(low, tiles.zero_point, a + c / 2 * kCount, part);
          exact_columns<kTiles, kCount>(high, tiles.zero_point, a + (c + block) / 2 * kCount, part);
        }
      }
      STOKER_UNROLL for (int i = 0; i < kTiles; ++i) {
        const int64_t at = i * tiles.scale_bytes + (b * kTile + lane) * width(Type::kF32);
        const F scale = load_scale<Type::kF32>(tiles.scale + at);
        STOKER_UNROLL for (int t = 0; t < kCount; ++t) {
          F& total = sums.total[i][t];
          total = fma(part[i][t], scale, total);
          if constexpr (kMinimum) {
            const F minimum = load_scale<Type::kF32>(tiles.minimum + at);
            total = fma(minimum, set1(tiles.x.sum[b * kCount + t]), total);
          }
        }
      }
      if (--left == 0) left = tiles.per_record, w += tiles.gap;
    }
    sums.finish(sums, tiles, lane);
  }
}

}  // namespace stoker::STOKER_ISA
