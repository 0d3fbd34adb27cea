#include "program.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "convert.h"

namespace nxd {
namespace {

template <typename... Parts>
[[noreturn]] void damaged(const Parts&... parts) {
  C10_THROW_ERROR(ValueError, c10::str(parts...));
}

bool holds_tensors(const c10::TypePtr& type, bool& optional) {
  const auto* list = type->castRaw<c10::ListType>();
  if (!list) return false;
  const c10::TypePtr& element = list->getElementType();
  optional = element->kind() == c10::TypeKind::OptionalType;
  const c10::TypePtr& inner = optional ? element->expectRef<c10::OptionalType>().getElementType() : element;
  return inner->kind() == c10::TypeKind::TensorType;
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

} // namespace

Program::Program(int64_t placeholders) : placeholders_(placeholders) {
  if (placeholders < 0 || placeholders > (1 << 20)) damaged("a graph of ", placeholders, " placeholders");
  table_.resize(placeholders);
}

int64_t Program::defined(int64_t value) const {
  const int64_t known = placeholders_ + static_cast<int64_t>(steps_.size());
  if (value < 0 || value >= known) damaged("it refers to value ", value, ", and has ", known, " by then");
  return value;
}

void Program::add_operator(
    const std::string& name, const std::string& overload, const std::vector<int64_t>& kinds,
    const std::vector<c10::IValue>& arguments) {
  Step step;
  step.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const std::vector<c10::Argument>& parameters = step.op->schema().arguments();
  if (kinds.size() != parameters.size() || arguments.size() != parameters.size()) {
    damaged("it has ", arguments.size(), " arguments, and takes ", parameters.size());
  }
  for (size_t i = 0; i < parameters.size(); i++) {
    const c10::Argument& parameter = parameters[i];
    const c10::TypePtr type = without_optional(parameter.type());
    Argument argument;
    bool optional = false;
    if (kinds[i] == 0) {
      argument.constant = convert(arguments[i], parameter.type(), parameter.N());
    } else if (kinds[i] == 1) {
      argument.kind = Argument::kValue;
      argument.value = defined(arguments[i].toInt());
    } else if (kinds[i] == 2) {
      argument.values = arguments[i].toIntVector();
      if (holds_tensors(type, optional)) {
        argument.kind = optional ? Argument::kOptionalTensors : Argument::kTensors;
      } else if (argument.values.empty()) {
        argument.constant = convert(c10::ivalue::Tuple::create(std::vector<c10::IValue>()), type, parameter.N());
      } else {
        damaged("a list of tensors where it takes ", type->str());
      }
      for (const int64_t value : argument.values) {
        if (value != -1 || !optional) defined(value);
      }
    } else if (parameter.default_value()) {
      argument.constant = *parameter.default_value();
    } else {
      damaged("it lacks its argument ", parameter.name());
    }
    step.arguments.push_back(std::move(argument));
  }
  steps_.push_back(std::move(step));
}

void Program::add_getitem(int64_t value, int64_t index) {
  Step step;
  step.index = index;
  step.arguments.emplace_back();
  step.arguments[0].kind = Argument::kValue;
  step.arguments[0].value = defined(value);
  steps_.push_back(std::move(step));
}

void Program::add_cond(
    int64_t condition, const c10::intrusive_ptr<Program>& if_true, const c10::intrusive_ptr<Program>& if_false,
    const std::vector<int64_t>& operands) {
  Step step;
  int i = 0;
  for (const auto& branch : {if_true, if_false}) {
    if (!branch->finished_ || branch->placeholders_ != static_cast<int64_t>(operands.size())) {
      damaged("a branch takes ", branch->placeholders_, " operands, and gets ", operands.size());
    }
    step.branches[i++] = branch;
  }
  step.arguments.resize(2);
  step.arguments[0].kind = Argument::kValue;
  step.arguments[0].value = defined(condition);
  step.arguments[1].kind = Argument::kTensors;
  for (const int64_t value : operands) step.arguments[1].values.push_back(defined(value));
  steps_.push_back(std::move(step));
}

void Program::finish(const std::vector<int64_t>& outputs) {
  if (finished_) damaged("it is finished already");
  for (const int64_t value : outputs) outputs_.push_back(defined(value));
  const int64_t values = placeholders_ + static_cast<int64_t>(steps_.size());
  std::vector<int64_t> last(values, -1);
  for (size_t i = 0; i < steps_.size(); i++) {
    last[placeholders_ + i] = i;
    for (const Argument& argument : steps_[i].arguments) {
      if (argument.kind == Argument::kValue) last[argument.value] = i;
      for (const int64_t value : argument.values) {
        if (value >= 0) last[value] = i;
      }
    }
  }
  for (const int64_t value : outputs_) last[value] = -1;
  for (int64_t value = placeholders_; value < values; value++) {
    if (last[value] >= 0) steps_[last[value]].dead.push_back(value);
  }
  table_.resize(values);
  finished_ = true;
}

void Program::hold(int64_t first, const std::vector<at::Tensor>& values) {
  const std::lock_guard<std::mutex> turn(mutex_);
  const int64_t count = static_cast<int64_t>(values.size());
  if (first < 0 || first + count > placeholders_) damaged("values for ", first + count, " of ", placeholders_, " placeholders");
  for (int64_t i = 0; i < count; i++) table_[first + i] = values[i];
}

std::vector<at::Tensor> Program::run(int64_t first, const std::vector<at::Tensor>& values) {
  const int64_t count = static_cast<int64_t>(values.size());
  if (!finished_ || first < 0 || first + count > placeholders_) damaged("values for ", first + count, " of ", placeholders_, " placeholders");
  const std::lock_guard<std::mutex> turn(mutex_);
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_gradients;
  for (int64_t i = 0; i < count; i++) table_[first + i] = values[i];
  struct Cleared {  // also after an error: what a run made must not outlive it
    Program& program;
    int64_t first, count;
    ~Cleared() {
      program.stack_.clear();
      for (int64_t i = 0; i < count; i++) program.table_[first + i] = c10::IValue();
      for (size_t i = program.placeholders_; i < program.table_.size(); i++) program.table_[i] = c10::IValue();
    }
  } cleared{*this, first, count};
  return run_steps();
}

std::vector<at::Tensor> Program::run_steps() {
  for (size_t i = 0; i < steps_.size(); i++) {
    const Step& step = steps_[i];
    try {
      call(step);
    } catch (c10::Error& error) {
      const std::string name = step.op ? toString(step.op->operator_name()) : step.branches[0] ? "cond" : "getitem";
      error.add_context(c10::str("in step ", i, " of a graph, ", name));
      throw;
    }
    table_[placeholders_ + i] = stack_.empty() ? c10::IValue() : std::move(stack_.back());
    stack_.clear();
    for (const int64_t value : step.dead) table_[value] = c10::IValue();
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const int64_t value : outputs_) outputs.push_back(table_[value].toTensor());
  return outputs;
}

// Leaves the step's result alone on the stack.
void Program::call(const Step& step) {
  stack_.clear();
  if (step.op) {
    for (const Argument& argument : step.arguments) stack_.push_back(get(argument));
    step.op->callBoxed(stack_);
    if (stack_.size() > 1) stack_ = {c10::ivalue::Tuple::create(std::move(stack_))};
  } else if (step.branches[0]) {
    Program& branch = *step.branches[table_[step.arguments[0].value].toTensor().item<bool>() ? 0 : 1];
    std::vector<at::Tensor> operands;
    for (const int64_t value : step.arguments[1].values) operands.push_back(table_[value].toTensor());
    stack_.emplace_back(branch.run(0, operands));
  } else {
    const c10::IValue& value = table_[step.arguments[0].value];
    const c10::ArrayRef<c10::IValue> elements = value.isTuple() ? value.toTupleRef().elements() : value.toListRef();
    const int64_t count = static_cast<int64_t>(elements.size());
    const int64_t index = step.index < 0 ? step.index + count : step.index;
    TORCH_CHECK_INDEX(index >= 0 && index < count, "item ", step.index, " of ", count);
    stack_.push_back(elements[index]);
  }
}

c10::IValue Program::get(const Argument& argument) const {
  switch (argument.kind) {
    case Argument::kConstant:
      return argument.constant;
    case Argument::kValue:
      return table_[argument.value];
    case Argument::kTensors: {
      c10::List<at::Tensor> tensors;
      tensors.reserve(argument.values.size());
      for (const int64_t value : argument.values) tensors.push_back(table_[value].toTensor());
      return tensors;
    }
    case Argument::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> tensors;
      tensors.reserve(argument.values.size());
      for (const int64_t value : argument.values) {
        tensors.push_back(value < 0 ? std::optional<at::Tensor>() : table_[value].toTensor());
      }
      return tensors;
    }
  }
  return {};
}

} // namespace nxd

#define NXD_LIBRARY_(namespace, m) TORCH_LIBRARY_FRAGMENT(namespace, m)
#define NXD_LIBRARY(m) NXD_LIBRARY_(NXD_NAMESPACE, m)

NXD_LIBRARY(m) {
  m.class_<nxd::Program>("Program")
      .def(torch::init<int64_t>())
      .def("add_operator", &nxd::Program::add_operator)
      .def("add_getitem", &nxd::Program::add_getitem)
      .def("add_cond", &nxd::Program::add_cond)
      .def("finish", &nxd::Program::finish)
      .def("placeholders", &nxd::Program::placeholders)
      .def("hold", &nxd::Program::hold)
      .def("run", &nxd::Program::run);
}
