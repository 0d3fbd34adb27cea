// The packed form of a linear layer's weight [N, K], and the kernels that multiply by it.
//
// Rows of the weight (columns of the result) go in blocks of 32, one after the other; within a block, k runs slowest:
//   float32   [K][32]           two vectors of 16 results for every k
//   bfloat16  [K / 2][32][2]    pairs of k beside each other, as the dot-product instructions and the tiles read them
// The last block is as narrow as what is left of N, and an odd K ends in one row of single values, so the packed weight
// has exactly the bytes of the plain one whatever its shape. A decode step reads it front to back, once: a thread reads
// one stream, which the hardware fetches ahead of it.
#pragma once

#include "scalar.h"

#include <cstdint>

namespace nxd {

constexpr int64_t kColumns = 32;  // of a block
constexpr int64_t kLane = 16;     // columns that the kernels take as one: a vector of float32, half a tile's row

// Values of k that stand beside each other for one column.
template <typename T>
constexpr int64_t group_of() {
  return sizeof(T) == 2 ? 2 : 1;
}

// Where column c of k lies in a block that is `width` columns wide.
template <typename T>
NXD_INLINE int64_t place(int64_t k, int64_t c, int64_t width, int64_t K) {
  constexpr int64_t group = group_of<T>();
  const int64_t whole = K / group * group;
  return k < whole ? k / group * group * width + c * group + k % group : k * width + c;
}

// One block as the kernels take it: `width` columns (a multiple of kLane). `body` points at `steps` steps of k (of as
// many values as the kernel takes at once); `tail` at one more step that is filled up with zeros, or at nothing.
template <typename T>
struct Panel {
  const T* body;
  const T* tail;
  int64_t width;
  int64_t steps;
};

// The left side, arranged once for all columns: groups of rows, filled up with zeros to whole steps of k, that stand
// beside each other, so that what a step needs is in one place (rows a power of two apart would share cache lines).
//   rows   [k][width] floats, or pairs of bfloat16; the last group may hold fewer rows than it has room for
//   tiles  [k / 32][16][32]
struct Left {
  const void* data;
  int64_t rows;
  int64_t width;   // rows in a group
  int64_t stride;  // elements from one group to the next
};

// A way to multiply: out[row][column] for all rows and the columns of one block, in float32; rows are kColumns apart.
//
// For one result every kernel adds the products in the order of k (bfloat16 on dot products and tiles: in the fixed
// order of the instruction, from the first k to the last), in float32, whatever the other rows are and however many:
// a row's result depends on nothing but the row and the weight.
template <typename T>
struct Kernel {
  using Multiply = void (*)(const Left& x, const Panel<T>& w, float* out);
  Multiply multiply;
  int64_t step;     // values of k in one step
  bool widened;     // takes x as float32, not in the weight's type
  bool tiles;       // takes x in tiles of 16 rows by 32 values; `out` has room for whole tiles then
  int64_t width;    // most rows in a group
  // Around a thread's calls of multiply: tiles have to be set up and given back.
  void (*begin)();
  void (*end)();
};

// The best kernel of this machine (see cpu.h).
const Kernel<float>& float_kernel();
const Kernel<BFloat16>& bfloat16_kernel();

// The one over tiles, where the machine has them.
const Kernel<BFloat16>& tile_kernel();

} // namespace nxd
