// Tensors over torch's C interface, and small helpers: contiguous inputs, plain outputs, shapes in messages.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace nxd {

// A tensor's handle, owned or borrowed for the duration of a call. torch::stable::Tensor would work, but allocates
// memory for each handle and cannot borrow: a decode step passes about five hundred tensors to operators.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle owned) : handle_(owned), owned_(true) {}
  Tensor(const Tensor& other) : handle_(other.owned_ ? other.share() : other.handle_), owned_(other.owned_) {}
  Tensor(Tensor&& other) noexcept : handle_(other.handle_), owned_(std::exchange(other.owned_, false)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~Tensor() {
    if (owned_) aoti_torch_delete_tensor_object(handle_);
  }

  static Tensor borrow(AtenTensorHandle handle) {
    Tensor found(handle);
    found.owned_ = false;
    return found;
  }

  AtenTensorHandle get() const { return handle_; }

  // Releases the handle to the caller, who must delete it.
  AtenTensorHandle release() {
    AtenTensorHandle handle = owned_ ? handle_ : share();
    owned_ = false;
    return handle;
  }

  // Another handle to the same tensor, which the caller must delete.
  AtenTensorHandle share() const { return ask<AtenTensorHandle>(aoti_torch_new_tensor_handle); }

  int64_t dim() const { return ask<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  void* data_ptr() const { return ask<void*>(aoti_torch_get_data_ptr); }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  torch::headeronly::IntHeaderOnlyArrayRef sizes() const {
    return {ask<int64_t*>(aoti_torch_get_sizes), static_cast<size_t>(dim())};
  }
  int64_t size(int64_t d) const { return sizes().at(d); }
  int64_t stride(int64_t d) const {
    return torch::headeronly::IntHeaderOnlyArrayRef(ask<int64_t*>(aoti_torch_get_strides), dim()).at(d);
  }
  int32_t dtype() const { return ask<int32_t>(aoti_torch_get_dtype); }
  torch::headeronly::ScalarType scalar_type() const {
    namespace stable = torch::stable::detail;
    return stable::to<torch::headeronly::ScalarType>(stable::from(dtype()));
  }
  size_t element_size() const { return aoti_torch_dtype_element_size(dtype()); }

 private:
  template <typename T, typename Ask>
  T ask(const Ask& question) const {
    T found{};
    STABLE_TORCH_ERROR_CODE_CHECK(question(handle_, &found));
    return found;
  }

  AtenTensorHandle handle_;
  bool owned_;
};

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
  return empty_strided_cpu(shape, x.dtype());
}

// x itself if it is contiguous, else a contiguous copy.
inline Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  Tensor y = new_like(x, shape_of(x));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(y.get(), x.get(), 0));
  return y;
}

} // namespace nxd

// As arguments and results of boxed operators.
namespace torch::stable::detail {

template <>
struct ToImpl<nxd::Tensor> {
  static nxd::Tensor call(StableIValue value, uint64_t, bool) { return nxd::Tensor(to<AtenTensorHandle>(value)); }
};

template <>
struct FromImpl<nxd::Tensor> {
  static StableIValue call(const nxd::Tensor& x, uint64_t, bool) { return torch::stable::detail::from(x.share()); }
};

} // namespace torch::stable::detail
