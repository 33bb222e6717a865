#include "matmul.h"

#include <algorithm>
#include <vector>

#include "target.h"

namespace stoker {
namespace {

constexpr int64_t kChunkBlocks = 64;             // scales expanded at once, per tile
constexpr int64_t kActivationBytes = 256 << 10;  // rows of x that a core's cache should hold
constexpr int64_t kShareBytes = 3 << 10;         // that can be asked for at once, without waiting
constexpr int64_t kSerialElements = 32 << 10;    // fewer weights are not worth a second thread
constexpr int64_t kSerialRows = 12 << 10;        // likewise, elements of x to prepare
constexpr int64_t kSerialGated = 4 << 10;        // likewise, with an exponential for each

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

  bool serves(const Weight& w) const { return block == w.block && zero_point == w.zero_point; }

  // `rows` rows from t on, a multiple of kMaxRows, and their blocks of columns from b on.
  Activations at(int64_t t, int64_t C, int64_t b, int64_t rows) const {
    const int64_t element = t * C + b * block * rows, of_block = t * (C / block) + b * rows;
    Activations x{};
    if (codes) {
      x.codes = codes + element;
      x.scale = scale + of_block;
      x.init = init + of_block;
    } else {
      x.values = values + element;
    }
    x.sum = sum + of_block;
    return x;
  }
};

bool byte_codes(const Weight& w) { return w.code == Code::kByte; }

// Whether a block's scales and minima are halves and no more, which kernels may read themselves.
bool reads_halves(const Kernels& k, const Weight& w) {
  const auto plain = [](const Scales& s) { return s.type == Type::kF16 && !s.factored; };
  return k.reads_halves && w.group == w.block && plain(w.record.scale) &&
         (!w.record.minimum.given || plain(w.record.minimum));
}

// Scratch memory: the input as it goes into the products, and its distinct preparations.
struct Plan {
  float* rows = nullptr;  // [T, C]; nullptr: x as it is
  std::vector<Prepared> all;
  size_t bytes = 0;
};

Plan plan(const Weight* weights, int count, int64_t T, int64_t C, Before before, bool exact,
          uint8_t* scratch) {
  Plan p;
  const auto take = [&](size_t bytes) {
    uint8_t* mine = scratch + p.bytes;
    p.bytes += aligned(bytes);
    return mine;
  };
  const size_t elements = static_cast<size_t>(T * C);
  if (before != Before::kNothing) p.rows = reinterpret_cast<float*>(take(elements * 4));
  for (int i = 0; i < count; ++i) {
    const Weight& w = weights[i];
    const auto same = [&](const Prepared& other) { return other.serves(w); };
    if (!w.packed || std::any_of(p.all.begin(), p.all.end(), same)) continue;
    const size_t per_block = static_cast<size_t>(T * (C / w.block)) * 4;
    Prepared next{w.block, w.zero_point, nullptr, nullptr, nullptr, nullptr, nullptr};
    next.sum = reinterpret_cast<float*>(take(per_block));
    if (exact) {
      next.values = reinterpret_cast<float*>(take(elements * 4));
    } else {
      next.codes = reinterpret_cast<int8_t*>(take(elements));
      next.scale = reinterpret_cast<float*>(take(per_block));
      next.init = reinterpret_cast<int32_t*>(take(per_block));
    }
    p.all.push_back(next);
  }
  return p;
}

// Rows [t, t + rows) of the input, then each preparation of them.
void prepare(const Kernels& k, const Input& input, const Plan& plan, int64_t t, int64_t rows,
             int64_t C, bool exact) {
  const bool gathers = input.before == Before::kRows;
  const float* x = gathers ? nullptr : input.x + t * C;
  if (plan.rows) {
    float* to = plan.rows + t * C;
    if (input.before == Before::kNorm) {
      for (int64_t i = 0; i < rows; ++i) {
        k.rms_norm(x + i * C, input.other, C, input.eps, to + i * C);
      }
    } else if (gathers) {
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(input.x + input.rows[t + i] * C, C, to + i * C);
      }
    } else {
      const int kind = static_cast<int>(input.before) - static_cast<int>(Before::kSilu);
      k.gated(x, input.other + t * C, rows * C, kind, to);
    }
    x = to;
  }
  const int n = static_cast<int>(rows);
  for (const Prepared& p : plan.all) {
    const int64_t blocks = C / p.block;
    if (exact) {
      k.interleave(x, C, n, C, p.block, p.values + t * C, p.sum + t * blocks);
    } else {
      k.quantize(x, C, n, C, p.block, p.zero_point, p.codes + t * C, p.scale + t * blocks,
                 p.sum + t * blocks, p.init + t * blocks);
    }
  }
}

// Asks for memory to come. Into the second cache (locality 2): what is on its way to the first holds
// up loads meanwhile. Inlined, since GCC drops calls of a function that does nothing but prefetch.
STOKER_INLINE void ask(const uint8_t* from, const uint8_t* to) {
  for (; from < to; from += 64) __builtin_prefetch(from, 0, 2);
}

