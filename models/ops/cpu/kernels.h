// The kernels of one instruction set, as a table of plain functions. The drivers in matmul.cc,
// attention.cc, sample.cc and route.cc know only this table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

constexpr int kTile = 16;      // output rows interleaved in a packed weight
constexpr int kMaxRows = 4;    // activation rows that one micro-kernel call takes at most
constexpr int kMaxTiles = 2;   // and packed tiles
constexpr int kMaxBlock = 32;  // columns that share an activation scale, at most
constexpr int kSpan = 256;     // keys that attention takes in one round, aligned by position
constexpr int kKeys = 16;      // keys that lie together in a page: pages hold whole blocks of them
constexpr int kMaxHead = 640;  // widest head, or latent vector
constexpr int kMaxQueries = 48;           // query rows of one attention tile at most
constexpr int kQueryFloats = 16 * 1024;   // and their elements at most

enum class Type : int32_t { kF32, kBF16, kF16, kI8, kU8 };
// Bytes of one value.
constexpr int64_t width(Type type) {
  return type == Type::kF32 ? 4 : type == Type::kBF16 || type == Type::kF16 ? 2 : 1;
}
// How packed weights are coded: two codes to a byte, one, or two indices of a table of sixteen.
enum class Code : int32_t { kNibble, kByte, kTable };

// Where a packed weight keeps its scales or its minima. A tile is a run of records, each with all
// that some columns need: kTile values for each of `each` groups, perhaps times kTile factors for
// each of `supers` equal runs of groups, then their codes. Offsets are in bytes from the record.
struct Scales {
  bool given = false;
  Type type = Type::kF32;
  int64_t offset = 0;
  bool factored = false;
  Type super_type = Type::kF32;
  int64_t super_offset = 0;
};
struct Record {
  int64_t bytes = 0;
  int64_t codes = 0;   // offset of the codes
  int64_t each = 1;    // groups of columns
  int64_t supers = 1;  // divides `each`
  Scales scale;
  Scales minimum;
};

// Activation rows ready for a product, `rows` of them interleaved: element c of row i is at
// (c / 4 * rows + i) * 4 + c % 4 of the codes, block b of row i at b * rows + i of the rest.
struct Activations {
  const int8_t* codes;    // int8 kernels
  const float* scale;     // int8 kernels
  const int32_t* init;    // int8 kernels: -zero_point * sum of codes
  const float* values;    // exact kernels: x itself, c * rows + i
  const float* sum;       // sum of the (quantised) x of a block
};

// One or two neighbouring packed tiles times a few activation rows. Codes, scales and minima of a
// block follow those of the block before, but for a gap after the last block of a record.
struct Tiles {
  const uint8_t* payload;
  int64_t tile_bytes;      // from one tile's payload to the next
  int64_t gap;
  const uint8_t* scale;    // kTile floats, or halves, for each block
  const uint8_t* minimum;  // likewise
  int64_t scale_bytes;     // from one tile's scales to the next
  int64_t scale_gap;
  int64_t per_record;      // blocks
  int64_t left;            // of them in the first record
  Activations x;
  int64_t blocks;
  int64_t block;
  int zero_point;        // 0 where kNibble has minima
  const uint8_t* table;  // of kTable
  float* out;            // [rows, ld]; the first `valid` columns are written
  int64_t ld;
  int64_t valid;
  bool resume;           // go on from what is in `out`
  int64_t ahead;         // bytes ahead in the payload to fetch while at work; 0: none
};
using TileFn = void (*)(const Tiles& tiles);

// `count` rows (1..4) of a dense row-major weight [count, C] times x [rows, C].
using DenseFn = void (*)(const void* weight, int64_t C, int64_t count, const float* x, float* out,
                         int64_t ld);

