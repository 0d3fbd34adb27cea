// Arguments of a step that have one value per row.
#pragma once

#include "interface/tensors.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {

using torch::headeronly::ScalarType;

// The contiguous tensor, of this type and shape.
inline Tensor checked(const Tensor& x, const char* name, ScalarType dtype, const std::vector<int64_t>& shape) {
  if (x.scalar_type() != dtype || shape_of(x) != shape) {
    throw std::runtime_error(
        std::string("nxd: ") + name + " has dtype number " + std::to_string(static_cast<int>(x.scalar_type())) +
        " and shape " + text(shape_of(x)) + "; expected dtype number " + std::to_string(static_cast<int>(dtype)) +
        " and shape " + text(shape));
  }
  return contiguous(x);
}

inline void check_slot(int64_t slot, int64_t slots) {
  if (slot < 0 || slot >= slots) {
    throw std::runtime_error("nxd: slot " + std::to_string(slot) + " is not one of " + std::to_string(slots));
  }
}

template <typename T>
struct Column {  // one value per row
  Column(const Tensor& x, const char* name, ScalarType dtype, int64_t rows) : tensor(checked(x, name, dtype, {rows})) {}
  const T& operator[](int64_t row) const { return static_cast<const T*>(tensor.data_ptr())[row]; }
  Tensor tensor;
};

} // namespace nxd
