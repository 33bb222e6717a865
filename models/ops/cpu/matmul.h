// Activation rows times several weights, split over threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "parallel.h"

namespace stoker {

// One weight [R, C] of a product (or one for each group of rows), and where its result goes.
struct Weight {
  bool packed = false;          // interleaved codes, or dense rows of `type`
  Type type = Type::kF32;       // of a dense weight
  Code code = Code::kNibble;    // of a packed weight
  uint8_t table[16] = {};       // what kTable's nibbles stand for
  const void* data = nullptr;   // packed: [R / kTile, records, bytes]; dense: [R, C]
  int64_t bytes = 0;            // of one such matrix, from one group's to the next
  const float* bias = nullptr;  // [R] of each group, added to the results; null: none
  int64_t R = 0;
  int64_t group = 0;            // columns that share a scale
  int64_t block = 0;            // columns that share an activation scale; divides group
  int32_t zero_point = 0;       // of the unsigned codes
  Record record;                // of a packed weight
  float* out = nullptr;         // [T, R]
};

// What is multiplied: x [T, C], or what `before` makes of it.
enum class Before : int32_t { kNothing, kNorm, kRows, kSilu, kGelu, kClamped };
struct Input {
  const float* x;
  // kNorm: weight [C] of the RMS norm of x. Gates: [T, C], what x is the gate of.
  const float* other;
  Before before;
  float eps;  // of the norm
  const int32_t* rows = nullptr;  // kRows: the row of x that each input row is
};

// Bytes that `multiply` needs at `scratch`.
size_t scratch_bytes(const Weight* weights, int count, int64_t T, int64_t C, Before before,
                     bool exact);

// Rows [starts[i], starts[i + 1]) of the input belong to group i.
struct Groups {
  const int64_t* starts;
  int64_t count;
};

// out = the input [T, C] times the transpose of each weight, or of its group's matrix. With `exact`, activations stay float32;
// else they are quantised to int8 for packed weights. C is a multiple of each weight's group of
// columns. Matrices of groups without rows are not read.
void multiply(Pool& pool, const Kernels& kernels, const Input& input, const Groups& groups,
              int64_t C, const Weight* weights, int count, bool exact, uint8_t* scratch);

}  // namespace stoker
