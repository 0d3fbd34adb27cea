// How a program calls the fused operator of a library without its dispatcher: plain functions, by a table of pointers
// that the library's operator `fused_functions` returns as a number.
#pragma once

#include <cstdint>

namespace nxd {

constexpr int64_t kFusedFunctions = 1;  // the version of this file: another number with every change

// A result: the strides of its dimensions are in elements.
struct FusedResult {
  int64_t dims;
  const int64_t *sizes, *strides;
  bool half;  // bfloat16, else float32
};

// A plan is a program of the operator for inputs of certain sizes and strides.
struct FusedFunctions {
  // `inputs` are AtenTensorHandles. nullptr if they do not fit, or the last dimension of one is not in one piece.
  void* (*plan)(const char* text, void* const* inputs, int64_t count);
  void (*drop)(void* plan);
  int64_t (*results)(const void* plan, const FusedResult** results);
  // `data`: of the inputs, then of the results.
  void (*run)(const void* plan, char* const* data);
};

} // namespace nxd
