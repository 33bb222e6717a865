// Dense row-major weights times activation rows: lanes run along the columns.
namespace stoker::STOKER_ISA {

template <typename T>
struct Element;
template <>
struct Element<float> {
  STOKER_INLINE F get(const float* p) { return load(p); }
  STOKER_INLINE F get_n(const float* p, int64_t n) { return load_n(p, n); }
};
struct Bf16 {
  uint16_t bits;
};
template <>
struct Element<Bf16> {
  STOKER_INLINE F get(const Bf16* p) { return load_bf16(&p->bits); }
  STOKER_INLINE F get_n(const Bf16* p, int64_t n) { return load_bf16_n(&p->bits, n); }
};
struct Half {
  uint16_t bits;
};
template <>
struct Element<Half> {
  STOKER_INLINE F get(const Half* p) { return load_half(&p->bits); }
  STOKER_INLINE F get_n(const Half* p, int64_t n) { return load_half_n(&p->bits, n); }
};
// Codes, without their scale.
template <>
struct Element<int8_t> {
  STOKER_INLINE F get(const int8_t* p) { return load_i8(p); }
  STOKER_INLINE F get_n(const int8_t* p, int64_t n) {
    int8_t copy[kLanes] = {};
    std::memcpy(copy, p, static_cast<size_t>(n));
    return load_i8(copy);
  }
};

// kOut weight rows by kCount activation rows, one sum each in registers.
template <typename T, int kOut, int kCount>
static void dense_block(const T* weight, int64_t C, const float* x, float* out, int64_t ld) {
  F total[kOut][kCount];
  for (int r = 0; r < kOut; ++r) {
    for (int t = 0; t < kCount; ++t) total[r][t] = zero();
  }
  int64_t c = 0;
  for (; c + kLanes <= C; c += kLanes) {
    F a[kCount];
    for (int t = 0; t < kCount; ++t) a[t] = load(x + t * C + c);
    for (int r = 0; r < kOut; ++r) {
      const F w = Element<T>::get(weight + r * C + c);
      for (int t = 0; t < kCount; ++t) total[r][t] = fma(w, a[t], total[r][t]);
    }
  }
  if (c < C) {
    for (int r = 0; r < kOut; ++r) {
      const F w = Element<T>::get_n(weight + r * C + c, C - c);
      for (int t = 0; t < kCount; ++t) {
        total[r][t] = fma(w, load_n(x + t * C + c, C - c), total[r][t]);
      }
    }
  }
  for (int r = 0; r < kOut; ++r) {
    for (int t = 0; t < kCount; ++t) out[t * ld + r] = reduce_add(total[r][t]);
  }
}

template <typename T, int kCount>
static void dense(const void* weight, int64_t C, int64_t count, const float* x, float* out,
                  int64_t ld) {
  const T* w = static_cast<const T*>(weight);
  if (count == 4) {
    dense_block<T, 4, kCount>(w, C, x, out, ld);
  } else {
    for (int64_t r = 0; r < count; ++r) dense_block<T, 1, kCount>(w + r * C, C, x, out + r, ld);
  }
}

}  // namespace stoker::STOKER_ISA
