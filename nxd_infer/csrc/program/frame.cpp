#include "frame.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "program.h"

namespace nxd {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kAtTheEnd = INT64_MAX;

template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTuple()) {
    for (const c10::IValue& one : value.toTupleRef().elements()) each_tensor(one, visit);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, visit);
  }
}

template <typename Visit>
void each_operand(const Step& step, const Visit& visit) {
  for (const Argument& argument : step.arguments) {
    if (argument.kind == Argument::kValue) visit(argument.value);
    for (const int64_t value : argument.values) {
      if (value >= 0) visit(value);
    }
  }
}

// The value that a step is a view of: it has no other tensor, and says by sizes and strides alone what it is. -1: none.
// No program with operators that change those of a tensor in place has a frame.
int64_t viewed(const Step& step) {
  if (!step.op || !step.plain) return -1;
  const c10::FunctionSchema& schema = step.op->schema();
  // as_strided counts from the beginning of the memory.
  if (schema.is_mutable() || schema.returns().size() != 1 || step.op->operator_name().name == "aten::as_strided") {
    return -1;
  }
  const c10::AliasInfo* alias = schema.returns()[0].alias_info();
  if (alias == nullptr || alias->isWrite()) return -1;
  int64_t source = -1, count = 0;
  each_operand(step, [&](int64_t value) {
    source = value;
    count++;
  });
  return count == 1 && step.arguments[0].kind == Argument::kValue ? source : -1;
}

// Whether a result may share memory with an argument, in this run or another.
bool may_alias(const Step& step, const std::vector<std::vector<Seen>>& values, int64_t value) {
  if (!step.op) return true;
  for (const c10::Argument& result : step.op->schema().returns()) {
    if (result.alias_info() != nullptr) return true;
  }
  bool found = false;
  each_operand(step, [&](int64_t operand) {
    for (const Seen& one : values[operand]) {
      for (const Seen& result : values[value]) found = found || one.memory == result.memory;
    }
  });
  return found;
}

// The functions of the library that an operator is from; nullptr if it has none.
const PlannedFunctions* functions_of(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const size_t at = name.find("::");
  if (name.rfind("nxd_", 0) != 0 || at == std::string::npos) return nullptr;
  const auto found = c10::Dispatcher::singleton().findSchema({name.substr(0, at) + "::planned_functions", ""});
  if (!found) return nullptr;
  torch::jit::Stack stack{kPlannedVersion};
  found->callBoxed(stack);
  return reinterpret_cast<const PlannedFunctions*>(stack.at(0).toInt());
}

const c10::DispatchKeySet kOrdinary{
    c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU};

at::Tensor tensor_on(const c10::Storage& storage, c10::DispatchKeySet keys, const Seen& as, int64_t offset) {
  at::Tensor x = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(as.dtype));
  x.unsafeGetTensorImpl()->set_storage_offset(offset);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(as.sizes, as.strides);
  return x;
}

// A result that is to have a place in the memory.
struct Placed {
  int64_t value, index;
  int64_t first, last;  // steps between which it is used
  size_t bytes, place = 0;
};

// Gives each the lowest place that is free while it is used; returns the size of the whole.
size_t place(std::vector<Placed>& all) {
  std::vector<Placed*> order;
  for (Placed& one : all) order.push_back(&one);
  std::stable_sort(order.begin(), order.end(), [](const Placed* a, const Placed* b) { return a->bytes > b->bytes; });
  std::vector<const Placed*> placed;  // by place
  size_t size = 0;
  for (Placed* one : order) {
    for (const Placed* other : placed) {
      if (other->last < one->first || one->last < other->first) continue;
      if (one->place + one->bytes <= other->place) break;
      one->place = std::max(one->place, other->place + other->bytes);
    }
    const auto later = [](const Placed* a, const Placed* b) { return a->place < b->place; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), one, later), one);
    size = std::max(size, one->place + one->bytes);
  }
  return size;
}

} // namespace

// --- what a run shows ---

Seen::Seen(const at::Tensor& x, int64_t memory)
    : offset(0), dtype(c10::ScalarType::Float), memory(memory), bytes(0), plain(false) {
  if (!x.defined() || x.layout() != at::kStrided || !x.device().is_cpu() || !x.has_storage()) return;
  sizes = c10::DimVector(x.sizes());
  strides = c10::DimVector(x.strides());
  offset = x.storage_offset();
  dtype = x.scalar_type();
  bytes = x.storage().nbytes();
  plain = !x.is_conj() && !x.is_neg() && !x._is_zerotensor() && !x.requires_grad();
}