// What one attention tile needs to know: `rows` queries for each of `heads` neighbouring KV heads,
// and the keys of one span. Row r of a head sees keys [low[r], high[r]) of the span.
struct AttentionTile {
  const float* q;        // [heads, rows, H], scaled
  int64_t heads;
  int64_t rows;
  int64_t H;
  // The first head's part of each block of kKeys keys in the span, each one readable: element h of
  // the keys at h * key_step, or with a step of 0 one key after the other, as the values always.
  // Heads are head_step apart.
  const void* const* k;
  const void* const* v;
  // What the codes of each key of a block are times, if pages hold codes; else null. Heads are
  // scale_step apart.
  const float* const* k_scale;
  const float* const* v_scale;
  int64_t scale_step;
  int64_t key_step;
  int64_t head_step;
  int64_t keys;
  const void* const* next;  // keys that will be wanted after these, if any, as k
  int64_t next_keys;
  const int32_t* low;
  const int32_t* high;
  float softcap;         // 0: none
  float* out;            // [heads, rows, H], sums of weights times values, not yet divided
  float* peak;           // [heads, rows]
  float* total;          // [heads, rows]
};

struct Kernels {
  // x [rows, ld] into interleaved int8 codes; see Activations.
  void (*quantize)(const float* x, int64_t ld, int rows, int64_t C, int64_t block, int zero_point,
                   int8_t* codes, float* scale, float* sum, int32_t* init);
  // x [n] into int8 codes, and the scale that they are times.
  float (*quantize_row)(const float* x, int64_t n, int8_t* codes);
  // x [rows, ld] interleaved as it is, with sums per block.
  void (*interleave)(const float* x, int64_t ld, int rows, int64_t C, int64_t block, float* values,
                     float* sum);
  // float [blocks][kTile] of a tile's scales from block `first` on; a group holds `repeat` blocks.
  void (*expand)(const uint8_t* tile, const Record& record, const Scales& scales, int64_t first,
                 int64_t blocks, int64_t repeat, float* out);
  bool reads_halves;  // whether `product` may read scales that are halves
  // Tiles that `product` and `exact` take at once, at most.
  int tiles;
  // [Code][minimum][halves][tiles - 1][rows - 1]; kTable has no minima
  TileFn product[3][2][2][kMaxTiles][kMaxRows];
  TileFn exact[3][2][kMaxTiles][kMaxRows];  // scales are floats
  DenseFn dense[3][kMaxRows];      // [Type][rows - 1]
  void (*attend[4])(const AttentionTile& tile);  // [Type of the pages]; none for kF16
  // The same over bfloat16 pages, queries and weights being rounded to bfloat16 too; H is even.
  // Null where the processor has no products of such pairs.
  void (*attend_rounded)(const AttentionTile& tile);
  // Folds a later span's (peak, total, out) of `rows` rows into an earlier one's.
  void (*merge)(int64_t rows, int64_t H, float* peak, float* total, float* out,
                const float* next_peak, const float* next_total, const float* next_out);
  void (*scale)(const float* x, float factor, int64_t n, float* out);
  // Rotary embedding of one head [H], by [half] cosines and sines, times factor.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t half, int64_t H,
                 float factor, float* out);
  void (*store_bf16)(const float* x, int64_t n, uint16_t* out);
  // SiLU (kind 0) or tanh-GELU (1) of gate, times up, or their clamped SwiGLU (2); all [n].
  void (*gated)(const float* gate, const float* up, int64_t n, int kind, float* out);
  // x [D] over its root mean square, times weight.
  void (*rms_norm)(const float* x, const float* weight, int64_t D, float eps, float* out);
  // Sum of `count` rows [n], one or more, times their factors, in order.
  void (*mix)(const float* const* rows, const float* factor, int64_t count, int64_t n, float* out);
  // Passes over logits x [n]; see sample.inc.h.
  float (*peak)(const float* x, int64_t n, float* poison);
  float (*tally)(const float* x, int64_t n, float least);
  float (*mass)(const float* x, int64_t n, float least, float peak, float rate, float* count);
  void (*weigh)(const float* x, int64_t n, float least, float peak, float rate, float* out);
  int64_t (*find)(const float* x, int64_t n, float least, int32_t* out);
};

enum class Isa : int32_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

// The best set this processor has.
Isa best_isa();
// The table of `isa`, or nullptr where this build or processor lacks it.
const Kernels* kernels(Isa isa);

namespace portable {
const Kernels& table();
}
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace avx512_bf16 {
void attend_rounded(const AttentionTile& tile);
}

}  // namespace stoker
