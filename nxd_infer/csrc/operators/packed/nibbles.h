// Weights of four bits (packed.h), and the kernel that multiplies them by rows of eight bits.
//
// A row of k has groups: w[n][k] = (u[n][k] - zero) * scale with u in 0 .. 15, a bfloat16 scale for each row and group,
// and a zero of 8, or a byte of sixteenths. The packed weight is uint8 [N, groups, bytes], and the bytes of a group and
// row say the rest: group / 2 for the numbers, 2 for the scale, 1 for a zero. A block of 32 rows has for each group
//   numbers  for each 8 rows: [group / 8][8 rows][4], with k .. k + 3 in the low halves, k + 4 .. k + 7 in the high ones
//   scales   [32], then zeros [32]
// so that 32 bytes have four adjacent k of eight rows twice, as the dot products of bytes take them.
//
// x is rounded, too: 32 adjacent k of a row to -127 .. 127 with a float32 scale, a Cell. Sums over 32 of k are whole
// numbers, exact whatever computes them, and y += (sum(u * q) - zero * sum(q)) * (scale * scale of x) is float32, in
// the order of k: a row's result has the same bits with all instruction sets.
#pragma once

#include "packed/packed.h"

#include <algorithm>
#include <cstdint>

namespace nxd {

struct Nibbles {
  uint8_t two;
};

constexpr int64_t kEight = 8;    // rows of the weight that are multiplied together

struct Cell {
  int8_t q[kCell];
  float scale;
  float sum;  // of q
};

// Where in a group of a block with `width` rows the byte of k and row c is; its half is k / 4 % 2.
NXD_INLINE int64_t nibble_place(int64_t k, int64_t c, int64_t width, int64_t group) {
  const int64_t first = c / kEight * kEight, rows = std::min(kEight, width - first);
  return first * group / 2 + (k / 8 * rows + c - first) * 4 + k % 4;
}

template <>
struct Panel<Nibbles> {
  const uint8_t* body;  // 32 columns wide
  int64_t cells;        // of a row of x
  NibbleForm form;
};

const Kernel<Nibbles>& nibble_kernel();

// Rounds `rows` of x to cells: [32 of k][row].
void round_rows(const float* x, int64_t rows, int64_t K, Cell* cells);
void round_rows(const BFloat16* x, int64_t rows, int64_t K, Cell* cells);

} // namespace nxd
