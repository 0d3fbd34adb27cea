// The packed form of a linear layer's weight [N, K] in whole numbers of eight bits, one scale a row of it (a column of
// the result): w[n][k] = q[n][k] * scale[n], with q in -127 .. 127.
//
// The tensor is int8 [N, K + 4]: blocks of 32 rows as in packed.h, each [K][32] whole numbers, k slowest, and behind
// them the 32 scales as float32. The last block is as narrow as what is left of N. A block is one piece of memory, so a
// decode step still reads front to back: half the bytes of bfloat16, and 4 for each row.
//
// Whole numbers below 128 are exact in bfloat16 and float32. So a product is that of packed.h with q as the weight,
// to the same bits whether a kernel widens q in registers (few rows) or a block of them beforehand (many), times the
// scale.
#pragma once

#include "packed.h"

#include <cstdint>

namespace nxd {

constexpr int64_t kScaleBytes = 4;  // of each row, behind its K values

// Multiplies x of type T by a block as it is stored, without the scales: what pays for a few rows. `width` is 0 where
// the machine's best kernel for T has none that agrees with it to the bit.
template <typename T>
const Kernel<int8_t>& int8_kernel();

} // namespace nxd
