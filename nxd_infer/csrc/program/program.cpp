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

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

bool is_tensor(const c10::TypePtr& type) { return without_optional(type)->kind() == c10::TypeKind::TensorType; }

// A function over autograd's keys, or of somebody else's library, may have a kernel of its own for them.
bool needs_no_autograd(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.rfind("aten::", 0) == 0 || name.rfind("nxd::", 0) == 0 || name.rfind("nxd_", 0) == 0;
}

// In place: the sizes and strides of a tensor, or its memory.
bool changes_layout(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return op.hasTag(at::Tag::inplace_view) || name == "aten::set_" || name == "aten::resize_";
}

c10::IValue get(const Argument& argument, const std::vector<c10::IValue>& table) {
  switch (argument.kind) {
    case Argument::kConstant:
    case Argument::kValue: {
      const c10::IValue& value = argument.kind == Argument::kValue ? table[argument.value] : argument.constant;
      return argument.tensor && value.isScalar() ? number_as_tensor(value) : value;
    }
    case Argument::kTensors: {
      c10::List<at::Tensor> tensors;
      tensors.reserve(argument.values.size());
      for (const int64_t value : argument.values) tensors.push_back(table[value].toTensor());
      return tensors;
    }
    case Argument::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> tensors;
      tensors.reserve(argument.values.size());
      for (const int64_t value : argument.values) {
        tensors.push_back(value < 0 ? std::optional<at::Tensor>() : table[value].toTensor());
      }
      return tensors;
    }
  }
  return {};
}

c10::IValue item(const c10::IValue& value, int64_t index) {
  const c10::ArrayRef<c10::IValue> elements = value.isTuple() ? value.toTupleRef().elements() : value.toListRef();
  const int64_t count = static_cast<int64_t>(elements.size()), place = index < 0 ? index + count : index;
  TORCH_CHECK_INDEX(place >= 0 && place < count, "item ", index, " of ", count);
  return elements[place];
}

} // namespace

Program::Program(int64_t placeholders) : placeholders_(placeholders) {
  if (placeholders < 0 || placeholders > (1 << 20)) damaged("a graph of ", placeholders, " placeholders");
}

int64_t Program::defined(int64_t value) const {
  const int64_t known = placeholders_ + static_cast<int64_t>(steps_.size());
  if (finished_) damaged("it is finished already");
  if (value < 0 || value >= known) damaged("it refers to value ", value, ", and has ", known, " by then");
  return value;
}

void Program::add_operator(
    const std::string& name, const std::string& overload, const std::vector<int64_t>& kinds,
    const std::vector<c10::IValue>& arguments) {
  if (finished_) damaged("it is finished already");
  std::vector<Argument> found;
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const std::vector<c10::Argument>& parameters = op.schema().arguments();
  if (kinds.size() != parameters.size() || arguments.size() != parameters.size()) {
    damaged("it has ", arguments.size(), " arguments, and takes ", parameters.size());
  }
  for (size_t i = 0; i < parameters.size(); i++) {
    const c10::Argument& parameter = parameters[i];
    const c10::TypePtr type = without_optional(parameter.type());
    Argument argument;
    argument.tensor = is_tensor(type);
    if (kinds[i] == 0) {
      // What may be written or returned must be new at each call.
      const bool kept = !(argument.tensor && parameter.alias_info() && arguments[i].isScalar());
      argument.constant = kept ? convert(arguments[i], parameter.type(), parameter.N()) : arguments[i];
    } else if (kinds[i] == 1) {
      argument.kind = Argument::kValue;
      argument.value = defined(arguments[i].toInt());
    } else if (kinds[i] == 2) {
      const auto* list = type->castRaw<c10::ListType>();
      if (!arguments[i].isNone()) argument.values = arguments[i].toIntVector();
      if (list && is_tensor(list->getElementType())) {
        const bool optional = list->getElementType()->kind() == c10::TypeKind::OptionalType;
        argument.kind = optional ? Argument::kOptionalTensors : Argument::kTensors;
        for (const int64_t value : argument.values) {
          if (value != -1 || !optional) defined(value);
        }
      } else if (list && argument.values.empty()) {
        argument.constant = c10::impl::GenericList(list->getElementType());
      } else {
        damaged("a list of tensors where it takes ", type->str());
      }
    } else if (parameter.default_value()) {
      argument.constant = *parameter.default_value();
    } else {
      damaged("it lacks its argument ", parameter.name());
    }
    found.push_back(std::move(argument));
  }
  Step& step = steps_.emplace_back();
  step.op = op;
  step.plain = needs_no_autograd(op);
  step.arguments = std::move(found);
}

void Program::add_getitem(int64_t value, int64_t index) {
  Argument argument;
  argument.kind = Argument::kValue;
  argument.value = defined(value);
  Step& step = steps_.emplace_back();
  step.index = index;
  step.arguments.push_back(std::move(argument));
}

void Program::add_cond(
    int64_t condition, const c10::intrusive_ptr<Program>& if_true, const c10::intrusive_ptr<Program>& if_false,
    const std::vector<int64_t>& operands) {
  for (const auto& branch : {if_true, if_false}) {
    if (!branch->finished_ || branch->placeholders_ != static_cast<int64_t>(operands.size())) {
      damaged("a branch takes ", branch->placeholders_, " operands, and gets ", operands.size());
    }
  }
  std::vector<Argument> arguments(2);
  arguments[0].kind = Argument::kValue;
  arguments[0].value = defined(condition);
  arguments[1].kind = Argument::kTensors;
  for (const int64_t value : operands) arguments[1].values.push_back(defined(value));
  Step& step = steps_.emplace_back();
  step.branches[0] = if_true;
  step.branches[1] = if_false;
  step.arguments = std::move(arguments);
}

