// The packed int8 form of a linear layer's weight [N, K], with one scale per row (column of the result):
// w[n][k] = q[n][k] * scale[n], with q in -127 .. 127.
//
// The tensor is int8 [N, K + 4]: blocks of 32 rows as in packed.h, each with [K][32] integers, k slowest, followed by
// the 32 scales as float32. The last block has the remaining rows of N. A block is contiguous, so a decode step still
// reads sequentially: half the bytes of bfloat16, plus 4 per row.
//
// Integers below 128 are exact in bfloat16 and float32. So a product is that of packed.h with q as the weight, times
// the scale; it is bit-equal whether a kernel widens q in registers (few rows) or a whole block beforehand (many).
#pragma once

#include "packed/packed.h"

#include <cstdint>

namespace nxd {

constexpr int64_t kScaleBytes = 4;  // of each row, after its K values

// Multiplies x of type T by a stored int8 block, without the scales: faster for few rows. `width` is 0 if the machine's
// best kernel for T has no bit-equal variant of this.
template <typename T>
const Kernel<int8_t>& int8_kernel();

} // namespace nxd
