#include "shortcuts.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "../fused_functions.h"

namespace nxd {
namespace {

// Of a tensor; in one piece of memory.
struct Layout {
  static constexpr int64_t kMost = 6;
  int64_t dims, sizes[kMost], strides[kMost];
  c10::ScalarType dtype;

  explicit Layout(const at::Tensor& x) : dims(x.dim()), dtype(x.scalar_type()) {
    std::copy_n(x.sizes().begin(), dims, sizes);
    std::copy_n(x.strides().begin(), dims, strides);
  }
  // Whether a tensor is its memory and a layout, and nothing that only the dispatcher knows how to read.
  static bool tells(const at::Tensor& x) {
    return x.defined() && x.layout() == at::kStrided && x.device().is_cpu() && !x.is_conj() && !x.is_neg() &&
        !x._is_zerotensor() && x.dim() <= kMost;
  }
  bool of(const at::Tensor& x) const {
    return tells(x) && x.scalar_type() == dtype && x.sizes() == c10::IntArrayRef(sizes, dims) &&
        x.strides() == c10::IntArrayRef(strides, dims);
  }
};

// A view of one tensor: the same of another.
class View : public Shortcut {
 public:
  View(int64_t value, const at::Tensor& x, const at::Tensor& result)
      : value_(value), from_(x), to_(result), offset_(result.storage_offset() - x.storage_offset()) {}

  c10::IValue call(const Step&, const Table& table) const override {
    const at::Tensor& x = table[value_].toTensor();
    if (!from_.of(x)) return {};
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(), x.dtype());
    const auto dims = static_cast<size_t>(to_.dims);
    view.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset() + offset_);
    view.unsafeGetTensorImpl()->set_sizes_and_strides({to_.sizes, dims}, {to_.strides, dims});
    return view;
  }

 private:
  const int64_t value_;
  const Layout from_, to_;
  const int64_t offset_;
};

// The fused operator of a library.
class Fused : public Shortcut {
 public:
  Fused(const FusedFunctions& functions, void* plan, const std::vector<int64_t>& values, const Table& table)
      : functions_(functions), plan_(plan), values_(values) {
    for (const int64_t value : values) layouts_.emplace_back(table[value].toTensor());
    count_ = functions.results(plan, &results_);
  }
  ~Fused() override { functions_.drop(plan_); }

  c10::IValue call(const Step&, const Table& table) const override {
    c10::SmallVector<char*, 16> data;
    for (size_t i = 0; i < values_.size(); i++) {
      const at::Tensor& x = table[values_[i]].toTensor();
      if (!layouts_[i].of(x)) return {};
      data.push_back(static_cast<char*>(x.data_ptr()));
    }
    std::vector<c10::IValue> made;
    made.reserve(count_);
    for (int64_t i = 0; i < count_; i++) {
      const FusedResult& one = results_[i];
      at::Tensor y = at::detail::empty_strided_cpu(
          {one.sizes, static_cast<size_t>(one.dims)}, {one.strides, static_cast<size_t>(one.dims)},
          one.half ? at::kBFloat16 : at::kFloat);
      data.push_back(static_cast<char*>(y.data_ptr()));
      made.emplace_back(std::move(y));
    }
    functions_.run(plan_, data.data());
    return c10::ivalue::Tuple::create(std::move(made));
  }

 private:
  const FusedFunctions& functions_;
  void* const plan_;
  const std::vector<int64_t> values_;
  std::vector<Layout> layouts_;
  const FusedResult* results_ = nullptr;
  int64_t count_ = 0;
};

// The functions of the library that an operator called `fused` is from; nullptr if it is another operator.
const FusedFunctions* functions_of(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const size_t at = name.find("::fused");
  if (at == std::string::npos || at + 7 != name.size() || name.rfind("nxd_", 0) != 0) return nullptr;
  const auto found = c10::Dispatcher::singleton().findSchema({name + "_functions", ""});
  if (!found) return nullptr;
  torch::jit::Stack stack{kFusedFunctions};
  found->callBoxed(stack);
  return reinterpret_cast<const FusedFunctions*>(stack.at(0).toInt());
}

bool plain(const at::Tensor& x) { return Layout::tells(x) && !x.requires_grad(); }

std::unique_ptr<const Shortcut> fused(const Step& step, const Table& table) {
  const FusedFunctions* functions = functions_of(*step.op);
  if (functions == nullptr || step.arguments[0].kind != Argument::kTensors) return nullptr;
  std::vector<void*> inputs;
  for (const int64_t value : step.arguments[0].values) {
    const at::Tensor& x = table[value].toTensor();
    if (!plain(x)) return nullptr;
    inputs.push_back(const_cast<at::Tensor*>(&x));  // what an AtenTensorHandle is
  }
  void* plan = functions->plan(
      step.arguments[1].constant.toStringRef().c_str(), inputs.data(), static_cast<int64_t>(inputs.size()));
  if (plan == nullptr) return nullptr;
  return std::make_unique<Fused>(*functions, plan, step.arguments[0].values, table);
}

} // namespace

std::unique_ptr<const Shortcut> shortcut(const Step& step, const Table& table, const c10::IValue& result) {
  if (!step.plain) return nullptr;
  const c10::FunctionSchema& schema = step.op->schema();
  if (schema.is_mutable()) return nullptr;
  if (!result.isTensor()) return fused(step, table);
  // What returns its argument's memory is known to do so by sizes and strides alone; but as_strided counts from the
  // beginning of the memory.
  if (step.op->operator_name().name == "aten::as_strided") return nullptr;
  const c10::AliasInfo* alias = schema.returns()[0].alias_info();
  if (alias == nullptr || alias->isWrite()) return nullptr;
  int64_t source = -1, tensors = 0;
  for (const Argument& argument : step.arguments) {
    if (argument.kind != Argument::kConstant) tensors++;
    if (argument.kind == Argument::kValue) source = argument.value;
  }
  if (tensors != 1 || source < 0) return nullptr;
  const at::Tensor &x = table[source].toTensor(), &y = result.toTensor();
  if (!plain(x) || !plain(y) || !x.storage().is_alias_of(y.storage()) || x.dtype() != y.dtype()) return nullptr;
  return std::make_unique<View>(source, x, y);
}

} // namespace nxd