bool Seen::like(const at::Tensor& x) const {
  const Seen other(x, memory);
  return plain && other.plain && dtype == other.dtype && sizes == other.sizes && strides == other.strides;
}

Record::Record(const Table& placeholders) : single(placeholders.size(), true) {
  for (const c10::IValue& value : placeholders) values.push_back({Seen(value.toTensor(), memories_++)});
}

void Record::see(const Step& step, const Table& table, const c10::IValue& result) {
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> known;
  each_operand(step, [&](int64_t value) {
    size_t i = 0;
    each_tensor(table[value], [&](const at::Tensor& x) {
      if (x.defined() && x.has_storage()) known.emplace_back(x.storage().unsafeGetStorageImpl(), values[value][i].memory);
      i++;
    });
  });
  single.push_back(result.isTensor());
  std::vector<Seen>& seen = values.emplace_back();
  each_tensor(result, [&](const at::Tensor& x) {
    const c10::StorageImpl* storage = x.defined() && x.has_storage() ? x.storage().unsafeGetStorageImpl() : nullptr;
    const auto same = std::find_if(known.begin(), known.end(), [&](const auto& one) { return one.first == storage; });
    if (same == known.end()) {
      known.emplace_back(storage, memories_++);
      seen.emplace_back(x, known.back().second);
    } else {
      seen.emplace_back(x, same->second);
    }
  });
}

// --- memory ---

std::shared_ptr<Pool> Pool::shared() {
  static std::mutex mutex;
  static auto* last = new std::weak_ptr<Pool>;  // outlives every thread
  const std::lock_guard<std::mutex> guard(mutex);
  std::shared_ptr<Pool> found = last->lock();
  if (found == nullptr) *last = found = std::make_shared<Pool>();
  return found;
}

Pool::Piece Pool::take(size_t bytes, const void* preferred) {
  if (bytes == 0) return {};
  const std::lock_guard<std::mutex> guard(mutex_);
  auto chosen = free_.end();  // the preferred one, else the smallest that is large enough, else the largest
  for (auto one = free_.begin(); one != free_.end(); one++) {
    const auto better = [&](const Piece& a, const Piece& b) {
      const bool fits = a.second >= bytes, other = b.second >= bytes;
      return fits != other ? fits : fits ? a.second < b.second : a.second > b.second;
    };
    if (one->second >= bytes && one->first.get() == preferred) {
      chosen = one;
      break;
    }
    if (chosen == free_.end() || better(*one, *chosen)) chosen = one;
  }
  Piece piece;
  if (chosen != free_.end()) {
    piece = std::move(*chosen);
    free_.erase(chosen);
  }
  if (piece.second < bytes) {
    piece.first.clear();
    piece = {c10::GetCPUAllocator()->allocate(bytes), bytes};
  }
  return piece;
}

void Pool::give(Piece piece) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (piece.second > 0) free_.push_back(std::move(piece));
}

// --- the frame ---

