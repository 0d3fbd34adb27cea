// How a program calls operators of a library without torch's dispatcher: a call on tensors of certain sizes and strides
// is planned once, told where its tensors lie, and then run as often as they lie there. The library's operator
// `planned_functions` returns a pointer to the functions as a number.
#pragma once

#include <cstdint>

namespace nxd {

constexpr int64_t kPlannedVersion = 1;  // of this file: another number with every change

// Tensors (AtenTensorHandles; a count of 0 where an optional one is missing), or a constant.
struct PlannedArgument {
  void* const* tensors;
  int64_t count;
  int64_t integer;  // or a truth value
  double number;
  const char* text;
};

struct PlannedFunctions {
  // `arguments`: as many as the operator's schema has; memory is not read. nullptr if the call cannot be planned.
  void* (*plan)(const char* op, const PlannedArgument* arguments);
  // `data`: of the arguments' tensors, then of the results, which lie as the operator gives them.
  void (*point)(void* plan, char* const* data);
  void (*run)(void* plan);
  void (*drop)(void* plan);
};

} // namespace nxd
