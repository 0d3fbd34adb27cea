// The packed form of a linear layer's weight [N, K], and the kernels that multiply by it.
//
// Rows of the weight (columns of the result) are in consecutive blocks of 32; within a block, k is slowest:
//   float32   [K][32]           two vectors of 16 results for every k
//   bfloat16  [K / 2][32][2]    adjacent pairs of k, as the dot-product instructions and the tiles read them
// The last block has the remaining rows of N, and an odd K ends in one row of single values, so the packed weight has
// exactly the bytes of the plain one for any shape. A decode step reads it sequentially, once: a thread reads one
// stream, which the hardware prefetches.
//
// In eight bits, w[n][k] = q[n][k] * scale[n] with q in -127 .. 127, it is int8 [N, K + 4]: each block has [K][32]
// integers, followed by its scales as float32. Those integers are exact in bfloat16 and float32. So a product is that
// with q as the weight, times the scale; it is bit-equal whether a kernel widens q in registers (few rows) or a whole
// block beforehand (many). Four bits are another form, with kernels of its own: nibbles.h.
#pragma once

#include "machine/scalar.h"

#include <cstdint>

namespace nxd {

constexpr int64_t kColumns = 32;  // of a block
constexpr int64_t kScaleBytes = 4;  // of each row in eight bits, after its K values
constexpr int64_t kLane = 16;     // columns that the kernels process together: a vector of float32, half a tile's row

// Number of adjacent values of k for one column.
template <typename T>
constexpr int64_t group_of() {
  return sizeof(T) == 2 ? 2 : 1;
}

constexpr int64_t kCell = 32;  // values of k that are summed as whole numbers, in four bits

// How a weight of four bits (nibbles.h) has its groups of k.
struct NibbleForm {
  int64_t bytes;  // of a row's group

  bool zeros() const { return bytes % 2 != 0; }
  int64_t group() const { return (bytes - 2) / 2 * 4; }
  int64_t groups(int64_t K) const { return (K + group() - 1) / group(); }
  bool valid() const { return group() >= kCell && group() % kCell == 0; }
};

// Position of column c of k in a block that is `width` columns wide.
template <typename T>
NXD_INLINE int64_t place(int64_t k, int64_t c, int64_t width, int64_t K) {
  constexpr int64_t group = group_of<T>();
  const int64_t whole = K / group * group;
  return k < whole ? k / group * group * width + c * group + k % group : k * width + c;
}

// One block as the kernels take it: `width` columns (a multiple of kLane). `body` points at `steps` steps of k (each of
// as many values as the kernel processes at once); `tail` at one more, zero-padded step, or is null.
template <typename T>
struct Panel {
  const T* body;
  const T* tail;
  int64_t width;
  int64_t steps;
};

// The left side, arranged once for all columns: groups of adjacent rows, zero-padded to whole steps of k, so that a
// step's data is contiguous (rows a power of two apart would share cache sets).
//   rows   [k][width] floats, or pairs of bfloat16; the last group may have fewer rows than it has room for
//   tiles  [k / 32][16][32]
struct Left {
  const void* data;
  int64_t rows;
  int64_t width;   // rows in a group
  int64_t stride;  // elements from one group to the next
};

// A multiplication kernel: out[row][column] for all rows and the columns of one block, in float32; rows are kColumns
// apart.
//
// For one result every kernel adds the products in the order of k (bfloat16 with dot products and tiles: in the fixed
// order of the instruction, from the first k to the last), in float32, whatever the other rows and their number: a
// row's result depends only on the row and the weight.
template <typename T>
struct Kernel {
  using Multiply = void (*)(const Left& x, const Panel<T>& w, float* out);
  Multiply multiply;
  int64_t step;     // values of k in one step
  bool widened;     // takes x as float32, not in the weight's dtype
  bool tiles;       // takes x in tiles of 16 rows by 32 values; `out` then has room for whole tiles
  int64_t width;    // most rows in a group
  // Called before and after a thread's calls of multiply: tiles must be configured and released.
  void (*begin)();
  void (*end)();
};

// The best kernel of this machine (see cpu.h).
const Kernel<float>& float_kernel();
const Kernel<BFloat16>& bfloat16_kernel();

// Multiplies x of type T by a stored int8 block, without the scales: faster for few rows. `width` is 0 if the machine's
// best kernel for T has no bit-equal variant of this.
template <typename T>
const Kernel<int8_t>& int8_kernel();

// The kernel with tiles, if the machine has them.
const Kernel<BFloat16>& tile_kernel();

} // namespace nxd
