// Activation rows on their way into a product: quantised or not, interleaved by row.
namespace stoker::STOKER_ISA {

// A NaN or infinity in a block makes its scale NaN: integer codes must not hide it.
static void quantize(const float* x, int64_t ld, int rows, int64_t C, int64_t block,
                     int zero_point, int8_t* codes, float* scale, float* sum, int32_t* init) {
  for (int row = 0; row < rows; ++row, x += ld) {
    for (int64_t b = 0; b < C / block; ++b) {
      const float* from = x + b * block;
      F peak = zero(), poison = zero();
      for (int64_t c = 0; c < block; c += kLanes) {
        const F v = c + kLanes <= block ? load(from + c) : load_n(from + c, block - c);
        peak = max(peak, abs(v));
        poison = fma(v, zero(), poison);
      }
      const float largest = reduce_max(peak);
      const float poisoned = reduce_add(poison);  // zero or NaN
      const bool usable = largest > 1e-30f && poisoned == 0.0f;
      const F inverse = set1(usable ? 127.0f / largest : 0.0f);
      const float unit = (usable ? largest / 127.0f : 0.0f) + poisoned;
      I total = set1(0);
      int8_t* to = codes + (b * block * rows + row * 4);
      for (int64_t c = 0; c < block; c += kLanes) {
        const F v = c + kLanes <= block ? load(from + c) : load_n(from + c, block - c);
        const I code = to_int(usable ? mul(v, inverse) : zero());
        total = add(total, code);
        int8_t bytes[kLanes];
        store_int8(bytes, code);
        const int64_t quads = std::min<int64_t>(kLanes, block - c) / 4;
        for (int64_t i = 0; i < quads; ++i) {
          std::memcpy(to + (c / 4 + i) * rows * 4, bytes + 4 * i, 4);
        }
      }
      const int32_t codes_sum = reduce_add(total);
      scale[b * rows + row] = unit;
      sum[b * rows + row] = unit * static_cast<float>(codes_sum);
      init[b * rows + row] = -zero_point * codes_sum;
    }
  }
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
