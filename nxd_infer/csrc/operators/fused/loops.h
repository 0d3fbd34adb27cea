// The loops of a fused operator (fused.cpp): each applies one function to a few rows.
//
// A value is float32 or bfloat16 (a half); a loop computes in float32 and rounds its results if they are bfloat16.
#pragma once

#include "machine/scalar.h"

#include <cstdint>
#include <string>

namespace nxd {

// Rows of values: `step` of them from the beginning of one to that of the next, 0 for the same row again.
struct Rows {
  const void* at;
  int64_t step;
};
struct Target {
  void* at;
  int64_t step;
};

// to[r][i] = f(first[r][i], second[r][i]) for the n values of each row. Memory of an operand may be that of the target
// if it is exactly the same.
using Loop = void (*)(const Target& to, const Rows& first, const Rows& second, int64_t rows, int64_t n);

// By whether the operands and the result are bfloat16. A single value per row is float32.
struct Loops {
  Loop both[2][2][2];
  Loop first_single[2][2];
  Loop second_single[2][2];
};
struct UnaryLoops {
  Loop of[2][2];
};
// to[r][0] = f(first[r][0 .. n-1]), float32
struct ReductionLoops {
  Loop of[2];
};

// nullptr for an unknown name.
const Loops* binary_loops(const std::string& name);
const UnaryLoops* unary_loops(const std::string& name);
const ReductionLoops* reduction_loops(const std::string& name);

} // namespace nxd
