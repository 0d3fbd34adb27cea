// Constants of a stored graph as the types that operators' schemas name.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace nxd {

// Returns `value` as `type`, as Python's calls of operators convert it: whole numbers become floating-point ones, numbers
// become tensors, a number becomes a list of `length` numbers. Throws c10::TypeError for what does not fit.
c10::IValue convert(const c10::IValue& value, const c10::TypePtr& type, std::optional<int32_t> length);

// Returns a new tensor that takes part in type promotion as the number does.
c10::IValue number_as_tensor(const c10::IValue& number);

} // namespace nxd