Frame::Frame(
    const std::deque<Step>& steps, const std::vector<int64_t>& outputs, const Record& record,
    const Table& placeholders)
    : steps_(steps), outputs_(outputs), table_(placeholders) {
  const auto first = static_cast<int64_t>(placeholders.size()), count = static_cast<int64_t>(steps.size());
  const auto& values = record.values;
  for (int64_t i = 0; i < first; i++) {
    placeholders_.push_back(values[i][0]);
    data_.push_back(nullptr);
  }
  table_.resize(first + count);

  // The step that uses a value last, itself or by what may share its memory.
  std::vector<int64_t> last(first + count, -1);
  std::vector<bool> only_items(first + count, true);
  for (const int64_t value : outputs) {
    last[value] = kAtTheEnd;
    only_items[value] = false;
  }
  for (int64_t i = count - 1; i >= 0; i--) {
    const int64_t value = first + i;
    last[value] = std::max(last[value], i);
    // An operator of others may keep what it is given.
    const bool kept = steps[i].op && !steps[i].plain;
    const int64_t until = kept ? kAtTheEnd : may_alias(steps[i], values, value) ? last[value] : i;
    const bool item = !steps[i].op && !steps[i].branches[0];
    each_operand(steps[i], [&](int64_t operand) {
      last[operand] = std::max(last[operand], until);
      if (!item) only_items[operand] = false;
    });
  }

  // What stays: results of calls that can be planned, their items, and views of what stays.
  std::vector<bool>& stays = stays_;
  stays.assign(first + count, false);
  std::fill_n(stays.begin(), first, true);
  std::vector<Placed> placed;
  for (int64_t i = 0; i < count; i++) {
    const Step& step = steps[i];
    const int64_t value = first + i;
    const std::vector<Seen>& seen = values[value];
    const int64_t from = viewed(step);
    const bool item = !step.op && !step.branches[0];
    const bool can_stay =
        last[value] != kAtTheEnd && std::all_of(seen.begin(), seen.end(), [](const Seen& one) { return one.plain; });
    if (can_stay && item) {
      stays[value] = record.single[value] && step.arguments[0].value >= first && stays[step.arguments[0].value];
    } else if (can_stay && from >= 0) {
      const Seen& source = values[from][0];
      stays[value] = record.single[value] && stays[from] && record.single[from] && source.plain &&
          source.memory == seen[0].memory && source.dtype == seen[0].dtype;
    }
    if (stays[value]) continue;
    Part& part = parts_.emplace_back();
    part.step = &step;
    part.number = i;
    part.value = value;
    for (const int64_t one : step.dead) {
      if (!stays[one]) part.dead.push_back(one);
    }
    each_operand(step, [&](int64_t operand) {
      part.operands.push_back(operand);
      part.moving = part.moving || !stays[operand];
    });
    const bool new_memory = !may_alias(step, values, value) &&
        std::all_of(seen.begin(), seen.end(), [](const Seen& one) { return one.offset == 0; });
    if (!can_stay || !new_memory || seen.empty() || !(record.single[value] || only_items[value])) continue;
    if (!plan(part, record)) continue;
    stays[value] = true;
    for (size_t index = 0; index < seen.size(); index++) {
      const size_t bytes = (seen[index].bytes + kAlignment - 1) / kAlignment * kAlignment;
      placed.push_back({value, static_cast<int64_t>(index), i, last[value], bytes});
    }
  }

  bytes_ = place(placed);
  memory_ = c10::Storage(
      c10::Storage::use_byte_size_t(), bytes_, c10::DataPtr(nullptr, c10::kCPU), nullptr, /*resizable=*/false);
  std::vector<std::vector<at::Tensor>> made(first + count);
  for (const Placed& one : placed) {
    const Seen& seen = values[one.value][one.index];
    const auto width = static_cast<size_t>(c10::elementSize(seen.dtype));
    made[one.value].push_back(
        tensor_on(memory_, kOrdinary, seen, static_cast<int64_t>(one.place / width)));
  }
  for (Part& part : parts_) part.results = made[part.value];
  for (int64_t i = 0; i < count; i++) {
    const Step& step = steps[i];
    const int64_t value = first + i;
    if (!stays[value]) continue;
    if (!made[value].empty()) {
      if (record.single[value]) table_[value] = made[value][0];
    } else if (!step.op) {
      const auto several = static_cast<int64_t>(made[step.arguments[0].value].size());
      const int64_t index = step.index < 0 ? step.index + several : step.index;
      table_[value] = made[step.arguments[0].value].at(index);
    } else {
      const int64_t from = viewed(step);
      const Seen &source = values[from][0], &seen = values[value][0];
      const at::Tensor& x = table_[from].toTensor();
      const int64_t skipped = seen.offset - source.offset;
      table_[value] = tensor_on(x.storage(), x.key_set(), seen, x.storage_offset() + skipped);
      views_.push_back({value, from, skipped});
    }
  }
}

// Plans the call on tensors that lie like the recorded ones, and have no memory.
bool Frame::plan(Part& part, const Record& record) {
  const Step& step = *part.step;
  const PlannedFunctions* functions = step.op && step.plain ? functions_of(*step.op) : nullptr;
  if (functions == nullptr) return false;
  static char nothing[kAlignment];
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nothing, c10::kCPU), nullptr, /*resizable=*/false);
  std::deque<at::Tensor> tensors;
  std::deque<std::vector<void*>> handles;
  std::vector<PlannedArgument> arguments;
  for (const Argument& argument : step.arguments) {
    PlannedArgument& given = arguments.emplace_back();
    given = {};
    if (argument.kind == Argument::kConstant) {
      const c10::IValue& constant = argument.constant;
      if (constant.isInt()) given.integer = constant.toInt();
      else if (constant.isBool()) given.integer = constant.toBool();
      else if (constant.isDouble()) given.number = constant.toDouble();
      else if (constant.isString()) given.text = constant.toStringRef().c_str();
      else if (!constant.isNone()) return false;
      if (argument.tensor && !constant.isNone()) return false;
      continue;
    }
    if (argument.kind == Argument::kOptionalTensors) return false;
    std::vector<void*>& some = handles.emplace_back();
    const std::vector<int64_t> one{argument.value};
    for (const int64_t value : argument.kind == Argument::kValue ? one : argument.values) {
      if (!record.single[value] || !record.values[value][0].plain) return false;
      tensors.push_back(tensor_on(storage, kOrdinary, record.values[value][0], 0));
      some.push_back(&tensors.back());  // what an AtenTensorHandle is
    }
    given.tensors = some.data();
    given.count = static_cast<int64_t>(some.size());
  }
  const std::string& name = step.op->operator_name().name;
  void* plan = functions->plan(name.c_str() + name.find("::") + 2, arguments.data());
  if (plan == nullptr) return false;
  part.functions = functions;
  part.plan = {plan, Dropping{functions->drop}};
  for (const int64_t operand : part.operands) part.lies.push_back(record.values[operand][0]);
  return true;
}

