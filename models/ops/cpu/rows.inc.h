// Activation rows on their way into a product: quantised or not, interleaved by row.
namespace stoker::STOKER_ISA {

// Lanes of one block's columns [c, block) of a row.
STOKER_INLINE F load_columns(const float* block, int64_t c, int64_t size) {
  return c + kLanes <= size ? load(block + c) : load_n(block + c, size - c);
}

// The largest magnitude of a block in each of kRows rows, as bits, which order as integers do, and
// put NaN above infinity above all numbers.
template <int kRows>
STOKER_INLINE void find_peaks(const float* x, int64_t ld, int64_t block, int32_t* peaks) {
  I peak[kRows];
  STOKER_UNROLL for (int r = 0; r < kRows; ++r) peak[r] = set1(0);
  for (int64_t c = 0; c < block; c += kLanes) {
    STOKER_UNROLL for (int r = 0; r < kRows; ++r) {
      peak[r] = max(peak[r], as_int(abs(load_columns(x + r * ld, c, block))));
    }
  }
  if constexpr (kRows == 4) {
    reduce_max4(peak, peaks);
  } else {
    STOKER_UNROLL for (int r = 0; r < kRows; ++r) peaks[r] = reduce_max(peak[r]);
  }
}

// Codes of a block in kRows of `rows` interleaved rows, and their sums.
template <int kRows>
STOKER_INLINE void round_block(const float* x, int64_t ld, int64_t block, const float* inverse,
                               int rows, int8_t* codes, int32_t* sums) {
  I total[kRows];
  STOKER_UNROLL for (int r = 0; r < kRows; ++r) total[r] = set1(0);
  for (int64_t c = 0; c < block; c += kLanes) {
    I code[kRows];
    STOKER_UNROLL for (int r = 0; r < kRows; ++r) {
      // What is too small or no number has inverse zero, and code zero.
      const F factor = set1(inverse[r]);
      code[r] = to_int(where_above(factor, 0.0f, mul(load_columns(x + r * ld, c, block), factor)));
      total[r] = add(total[r], code[r]);
    }
    int8_t* to = codes + c * rows;
    if (kRows == 4 && c + kLanes <= block) {
      store_quads(to, code);
      continue;
    }
    const int64_t quads = std::min<int64_t>(kLanes, block - c) / 4;
    STOKER_UNROLL for (int r = 0; r < kRows; ++r) {
      int8_t bytes[kLanes];
      store_int8(bytes, code[r]);
      for (int64_t i = 0; i < quads; ++i) {
        std::memcpy(to + (i * rows + r) * 4, bytes + 4 * i, 4);
      }
    }
  }
  if constexpr (kRows == 4) {
    reduce_add4(total, sums);
  } else {
    STOKER_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = reduce_add(total[r]);
  }
}

template <int kRows>
static void quantize_rows(const float* x, int64_t ld, int rows, int64_t C, int64_t block,
                          int zero_point, int8_t* codes, float* scale, float* sum, int32_t* init) {
  const int64_t blocks = C / block, all = blocks * rows;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int row = 0; row < rows; row += kRows) {
      find_peaks<kRows>(x + row * ld + b * block, ld, block, init + b * rows + row);
    }
  }
  // Scales, and in `sum` for now their inverses, of all blocks and rows.
  for (int64_t i = 0; i < all; i += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, all - i);
    const F peak = as_float(load_n(init + i, n));
    // Zero; or NaN, where a NaN or infinity is in the block: integer codes must not hide it.
    const F poison = mul(peak, zero());
    const F usable = where_above(peak, 1e-30f, add(peak, poison));
    const F inverse = where_above(peak, 1e-30f, div(set1(127.0f), peak));
    store_n(scale + i, add(div(usable, set1(127.0f)), poison), n);
    store_n(sum + i, inverse, n);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    for (int row = 0; row < rows; row += kRows) {
      const int64_t at = b * rows + row;
      round_block<kRows>(x + row * ld + b * block, ld, block, sum + at, rows,
                         codes + b * block * rows + row * 4, init + at);
    }
  }
  for (int64_t i = 0; i < all; i += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, all - i);
    const I total = load_n(init + i, n);
    store_n(sum + i, mul(load_n(scale + i, n), to_float(total)), n);
    store_n(init + i, mul(total, set1(-zero_point)), n);
  }
}

static void quantize(const float* x, int64_t ld, int rows, int64_t C, int64_t block,
                     int zero_point, int8_t* codes, float* scale, float* sum, int32_t* init) {
  if (rows == 4) {
    quantize_rows<4>(x, ld, rows, C, block, zero_point, codes, scale, sum, init);
  } else {
    quantize_rows<1>(x, ld, rows, C, block, zero_point, codes, scale, sum, init);
  }
}

// As `quantize_rows` of quant_pages.py. A NaN or infinity makes the scale one.
static float quantize_row(const float* x, int64_t n, int8_t* codes) {
  int32_t bits;
  find_peaks<1>(x, 0, n, &bits);
  float peak;
  std::memcpy(&peak, &bits, 4);
  const float scale = peak / 127.0f;
  const bool usable = scale > 1e-30f && scale < std::numeric_limits<float>::infinity();
  const F inverse = set1(usable ? 1.0f / scale : 0.0f);
  for (int64_t c = 0; c < n; c += kLanes) {
    const I code = to_int(mul(load_columns(x, c, n), inverse));
    if (c + kLanes <= n) {
      store_int8(codes + c, code);
    } else {
      int8_t last[kLanes];
      store_int8(last, code);
      std::memcpy(codes + c, last, static_cast<size_t>(n - c));
    }
  }
  return scale;
}

static void interleave(const float* x, int64_t ld, int rows, int64_t C, int64_t block,
                       float* values, float* sum) {
  for (int row = 0; row < rows; ++row, x += ld) {
    for (int64_t b = 0; b < C / block; ++b) {
      F total = zero();
      for (int64_t c = 0; c < block; c += kLanes) {
        const float* from = x + b * block + c;
        total = add(total, c + kLanes <= block ? load(from) : load_n(from, block - c));
      }
      sum[b * rows + row] = reduce_add(total);
    }
    for (int64_t c = 0; c < C; ++c) values[c * rows + row] = x[c];
  }
}

}  // namespace stoker::STOKER_ISA