void Program::finish(const std::vector<int64_t>& outputs) {
  for (const int64_t value : outputs) outputs_.push_back(defined(value));
  std::vector<int64_t> last(steps_.size(), -1);  // the step that uses a step's result last
  const auto used = [&](int64_t value, int64_t step) {
    if (value >= placeholders_) last[value - placeholders_] = step;
  };
  for (size_t i = 0; i < steps_.size(); i++) {
    last[i] = i;
    for (const Argument& argument : steps_[i].arguments) {
      used(argument.value, i);
      for (const int64_t value : argument.values) used(value, i);
    }
  }
  for (const int64_t value : outputs_) used(value, -1);
  for (size_t i = 0; i < last.size(); i++) {
    if (last[i] >= 0) steps_[last[i]].dead.push_back(placeholders_ + i);
  }
  for (const Step& step : steps_) steady_ = steady_ && !(step.op && changes_layout(*step.op));
  finished_ = true;
}

void Program::hold(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& last) {
  const std::lock_guard<std::mutex> guard(holding_);
  if (first.size() + last.size() > static_cast<size_t>(placeholders_)) {
    damaged(first.size() + last.size(), " values for ", placeholders_, " placeholders");
  }
  first_ = first;
  last_ = last;
  forget();
}

// Lets go of what was held before.
void Program::forget() {
  tries_ = 0;
  if (const Turn turn(framing_); turn.own) {
    frame_.reset();
  } else {
    forget_ = true;  // the run that uses it does
  }
  for (const Step& step : steps_) {
    for (const auto& branch : step.branches) {
      if (branch) branch->forget();
    }
  }
}

// Frames in vain, from which on a run makes none: its tensors lie otherwise each time.
constexpr int64_t kTries = 8;

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& values) {
  if (!finished_) damaged("it is not finished");
  const at::NoGradGuard no_gradients;
  const Turn turn(framing_);
  Table placeholders;
  bool taken = turn.own && frame_ != nullptr;
  {
    const std::lock_guard<std::mutex> guard(holding_);
    const size_t count = first_.size() + values.size() + last_.size();
    if (count != static_cast<size_t>(placeholders_)) damaged(count, " values for ", placeholders_, " placeholders");
    size_t i = 0;
    for (const std::vector<at::Tensor>* part : {&std::as_const(first_), &values, &std::as_const(last_)}) {
      for (const at::Tensor& x : *part) taken = taken && frame_->take(i++, x, part != &values);
    }
    if (!taken) {
      placeholders.reserve(count);
      for (const std::vector<at::Tensor>* part : {&std::as_const(first_), &values, &std::as_const(last_)}) {
        placeholders.insert(placeholders.end(), part->begin(), part->end());
      }
    }
  }
  std::vector<at::Tensor> outputs;
  if (taken) {
    outputs = frame_->run();
    if (frame_->good()) {
      tries_ = 0;
    } else {
      frame_.reset();
    }
  } else {
    outputs = run_anew(placeholders, turn.own && steady_ && tries_ < kTries);
  }
  if (turn.own && forget_.exchange(false)) frame_.reset();
  return outputs;
}

// Without the frame; makes a new one of what it shows, for later runs.
std::vector<at::Tensor> Program::run_anew(const Table& placeholders, bool framing) {
  if (framing) frame_.reset();
  Table table = placeholders;
  table.reserve(placeholders_ + steps_.size());
  std::optional<Record> record;
  if (framing) record.emplace(placeholders);
  for (size_t i = 0; i < steps_.size(); i++) {
    c10::IValue result = call(steps_[i], i, table);
    if (framing) record->see(steps_[i], table, result);
    table.push_back(std::move(result));
    for (const int64_t value : steps_[i].dead) table[value] = c10::IValue();
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const int64_t value : outputs_) outputs.push_back(table[value].toTensor());
  if (framing) {
    tries_++;
    try {
      frame_ = std::make_unique<Frame>(steps_, outputs_, *record, placeholders);
    } catch (const std::exception&) {  // the run has done its work
      steady_ = false;
    }
  }
  return outputs;
}

namespace {

c10::IValue called(const Step& step, const Table& table) {
  if (step.op) {
    torch::jit::Stack stack;
    stack.reserve(step.arguments.size());
    for (const Argument& argument : step.arguments) stack.push_back(get(argument, table));
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (step.plain) below.emplace();
    step.op->callBoxed(stack);
    if (stack.empty()) return {};
    if (stack.size() > 1) return c10::ivalue::Tuple::create(std::move(stack));
    return std::move(stack.front());
  }
  if (!step.branches[0]) return item(table[step.arguments[0].value], step.index);
  Program& branch = *step.branches[table[step.arguments[0].value].toTensor().item<bool>() ? 0 : 1];
  std::vector<at::Tensor> operands;
  for (const int64_t value : step.arguments[1].values) operands.push_back(table[value].toTensor());
  return branch.run(operands);
}

} // namespace

c10::IValue call(const Step& step, int64_t number, const Table& table) {
  try {
    return called(step, table);
  } catch (c10::Error& error) {
    const std::string name = step.op ? toString(step.op->operator_name()) : step.branches[0] ? "cond" : "getitem";
    error.add_context(c10::str("in step ", number, " of a graph, ", name));
    throw;
  }
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
      .def("hold", &nxd::Program::hold)
      .def("run", &nxd::Program::run);
}