// Asks for the scales of tiles to come: each record's are too short for the processor to see that
// they are a stream.
STOKER_INLINE void ask_for_scales(const Record& record, const uint8_t* tile, const uint8_t* end) {
  for (; tile < end; tile += record.bytes) ask(tile, tile + record.codes);
}

// Asks for the part from `from` of `all` to `to` of `all` of some bytes.
STOKER_INLINE void ask_for_share(const uint8_t* bytes, int64_t size, int64_t from, int64_t to,
                                 int64_t all) {
  ask(bytes + (size * from / all & -64), bytes + size * to / all);
}

// Rows [t0, t1) times `count` packed tiles from `tile` on.
void packed_tiles(const Kernels& k, const Weight& w, const Prepared& p, int64_t tile, int64_t count,
                  int64_t t0, int64_t t1, int64_t C, bool exact) {
  alignas(64) float scale[kMaxTiles * kChunkBlocks * kTile];
  alignas(64) float minimum[kMaxTiles * kChunkBlocks * kTile];
  const Record& record = w.record;
  const bool has_minimum = record.minimum.given, halves = !exact && reads_halves(k, w);
  const size_t code = static_cast<size_t>(w.code);
  const TileFn* kernels = exact ? k.exact[code][has_minimum][count - 1]
                                : k.product[code][has_minimum][halves][count - 1];
  const int64_t blocks = C / w.block, repeat = w.group / w.block;
  const int64_t block_bytes = w.block * kTile / (byte_codes(w) ? 1 : 2);
  Tiles tiles{};
  tiles.per_record = record.each * repeat;
  tiles.tile_bytes = blocks / tiles.per_record * record.bytes;
  tiles.gap = record.bytes - tiles.per_record * block_bytes;
  tiles.block = w.block;
  tiles.zero_point = w.zero_point;
  tiles.table = w.table;
  tiles.ld = w.R;
  tiles.valid = std::min(count * kTile, w.R - tile * kTile);
  const uint8_t* first = static_cast<const uint8_t*>(w.data) + tile * tiles.tile_bytes;
  const int64_t chunk = halves ? blocks : kChunkBlocks;
  // What comes next is fetched beside the first rows or, where shares of it are short enough to be
  // asked for at once, beside all.
  const int64_t next = count * tiles.tile_bytes;
  const bool spread = !byte_codes(w) && next * kMaxRows <= kShareBytes * (t1 - t0);
  if (halves) {
    tiles.scale = first + record.scale.offset;
    tiles.minimum = first + record.minimum.offset;
    tiles.scale_bytes = tiles.tile_bytes;
    tiles.scale_gap = record.bytes - tiles.per_record * kTile * 2;
  } else {
    tiles.scale = reinterpret_cast<const uint8_t*>(scale);
    tiles.minimum = reinterpret_cast<const uint8_t*>(minimum);
    tiles.scale_bytes = kChunkBlocks * kTile * static_cast<int64_t>(sizeof(float));
    const uint8_t* next = first + count * tiles.tile_bytes;
    ask_for_scales(record, next, next + count * tiles.tile_bytes);
  }
  for (int64_t b = 0; b < blocks; b += chunk) {
    const int64_t within = b % tiles.per_record;
    tiles.payload =
        first + b / tiles.per_record * record.bytes + record.codes + within * block_bytes;
    tiles.left = tiles.per_record - within;
    tiles.blocks = std::min(chunk, blocks - b);
    tiles.resume = b > 0;
    for (int64_t i = 0; i < count && !halves; ++i) {
      const int64_t at = i * kChunkBlocks * kTile;
      const uint8_t* own = first + i * tiles.tile_bytes;
      k.expand(own, record, record.scale, b, tiles.blocks, repeat, scale + at);
      if (!has_minimum) continue;
      k.expand(own, record, record.minimum, b, tiles.blocks, repeat, minimum + at);
    }
    for (int64_t t = t0; t < t1; t += kMaxRows) {
      const int64_t rows = std::min<int64_t>(kMaxRows, t1 - t);
      tiles.x = p.at(t, C, b, rows);
      tiles.ahead = t == t0 && !spread ? next : 0;
      if (spread && b == 0) ask_for_share(first + next, next, t - t0, t + rows - t0, t1 - t0);
      tiles.out = w.out + t * w.R + tile * kTile;
      kernels[rows - 1](tiles);
    }
  }
}

void add_bias(const Weight& w, int64_t tile, int64_t count, int64_t t0, int64_t t1) {
  const int64_t end = std::min(w.R, (tile + count) * kTile);
  for (int64_t t = t0; t < t1; ++t) {
    for (int64_t r = tile * kTile; r < end; ++r) w.out[t * w.R + r] += w.bias[r];
  }
}

