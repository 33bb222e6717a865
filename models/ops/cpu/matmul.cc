#include "matmul.h"

#include <algorithm>
#include <vector>

namespace stoker {
namespace {

constexpr int64_t kChunkBlocks = 64;             // scales expanded at once, per tile
constexpr int64_t kActivationBytes = 256 << 10;  // rows of x that a core's cache should hold
constexpr int64_t kSerialElements = 32 << 10;    // less than this is not worth a second thread

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The rows of x prepared for all weights of one block size and zero point.
struct Prepared {
  int64_t block;
  int32_t zero_point;
  int8_t* codes;
  float* scale;
  int32_t* init;
  float* values;
  float* sum;

  bool serves(int64_t b, int32_t z) const { return block == b && zero_point == z; }

  // The part that starts at row t, a multiple of kMaxRows.
  Activations at(int64_t t, int64_t C) const {
    const int64_t blocks = C / block;
    return {codes + t * C, scale + t * blocks, init + t * blocks, values + t * C, sum + t * blocks};
  }
};

int32_t effective_zero(const Weight& w, int byte_bias) {
  return w.zero_point - (w.byte_codes ? byte_bias : 0);
}

// Lays the distinct preparations out from `at`; returns the end.
uint8_t* plan(const Weight* weights, int count, int byte_bias, int64_t T, int64_t C, bool exact,
              uint8_t* at, std::vector<Prepared>* all) {
  const auto take = [&](size_t bytes) {
    uint8_t* mine = at;
    at += aligned(bytes);
    return mine;
  };
  for (int i = 0; i < count; ++i) {
    const Weight& w = weights[i];
    const int32_t zero = effective_zero(w, byte_bias);
    const auto same = [&](const Prepared& p) { return p.serves(w.block, zero); };
    if (!w.packed || std::any_of(all->begin(), all->end(), same)) continue;
    const size_t per_block = static_cast<size_t>(T * (C / w.block)) * 4;
    const size_t elements = static_cast<size_t>(T * C);
    Prepared p{w.block, zero, nullptr, nullptr, nullptr, nullptr, nullptr};
    p.sum = reinterpret_cast<float*>(take(per_block));
    if (exact) {
      p.values = reinterpret_cast<float*>(take(elements * 4));
    } else {
      p.codes = reinterpret_cast<int8_t*>(take(elements));
      p.scale = reinterpret_cast<float*>(take(per_block));
      p.init = reinterpret_cast<int32_t*>(take(per_block));
    }
    all->push_back(p);
  }
  return at;
}

void prepare(const Kernels& k, const Prepared& p, const float* x, int64_t t, int64_t rows,
             int64_t C, bool exact) {
  const int64_t blocks = C / p.block;
  const int n = static_cast<int>(rows);
  if (exact) {
    k.interleave(x + t * C, C, n, C, p.block, p.values + t * C, p.sum + t * blocks);
  } else {
    k.quantize(x + t * C, C, n, C, p.block, p.zero_point, p.codes + t * C, p.scale + t * blocks,
               p.sum + t * blocks, p.init + t * blocks);
  }
}

Scales of_tile(Scales scales, int64_t tile) {
  static constexpr int64_t kBytes[] = {4, 2, 2, 1, 1};
  if (!scales.values) return scales;
  const int64_t value = kBytes[static_cast<int>(scales.type)];
  const int64_t super = kBytes[static_cast<int>(scales.super_type)];
  scales.values = static_cast<const char*>(scales.values) + tile * scales.groups * kTile * value;
  if (scales.super) {
    scales.super = static_cast<const char*>(scales.super) + tile * scales.supers * kTile * super;
  }
  return scales;
}

// Rows [t0, t1) times one packed tile.
void packed_tile(const Kernels& k, const Weight& w, const Prepared& p, int64_t tile, int64_t t0,
                 int64_t t1, int64_t C, bool exact) {
  alignas(64) float scale[kChunkBlocks * kTile];
  alignas(64) float minimum[kChunkBlocks * kTile];
  const bool has_minimum = w.minimum.values != nullptr;
  const TileFn* kernels = (exact ? k.exact : k.product)[w.byte_codes][has_minimum];
  const int64_t blocks = C / w.block, repeat = w.group / w.block;
  const int64_t block_bytes = w.block * kTile / (w.byte_codes ? 1 : 2);
  const uint8_t* payload = static_cast<const uint8_t*>(w.data) + tile * blocks * block_bytes;
  const int64_t valid = std::min<int64_t>(kTile, w.R - tile * kTile);
  for (int64_t b = 0; b < blocks; b += kChunkBlocks) {
    const int64_t n = std::min(kChunkBlocks, blocks - b);
    k.expand(of_tile(w.scale, tile), b, n, repeat, scale);
    if (has_minimum) k.expand(of_tile(w.minimum, tile), b, n, repeat, minimum);
    for (int64_t t = t0; t < t1; t += kMaxRows) {
      const int64_t rows = std::min<int64_t>(kMaxRows, t1 - t);
      Activations x = p.at(t, C);
      x.codes += b * w.block * rows;
      x.values += b * w.block * rows;
      x.scale += b * rows;
      x.init += b * rows;
      x.sum += b * rows;
      kernels[rows - 1](payload + b * block_bytes, scale, minimum, x, n, w.block, w.zero_point,
                        w.out + t * w.R + tile * kTile, w.R, valid, b > 0);
    }
  }
}

void dense_tile(const Kernels& k, const Weight& w, const float* x, int64_t tile, int64_t t0,
                int64_t t1, int64_t C) {
  static constexpr int64_t kBytes[] = {4, 2, 2};
  const int64_t end = std::min(w.R, (tile + 1) * kTile);
  const char* data = static_cast<const char*>(w.data);
  for (int64_t t = t0; t < t1; t += kMaxRows) {
    const DenseFn kernel =
        k.dense[static_cast<int>(w.type)][std::min<int64_t>(kMaxRows, t1 - t) - 1];
    for (int64_t r = tile * kTile; r < end; r += 4) {
      kernel(data + r * C * kBytes[static_cast<int>(w.type)], C, std::min<int64_t>(4, end - r),
             x + t * C, w.out + t * w.R + r, w.R);
    }
  }
}

}  // namespace

size_t scratch_bytes(const Weight* weights, int count, int64_t T, int64_t C, bool exact) {
  std::vector<Prepared> all;
  uint8_t* const start = nullptr;
  // No byte bias: it could only make two preparations one.
  return static_cast<size_t>(plan(weights, count, 0, T, C, exact, start, &all) - start);
}

void multiply(Pool& pool, const Kernels& kernels, const float* x, int64_t T, int64_t C,
              const Weight* weights, int count, bool exact, uint8_t* scratch) {
  if (T == 0) return;
  std::vector<Prepared> all;
  plan(weights, count, kernels.byte_bias, T, C, exact, scratch, &all);

  const int64_t row_blocks = (T + kMaxRows - 1) / kMaxRows;
  const auto prepare_block = [&](int64_t unit) {
    const int64_t t = unit % row_blocks * kMaxRows;
    prepare(kernels, all[static_cast<size_t>(unit / row_blocks)], x, t,
            std::min<int64_t>(kMaxRows, T - t), C, exact);
  };
  const int64_t preparations = row_blocks * static_cast<int64_t>(all.size());
  if (T * C < kSerialElements) {
    for (int64_t unit = 0; unit < preparations; ++unit) prepare_block(unit);
  } else {
    parallel_for(pool, preparations, prepare_block);
  }

  // Units are ranges of tiles by chunks of rows; tiles are numbered through all weights.
  std::vector<int64_t> starts{0};
  int64_t elements = 0;
  for (int i = 0; i < count; ++i) {
    starts.push_back(starts.back() + (weights[i].R + kTile - 1) / kTile);
    elements += weights[i].R * C;
  }
  const int64_t tiles = starts.back();
  const int64_t row_bytes = C * (exact || all.empty() ? 4 : 1);
  const int64_t chunk = std::max<int64_t>(1, kActivationBytes / row_bytes / kMaxRows) * kMaxRows;
  const int64_t chunks = (T + chunk - 1) / chunk;
  const int64_t range =
      elements < kSerialElements ? tiles : std::max<int64_t>(1, tiles / (pool.threads() * 6));
  const int64_t ranges = (tiles + range - 1) / range;
  parallel_for(pool, chunks * ranges, [&](int64_t unit) {
    const int64_t t0 = unit / ranges * chunk, t1 = std::min(T, t0 + chunk);
    const int64_t first = unit % ranges * range, last = std::min(tiles, first + range);
    int i = 0;
    for (int64_t tile = first; tile < last; ++tile) {
      while (tile >= starts[static_cast<size_t>(i) + 1]) ++i;
      const Weight& w = weights[i];
      const int64_t own = tile - starts[static_cast<size_t>(i)];
      if (!w.packed) {
        dense_tile(kernels, w, x, own, t0, t1, C);
        continue;
      }
      const int32_t zero = effective_zero(w, kernels.byte_bias);
      const Prepared* p = all.data();
      while (!p->serves(w.block, zero)) ++p;
      packed_tile(kernels, w, *p, own, t0, t1, C, exact);
    }
  });
}

}  // namespace stoker
