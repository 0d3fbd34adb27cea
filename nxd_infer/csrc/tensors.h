// Small helpers over the stable tensor: contiguous inputs, plain outputs, shapes in messages.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace nxd {

using torch::stable::Tensor;

inline Tensor empty_strided_cpu(const std::vector<int64_t>& shape, int32_t dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i] > 1 ? shape[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
      &handle));
  return Tensor(handle);
}

inline int32_t dtype_code(const Tensor& x) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

inline std::vector<int64_t> shape_of(const Tensor& x) {
  auto sizes = x.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

template <typename Shape>
std::string text(const Shape& shape) {
  std::string found = "[";
  for (const int64_t size : shape) found += (found.size() > 1 ? ", " : "") + std::to_string(size);
  return found + "]";
}

inline std::string text(const Tensor& x) { return text(x.sizes()); }

// A new contiguous tensor of x's dtype.
inline Tensor new_like(const Tensor& x, const std::vector<int64_t>& shape) {
  return empty_strided_cpu(shape, dtype_code(x));
}

// x itself when it is contiguous, else a contiguous copy.
inline Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  Tensor y = new_like(x, shape_of(x));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(y.get(), x.get(), 0));
  return y;
}

} // namespace nxd