void dense_tile(const Kernels& k, const Weight& w, const float* x, int64_t tile, int64_t t0,
                int64_t t1, int64_t C) {
  const int64_t end = std::min(w.R, (tile + 1) * kTile);
  const char* data = static_cast<const char*>(w.data);
  for (int64_t t = t0; t < t1; t += kMaxRows) {
    const DenseFn kernel =
        k.dense[static_cast<int>(w.type)][std::min<int64_t>(kMaxRows, t1 - t) - 1];
    for (int64_t r = tile * kTile; r < end; r += 4) {
      kernel(data + r * C * width(w.type), C, std::min<int64_t>(4, end - r),
             x + t * C, w.out + t * w.R + r, w.R);
    }
  }
}

// The matrix and the bias of one group.
Weight of_group(const Weight& w, int64_t group) {
  Weight own = w;
  own.data = static_cast<const char*>(w.data) + group * w.bytes;
  if (w.bias) own.bias = w.bias + group * w.R;
  return own;
}

// Rows [t0, t1), all of one group.
struct Rows {
  int64_t group, t0, t1;
};

// The rows of all groups in pieces of at most `most`.
std::vector<Rows> pieces(const Groups& groups, int64_t most) {
  std::vector<Rows> all;
  for (int64_t i = 0; i < groups.count; ++i) {
    const int64_t end = groups.starts[i + 1];
    for (int64_t t = groups.starts[i]; t < end; t += most) {
      all.push_back({i, t, std::min(end, t + most)});
    }
  }
  return all;
}

}  // namespace

size_t scratch_bytes(const Weight* weights, int count, int64_t T, int64_t C, Before before,
                     bool exact) {
  return plan(weights, count, T, C, before, exact, nullptr).bytes;
}

void multiply(Pool& pool, const Kernels& kernels, const Input& input, const Groups& groups,
              int64_t C, const Weight* weights, int count, bool exact, uint8_t* scratch) {
  const int64_t T = groups.starts[groups.count];
  if (T == 0) return;
  const Plan ready = plan(weights, count, T, C, input.before, exact, scratch);
  const float* x = ready.rows ? ready.rows : input.x;
  // Interleaved rows meet the same matrix.
  const std::vector<Rows> blocks = pieces(groups, kMaxRows);
  const int64_t row_blocks = static_cast<int64_t>(blocks.size());
  const auto prepare_block = [&](int64_t unit) {
    const Rows& rows = blocks[static_cast<size_t>(unit)];
    prepare(kernels, input, ready, rows.t0, rows.t1 - rows.t0, C, exact);
  };
  if (T * C < (input.before >= Before::kSilu ? kSerialGated : kSerialRows)) {
    for (int64_t unit = 0; unit < row_blocks; ++unit) prepare_block(unit);
  } else if (ready.rows || !ready.all.empty()) {
    parallel_for(pool, row_blocks, prepare_block);
  }

  // Units are ranges of tiles by chunks of rows; tiles are numbered through all weights.
  std::vector<int64_t> starts{0};
  int64_t elements = 0;
  for (int i = 0; i < count; ++i) {
    starts.push_back(starts.back() + (weights[i].R + kTile - 1) / kTile);
    elements += weights[i].R * C;
  }
  const int64_t tiles = starts.back();
  const int64_t row_bytes = C * (exact || ready.all.empty() ? 4 : 1);
  const std::vector<Rows> chunks = pieces(
      groups, std::max<int64_t>(1, kActivationBytes / row_bytes / kMaxRows) * kMaxRows);
  int64_t used = 0;  // groups with rows
  for (int64_t i = 0; i < groups.count; ++i) used += groups.starts[i + 1] > groups.starts[i];
  // About 32 ranges a thread, of whole steps.
  const int64_t share = tiles * used / (pool.threads() * 32) / kernels.tiles * kernels.tiles;
  const int64_t range = elements < kSerialElements
                            ? tiles
                            : std::min(tiles, std::max<int64_t>(kernels.tiles, share));
  const int64_t ranges = (tiles + range - 1) / range;
  const int64_t units = static_cast<int64_t>(chunks.size()) * ranges;
  parallel_for(pool, units, [&](int64_t unit) {
    const auto [group, t0, t1] = chunks[static_cast<size_t>(unit / ranges)];
    const int64_t first = unit % ranges * range, last = std::min(tiles, first + range);
    int i = 0;
    for (int64_t tile = first, step = 1; tile < last; tile += step) {
      while (tile >= starts[static_cast<size_t>(i) + 1]) ++i;
      const Weight w = of_group(weights[i], group);
      const int64_t own = tile - starts[static_cast<size_t>(i)];
      if (!w.packed) {
        dense_tile(kernels, w, x, own, t0, t1, C);
        step = 1;
      } else {
        const int64_t left = std::min(last, starts[static_cast<size_t>(i) + 1]) - tile;
        step = std::min<int64_t>(kernels.tiles, left);
        const Prepared* p = ready.all.data();
        while (!p->serves(w)) ++p;
        packed_tiles(kernels, w, *p, own, step, t0, t1, C, exact);
      }
      if (w.bias) add_bias(w, own, step, t0, t1);
    }
  });
}

}  // namespace stoker
