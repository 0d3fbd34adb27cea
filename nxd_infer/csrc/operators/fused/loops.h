// The loops of a fused operator (fused.cpp): each applies one function to a few rows.
//
// A value is float32 or bfloat16 (a half); a loop computes in float32 and rounds its results if they are bfloat16.
#pragma once

#include <cstdint>
#include <string>

namespace nxd {

// Rows of values: `step` of them from the beginning of one to that of the next, 0 for the same row again.
struct Rows {
  void* at;
  int64_t step;
  bool half;
  bool single = false;  // one value per row, in float32, for all columns
};

// to[r][i] = f(first[r][i], second[r][i]) for the n values of each row; a reduction makes to[r][0], in float32. Memory
// of an operand may be that of the result if it is exactly the same.
using Loop = void (*)(const Rows& to, const Rows& first, const Rows& second, int64_t rows, int64_t n);

struct Function {
  Loop loop;
  enum { binary, unary, reduction } kind;
};

// nullptr for an unknown name.
const Function* function_named(const std::string& name);

} // namespace nxd
