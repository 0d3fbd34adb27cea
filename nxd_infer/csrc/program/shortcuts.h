// Ways around torch's dispatcher for steps whose tensors have the sizes and strides of their first call, as those of a
// bucket always have.
#pragma once

#include "program.h"

namespace nxd {

// A shortcut for later calls of a step, of which this was one; nullptr if there is none.
std::unique_ptr<const Shortcut> shortcut(const Step& step, const Table& table, const c10::IValue& result);

} // namespace nxd