bool Frame::take(size_t i, const at::Tensor& x, bool held) {
  const at::Tensor& known = table_[i].toTensor();
  const bool same = known.is_same(x);
  if (same && held) return true;
  if (!placeholders_[i].like(x)) return false;
  if (!same) table_[i] = x;
  if (!same || data_[i] != x.const_data_ptr()) {
    data_[i] = x.const_data_ptr();
    stale_ = true;
  }
  return true;
}

void Frame::refresh() {
  for (const View& view : views_) {
    const at::Tensor& from = table_[view.from].toTensor();
    c10::TensorImpl* to = table_[view.value].toTensor().unsafeGetTensorImpl();
    to->set_storage_keep_dtype(from.storage());
    to->set_storage_offset(from.storage_offset() + view.skipped);
  }
  for (const Part& part : parts_) {
    if (part.plan && !part.moving) point(part);
  }
  stale_ = false;
}

void Frame::point(const Part& part) const {
  c10::SmallVector<char*, 16> data;
  for (const int64_t operand : part.operands) data.push_back(static_cast<char*>(table_[operand].toTensor().data_ptr()));
  for (const at::Tensor& result : part.results) data.push_back(static_cast<char*>(result.data_ptr()));
  part.functions->point(part.plan.get(), data.data());
}

// False, and nothing done, if an operand lies otherwise than in the first run.
bool Frame::run_part(const Part& part) {
  if (!part.plan) {
    table_[part.value] = call(*part.step, part.number, table_);
    return true;
  }
  if (part.moving) {
    for (size_t i = 0; i < part.operands.size(); i++) {
      const c10::IValue& operand = table_[part.operands[i]];
      if (!operand.isTensor() || !part.lies[i].like(operand.toTensor())) return false;
    }
    point(part);
  }
  part.functions->run(part.plan.get());
  return true;
}

// The rest of a run, from a step on.
std::vector<at::Tensor> Frame::run_without(int64_t from) {
  good_ = false;
  const auto first = static_cast<int64_t>(placeholders_.size()), count = static_cast<int64_t>(steps_.size());
  Table table = table_;
  for (int64_t i = from; i < count; i++) {
    const Step& step = steps_[i];
    const bool item = !step.op && !step.branches[0];
    if (item && stays_[first + i] && step.arguments[0].value < first + from) continue;  // of a planned call: it is there
    table[first + i] = call(step, i, table);
  }
  std::vector<at::Tensor> outputs;
  for (const int64_t value : outputs_) outputs.push_back(table[value].toTensor());
  return outputs;
}

std::vector<at::Tensor> Frame::run() {
  struct Run {  // what it leaves, however it ends
    Frame& frame;
    Pool::Piece piece;
    ~Run() {
      for (const Part& part : frame.parts_) {
        if (!part.plan) frame.table_[part.value] = c10::IValue();
      }
      frame.pool_->give(std::move(piece));
    }
  } const run{*this, pool_->take(bytes_, memory_.data())};
  if (run.piece.first.get() != memory_.data()) {
    memory_.set_data_ptr_noswap(c10::DataPtr(run.piece.first.get(), c10::kCPU));
    stale_ = true;
  }
  if (stale_) refresh();
  for (const Part& part : parts_) {
    if (!run_part(part)) return run_without(part.number);
    for (const int64_t value : part.dead) table_[value] = c10::IValue();
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const int64_t value : outputs_) outputs.push_back(table_[value].toTensor());
  return outputs;
}

} // namespace nxd
