// Packed weights times activation rows: integer dot products, or exact float32.
//
// Every output element is one chain of operations in order of its columns, the same whatever the
// number of rows beside it, so its bits do not depend on its neighbours.
namespace stoker::STOKER_ISA {

// One vector of scales; the type is known where this is inlined, so nothing is decided in loops.
template <Type kType>
STOKER_INLINE F load_scale(const void* values, int64_t index) {
  if constexpr (kType == Type::kF32) return load(static_cast<const float*>(values) + index);
  if constexpr (kType == Type::kBF16) return load_bf16(static_cast<const uint16_t*>(values) + index);
  if constexpr (kType == Type::kF16) return load_half(static_cast<const uint16_t*>(values) + index);
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

template <bool kByte, int kCount>
STOKER_INLINE void dot_block(const uint8_t* w, const int8_t* a, int64_t block, I* dot) {
  if constexpr (kByte) {
    for (int64_t c = 0; c < block; c += 4, w += 4 * kTile, a += 4 * kCount) {
      const I codes = load_bytes(w);
      for (int t = 0; t < kCount; ++t) dot[t] = dot4<false>(dot[t], codes, a + 4 * t);
    }
  } else {
    const int8_t* a_high = a + block / 2 * kCount;
    for (int64_t c = 0; c < block; c += 8, w += 4 * kTile, a += 4 * kCount, a_high += 4 * kCount) {
      const I codes = load_bytes(w);
      const I low = low_nibbles(codes), high = high_nibbles(codes);
      for (int t = 0; t < kCount; ++t) dot[t] = dot4<true>(dot[t], low, a + 4 * t);
      for (int t = 0; t < kCount; ++t) dot[t] = dot4<true>(dot[t], high, a_high + 4 * t);
    }
  }
}

template <bool kByte, bool kMinimum, int kCount>
static void product(const uint8_t* payload, const float* scale, const float* minimum,
                    const Activations& x, int64_t blocks, int64_t block, int, float* out,
                    int64_t ld, int64_t valid, bool resume) {
  const int64_t bytes = block * kTile / (kByte ? 1 : 2);
  for (int lane = 0; lane < kTile && lane < valid; lane += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, valid - lane);
    F total[kCount];
    for (int t = 0; t < kCount; ++t) {
      total[t] = resume ? load_n(out + t * ld + lane, n) : zero();
    }
    const uint8_t* w = payload + lane * 4;
    const int8_t* a = x.codes;
    const float *unit = x.scale, *sum = x.sum;
    const int32_t* init = x.init;
    for (int64_t b = 0; b < blocks; ++b) {
      I dot[kCount];
      for (int t = 0; t < kCount; ++t) dot[t] = set1(init[t]);
      if (block == 32) {  // the common case, unrolled
        dot_block<kByte, kCount>(w, a, 32, dot);
      } else {
        dot_block<kByte, kCount>(w, a, block, dot);
      }
      const F s = load(scale + b * kTile + lane);
      for (int t = 0; t < kCount; ++t) {
        total[t] = fma(to_float(dot[t]), mul(s, set1(unit[t])), total[t]);
      }
      if constexpr (kMinimum) {
        const F m = load(minimum + b * kTile + lane);
        for (int t = 0; t < kCount; ++t) total[t] = fma(m, set1(sum[t]), total[t]);
      }
      w += bytes;
      a += block * kCount;
      unit += kCount;
      sum += kCount;
      init += kCount;
    }
    for (int t = 0; t < kCount; ++t) store_n(out + t * ld + lane, total[t], n);
  }
}

// One vector of codes, four columns each, times float activations.
template <int kCount>
STOKER_INLINE void exact_columns(I codes, int zero_point, const float* a, F* part) {
  for (int j = 0; j < 4; ++j) {
    const F w = to_float(add(byte_of_lane(codes, j), set1(-zero_point)));
    for (int t = 0; t < kCount; ++t) {
      part[t] = fma(w, set1(a[j * kCount + t]), part[t]);
    }
  }
}

template <bool kByte, bool kMinimum, int kCount>
static void exact(const uint8_t* payload, const float* scale, const float* minimum,
                  const Activations& x, int64_t blocks, int64_t block, int zero_point, float* out,
                  int64_t ld, int64_t valid, bool resume) {
  const int64_t bytes = block * kTile / (kByte ? 1 : 2);
  for (int lane = 0; lane < kTile && lane < valid; lane += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, valid - lane);
    F total[kCount];
    for (int t = 0; t < kCount; ++t) {
      total[t] = resume ? load_n(out + t * ld + lane, n) : zero();
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* w = payload + b * bytes + lane * 4;
      const float* a = x.values + b * block * kCount;
      F part[kCount];
      for (int t = 0; t < kCount; ++t) part[t] = zero();
      for (int64_t c = 0; c < block; c += kByte ? 4 : 8, w += 4 * kTile) {
        const I codes = load_bytes(w);
        if constexpr (kByte) {
          exact_columns<kCount>(codes, zero_point, a + c * kCount, part);
        } else {
          exact_columns<kCount>(low_nibbles(codes), zero_point, a + c / 2 * kCount, part);
          exact_columns<kCount>(high_nibbles(codes), zero_point,
                                a + (c / 2 + block / 2) * kCount, part);
        }
      }
      const F s = load(scale + b * kTile + lane);
      for (int t = 0; t < kCount; ++t) total[t] = fma(part[t], s, total[t]);
      if constexpr (kMinimum) {
        const F m = load(minimum + b * kTile + lane);
        for (int t = 0; t < kCount; ++t) total[t] = fma(m, set1(x.sum[b * kCount + t]), total[t]);
      }
    }
    for (int t = 0; t < kCount; ++t) store_n(out + t * ld + lane, total[t], n);
  }
}

}  // namespace stoker::STOKER_ISA
