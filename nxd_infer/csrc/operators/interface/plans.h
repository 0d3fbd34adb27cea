// Plans of calls (planned.h): NXD_PLAN(operator, function) where the operator is registered.
#pragma once

#include "interface/planned.h"
#include "interface/tensors.h"

#include <memory>
#include <vector>

namespace nxd {

class Planned {
 public:
  virtual ~Planned() = default;
  virtual void point(char* const* data) = 0;
  virtual void run() = 0;
};

// Returns nullptr, or throws, for a call that cannot be planned: one that would copy an argument first, say. It reads no
// memory of tensors.
using Planner = std::unique_ptr<Planned> (*)(const PlannedArgument* arguments);

bool register_planner(const char* op, Planner planner);

inline Tensor tensor_of(const PlannedArgument& argument, int64_t i = 0) {
  return Tensor::borrow(static_cast<AtenTensorHandle>(argument.tensors[i]));
}

inline std::vector<Tensor> tensors_of(const PlannedArgument& argument) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < argument.count; i++) tensors.push_back(tensor_of(argument, i));
  return tensors;
}

} // namespace nxd

#define NXD_PLAN(op, planner) static const bool planned_##op = nxd::register_planner(#op, planner)
