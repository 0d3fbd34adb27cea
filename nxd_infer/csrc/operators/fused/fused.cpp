// A fused operator: many element-wise functions and reductions over the last dimension, in one pass over memory.
//
// What it computes is a text (nxd_infer/ops/fused.py has the language, and the reference). Its values are rows, of
// which it computes a few at a time: those stay in the cache from the first function to the last. Functions read inputs
// and write results where they are; other values have a place in the memory of the thread.
#include "fused/loops.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nxd {
namespace {

constexpr int64_t kTile = 4096;  // elements of the widest value that are computed at a time
constexpr int64_t kMostWidth = 1 << 22, kMostValues = 4096, kMostDims = 8;
constexpr int64_t kShared = 1 << 18;  // elements times functions from which on another thread helps

[[noreturn]] void damaged(const std::string& what) { throw std::runtime_error("nxd: fused: " + what); }

enum class In { memory, input, output };

// An input, a constant, or the result of a function.
struct Value {
  int64_t width;
  bool half;          // bfloat16, else float32
  int64_t root;       // the value in whose memory this one is: itself, or one of which it is some columns
  int64_t begin = 0;  // the first of those
  bool same = false;  // for all rows
  In in = In::memory; // of a root
  int64_t place = 0;  // of a root: in bytes of the memory, or the number of the input or output
};

struct Step {
  Loop loop;                // nullptr: concatenate
  std::vector<int64_t> of;  // operands
  int64_t to;
  bool reduces = false;     // each row to one value
};

struct Output {
  int64_t value;
  std::vector<int64_t> strides;
};

struct Program {
  std::vector<int64_t> outer;  // dimensions but the last
  int64_t rows = 1, tile = 1;
  int64_t inputs = 0;
  std::vector<Value> values;  // inputs first
  std::vector<Step> steps;
  std::vector<Output> outputs;
  std::vector<std::pair<int64_t, float>> constants;  // value, number
  int64_t widest = 1, bytes = 0;
};

class Reader {
 public:
  explicit Reader(const std::string& text) : from_(text) { from_ >> next_; }

  bool done() const { return next_.empty(); }
  std::string word() {
    if (done()) damaged("its text ends too early");
    std::string found = std::move(next_);
    next_.clear();
    from_ >> next_;
    return found;
  }
  bool at(const std::string& word) {  // reads it, if it is the next one
    if (next_ != word) return false;
    this->word();
    return true;
  }
  bool half() {
    const std::string found = word();
    if (found != "bfloat16" && found != "float32") damaged("'" + found + "' where bfloat16 or float32 belongs");
    return found == "bfloat16";
  }
  int64_t integer(int64_t low, int64_t high) {
    const int64_t value = parsed<int64_t>([](const std::string& text, size_t* end) { return std::stoll(text, end); });
    if (value < low || value > high) damaged(std::to_string(value) + " where a number is out of range");
    return value;
  }
  float number() {
    return static_cast<float>(
        parsed<double>([](const std::string& text, size_t* end) { return std::stod(text, end); }));
  }

 private:
  template <typename T, typename Parse>
  T parsed(const Parse& parse) {
    const std::string found = word();
    size_t end = 0;
    try {
      const T value = parse(found, &end);
      if (end == found.size()) return value;
    } catch (const std::exception&) {
    }
    damaged("'" + found + "' where a number belongs");
  }

  std::istringstream from_;
  std::string next_;
};

void read_statement(Reader& reader, Program& program) {
  std::vector<Value>& values = program.values;
  const auto count = static_cast<int64_t>(values.size());
  if (count >= kMostValues) damaged("it has too many values");
  const std::string name = reader.word();
  const auto operand = [&] { return reader.integer(0, count - 1); };
  if (name == "constant") {
    values.push_back({1, false, count, 0, true});
    program.constants.emplace_back(count, reader.number());
  } else if (name == "slice") {
    const Value of = values[operand()];
    const int64_t begin = reader.integer(0, of.width - 1), end = reader.integer(begin + 1, of.width);
    values.push_back({end - begin, of.half, of.root, of.begin + begin, of.same});
  } else if (name == "concatenate") {
    Step step{nullptr, {}, count};
    int64_t width = 0;
    for (int64_t parts = reader.integer(1, kMostValues); parts > 0; parts--) {
      step.of.push_back(operand());
      width += values[step.of.back()].width;
      if (values[step.of.back()].half != values[step.of[0]].half) damaged("it concatenates values of two dtypes");
    }
    if (width > kMostWidth) damaged("it has too wide a value");
    values.push_back({width, values[step.of[0]].half, count});
    program.steps.push_back(std::move(step));
  } else if (const Function* function = function_named(name)) {
    const bool reduces = function->kind == Function::reduction, half = !reduces && reader.half();
    Step step{function->loop, {operand()}, count, reduces};
    int64_t width = reduces ? 1 : values[step.of[0]].width;
    if (function->kind == Function::binary) {
      step.of.push_back(operand());
      const Value &x = values[step.of[0]], &y = values[step.of[1]];
      const bool fits = x.width == y.width || (x.width == 1 && !x.half) || (y.width == 1 && !y.half);
      if (!fits) damaged(name + " of widths " + std::to_string(x.width) + " and " + std::to_string(y.width));
      width = std::max(x.width, y.width);
    }
    program.steps.push_back(std::move(step));
    values.push_back({width, half, count});
  } else {
    damaged("the function '" + name + "' is unknown");
  }
}

// Lets functions write what is only concatenated to where it goes.
void join_parts(Program& program) {
  std::vector<char> free(program.values.size(), 0);  // the results of functions that have no place yet
  for (const Step& step : program.steps) {
    free[step.to] = step.loop != nullptr && program.values[step.to].in == In::memory;
    if (step.loop != nullptr) continue;
    int64_t begin = 0;
    for (const int64_t of : step.of) {
      Value& part = program.values[of];
      if (free[of]) {
        for (Value& slice : program.values) {
          if (slice.root == of) slice.begin += begin, slice.root = step.to;
        }
        free[of] = 0;
      }
      begin += part.width;
    }
  }
}

// Gives every value its place. What is not needed any more makes room, also for the result of the same function.
void place_values(Program& program) {
  std::vector<Value>& values = program.values;
  std::vector<int64_t> last(values.size(), -1);  // the step that uses a root last
  for (size_t i = 0; i < program.steps.size(); i++) {
    for (const int64_t of : program.steps[i].of) last[values[of].root] = static_cast<int64_t>(i);
  }
  const auto placed = [&](int64_t root) { return values[root].in != In::memory; };
  const auto unused = [&](const Step& step) {
    return last[values[step.to].root] < 0 && !placed(values[step.to].root);
  };
  program.steps.erase(std::remove_if(program.steps.begin(), program.steps.end(), unused), program.steps.end());
  std::fill(last.begin(), last.end(), -1);
  for (size_t i = 0; i < program.steps.size(); i++) {
    for (const int64_t of : program.steps[i].of) last[values[of].root] = static_cast<int64_t>(i);
    last[values[program.steps[i].to].root] = static_cast<int64_t>(i);
  }
  const auto size = [&](const Value& one) {
    return (one.width * (one.half ? 2 : 4) * (one.same ? 1 : program.tile) + 63) / 64 * 64;
  };
  std::unordered_map<int64_t, std::vector<int64_t>> free;  // places by their size
  std::vector<char> given(values.size(), 0);
  const auto give = [&](int64_t root) {
    Value& one = values[root];
    if (placed(root) || given[root]) return;
    given[root] = 1;
    std::vector<int64_t>& left = free[size(one)];
    one.place = left.empty() ? program.bytes : left.back();
    if (left.empty()) {
      program.bytes += size(one);
    } else {
      left.pop_back();
    }
  };
  for (const auto& [value, number] : program.constants) give(value);
  for (size_t i = 0; i < program.steps.size(); i++) {
    const Step& step = program.steps[i];
    const Value& to = values[step.to];
    std::vector<int64_t> dead;
    for (const int64_t of : step.of) {
      const int64_t root = values[of].root;
      const bool ends = last[root] == static_cast<int64_t>(i) && !placed(root) && !values[root].same;
      if (ends && root != to.root && std::find(dead.begin(), dead.end(), root) == dead.end()) dead.push_back(root);
    }
    // In place only where the result lies exactly over its operand: not over one of which it reads some columns.
    const bool over = step.loop != nullptr && dead.size() == 1 && to.root == step.to && !given[step.to] &&
        values[dead[0]].half == to.half && values[dead[0]].width == to.width &&
        std::all_of(step.of.begin(), step.of.end(), [&](int64_t of) {
          return of == dead[0] || values[of].root != dead[0];
        });
    if (!over) give(to.root);
    for (const int64_t root : dead) free[size(values[root])].push_back(values[root].place);
    give(to.root);
    const Value& root = values[to.root];
    if (last[to.root] == static_cast<int64_t>(i) && !placed(to.root)) free[size(root)].push_back(root.place);
  }
}

std::shared_ptr<const Program> parse(const std::string& text) {
  auto program = std::make_shared<Program>();
  Reader reader(text);
  for (int64_t dims = reader.integer(0, kMostDims); dims > 0; dims--) {
    program->outer.push_back(reader.integer(1, int64_t{1} << 32));
    if (program->rows > (int64_t{1} << 40) / program->outer.back()) damaged("it has too many rows");
    program->rows *= program->outer.back();
  }
  while (!reader.at(";")) {
    if (program->inputs >= kMostValues) damaged("it has too many values");
    const bool same = reader.at("same"), half = reader.half();
    const int64_t width = reader.integer(1, kMostWidth), number = program->inputs++;
    program->values.push_back({width, half, number, 0, same, In::input, number});
  }
  while (!reader.at("->")) {
    read_statement(reader, *program);
    if (!reader.at(";")) damaged("a statement does not end");
  }
  while (!reader.done()) {
    const auto dims = static_cast<int64_t>(program->outer.size());
    Output output{reader.integer(0, static_cast<int64_t>(program->values.size()) - 1), {}};
    Value& value = program->values[output.value];
    if (value.in != In::memory || value.same || value.root != output.value) damaged("what it returns is no new value");
    value.in = In::output;
    value.place = static_cast<int64_t>(program->outputs.size());
    output.strides.assign(dims + 1, 0);
    output.strides[dims] = 1;
    int64_t stride = value.width;
    for (int64_t i = 0; i < dims; i++) {
      const int64_t dim = reader.integer(0, dims - 1);
      if (output.strides[dim] != 0) damaged("an output has a dimension twice");
      output.strides[dim] = stride;
      stride *= program->outer[dim];
    }
    program->outputs.push_back(std::move(output));
  }
  if (program->outputs.empty()) damaged("it returns nothing");
  for (const Value& value : program->values) program->widest = std::max(program->widest, value.width);
  program->tile = std::min(std::max<int64_t>(1, kTile / program->widest), program->rows);
  join_parts(*program);
  place_values(*program);
  return program;
}

// Elements from one row of an input or output to the next in each outer dimension.
using Strides = std::vector<int64_t>;

// A program for inputs of certain strides.
class Plan : public Planned {
 public:
  // Merges outer dimensions that every operand goes through evenly: the last one that is left is the longest run of
  // rows that lie evenly.
  Plan(std::shared_ptr<const Program> program, std::vector<Strides> inputs)
      : kept_(std::move(program)), program_(*kept_), operands_(std::move(inputs)) {
    for (const Output& output : program_.outputs) {
      operands_.emplace_back(output.strides.begin(), output.strides.end() - 1);
    }
    for (size_t d = 0; d < program_.outer.size(); d++) {
      if (program_.outer[d] == 1) continue;
      const auto even = [&](const Strides& one) { return one[dims_.back()] == one[d] * program_.outer[d]; };
      if (!dims_.empty() && std::all_of(operands_.begin(), operands_.end(), even)) {
        sizes_.back() *= program_.outer[d];
        dims_.back() = d;
      } else {
        sizes_.push_back(program_.outer[d]);
        dims_.push_back(d);
      }
    }
    for (const size_t d : dims_) {
      for (size_t i = 0; i < operands_.size(); i++) moves_.push_back(operands_[i][d] * itemsize(i));
    }
    for (const auto& [value, number] : program_.constants) {
      constants_.emplace_back(program_.values[value].place, number);
    }
    for (const Step& step : program_.steps) add(step);
    data_.resize(operands_.size());
  }

  const Program& program() const { return program_; }

  // `data`: of the inputs, then of the outputs.
  void point(char* const* data) override { std::copy_n(data, data_.size(), data_.begin()); }

  void run() override {
    const int64_t work = program_.widest * static_cast<int64_t>(program_.steps.size() + 1);
    const int64_t grain = std::max<int64_t>(1, kShared / work);
    if (program_.rows <= grain) {
      rows(0, program_.rows);
      return;
    }
    parallel_for(0, program_.rows, grain, [&](int64_t begin, int64_t end) { rows(begin, end); });
  }

 private:
  // Where a value's first row of a tile is: in the thread's memory (0) or in operand number `base` - 1.
  struct Place {
    int64_t base, offset;  // bytes
    int64_t step;          // elements from one row to the next
    bool half, single;
    Rows rows(char* const* at) const { return {at[base] + offset, step, half, single}; }
  };

  // A call of a loop; without one, `n` bytes of each row are copied. All that a step needs lies together: the weights
  // push it out of the caches before the next one.
  struct Action {
    Loop loop;
    Place to, first, second;
    int64_t n;
    bool dense;  // the rows of all operands are one
  };

  Place place(int64_t value) const {
    const Value& one = program_.values[value];
    const Value& root = program_.values[one.root];
    const int64_t skipped = one.begin * (one.half ? 2 : 4);
    if (root.in == In::memory) return {0, root.place + skipped, root.same ? 0 : root.width, one.half, false};
    const int64_t operand = root.place + (root.in == In::output ? program_.inputs : 0);
    return {operand + 1, skipped, dims_.empty() ? 0 : operands_[operand][dims_.back()], one.half, false};
  }

  void add(const Step& step) {
    const Place to = place(step.to);
    if (step.loop == nullptr) {
      const int64_t itemsize = program_.values[step.to].half ? 2 : 4;
      int64_t begin = 0;
      for (const int64_t part : step.of) {
        Place from = place(part), there = to;
        const int64_t bytes = program_.values[part].width * itemsize;
        there.offset += begin;
        begin += bytes;
        if (from.base == there.base && from.offset == there.offset) continue;  // it was made there
        from.step *= itemsize;
        there.step *= itemsize;
        actions_.push_back({nullptr, there, from, from, bytes, false});
      }
      return;
    }
    Place first = place(step.of[0]), second = place(step.of.back());
    const int64_t n = program_.values[step.reduces ? step.of[0] : step.to].width;
    first.single = program_.values[step.of[0]].width < n;
    second.single = program_.values[step.of.back()].width < n;
    const auto whole = [&](const Place& rows, int64_t value) {
      return rows.step == n && program_.values[value].width == n;
    };
    const bool dense = !step.reduces && to.step == n && whole(first, step.of[0]) && whole(second, step.of.back());
    actions_.push_back({step.loop, to, first, second, n, dense});
  }

  int64_t itemsize(size_t operand) const {
    const auto inputs = static_cast<size_t>(program_.inputs);
    const int64_t value = operand < inputs ? static_cast<int64_t>(operand) : program_.outputs[operand - inputs].value;
    return program_.values[value].half ? 2 : 4;
  }

  void rows(int64_t begin, int64_t end) const {
    thread_local std::vector<char> memory;
    thread_local std::vector<char*> at;  // the places of the thread's memory, and of the operands' rows
    if (static_cast<int64_t>(memory.size()) < program_.bytes + 64) memory.resize(program_.bytes + 64);
    at.resize(operands_.size() + 1);
    at[0] = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    for (const auto& [place, number] : constants_) *reinterpret_cast<float*>(at[0] + place) = number;
    const int64_t run = sizes_.empty() ? 1 : sizes_.back();
    for (int64_t row = begin, count; row < end; row += count) {
      count = std::min({program_.tile, run - row % run, end - row});
      std::copy_n(data_.data(), operands_.size(), at.data() + 1);
      int64_t left = row;
      for (size_t d = sizes_.size(); d-- > 0; left /= sizes_[d]) {
        for (size_t i = 0; i < operands_.size(); i++) at[i + 1] += left % sizes_[d] * moves_[d * operands_.size() + i];
      }
      for (const Action& action : actions_) take(at.data(), action, count);
    }
  }

  static void take(char* const* at, const Action& action, int64_t count) {
    const Rows to = action.to.rows(at), first = action.first.rows(at);
    if (action.loop == nullptr) {
      for (int64_t r = 0; r < count; r++) {
        std::copy_n(static_cast<char*>(first.at) + r * first.step, action.n, static_cast<char*>(to.at) + r * to.step);
      }
      return;
    }
    const int64_t rows = action.dense ? 1 : count, n = action.dense ? action.n * count : action.n;
    action.loop(to, first, action.second.rows(at), rows, n);
  }

  const std::shared_ptr<const Program> kept_;
  const Program& program_;
  std::vector<Strides> operands_;  // inputs, then outputs
  std::vector<int64_t> sizes_;     // of the merged dimensions
  std::vector<size_t> dims_;       // the last outer dimension in each of them
  std::vector<int64_t> moves_;     // bytes from one row to the next in each of them, by operand
  std::vector<std::pair<int64_t, float>> constants_;  // by their place in the thread's memory
  std::vector<Action> actions_;
  std::vector<char*> data_;
};

int32_t dtype_of(const Value& value) {
  return value.half ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
}

// The strides of an input. Its own dimensions are the last ones; a dimension of one is repeated.
Strides strides_of(const Program& program, const Value& value, const Tensor& x) {
  const auto outer = static_cast<int64_t>(program.outer.size()), missing = outer + 1 - x.dim();
  bool fits = x.dtype() == dtype_of(value) && missing >= 0 && (x.dim() > 0 ? x.size(x.dim() - 1) : 1) == value.width;
  Strides found(outer, 0);
  for (int64_t d = std::max<int64_t>(missing, 0); fits && d < outer; d++) {
    const int64_t size = x.size(d - missing);
    fits = size == 1 || (size == program.outer[d] && !value.same);
    if (size != 1) found[d] = x.stride(d - missing);
  }
  if (!fits) {
    damaged(
        "an input has the shape " + text(x) + " and dtype number " + std::to_string(x.dtype()) +
        ", which does not fit rows " + text(program.outer) + " of " + std::to_string(value.width));
  }
  return found;
}

bool in_pieces(const Tensor& x) { return x.dim() > 0 && x.size(x.dim() - 1) > 1 && x.stride(x.dim() - 1) != 1; }

// Programs by their text, each parsed once.
std::shared_ptr<const Program> program_of(const std::string& text) {
  static std::mutex turn;
  static std::unordered_map<std::string, std::shared_ptr<const Program>> known;
  const std::lock_guard<std::mutex> mine(turn);
  const auto found = known.find(text);
  return found != known.end() ? found->second : known.emplace(text, parse(text)).first->second;
}

std::unique_ptr<Plan> plan_of(const std::string& text, const std::vector<Tensor>& inputs) {
  std::shared_ptr<const Program> program = program_of(text);
  if (static_cast<int64_t>(inputs.size()) != program->inputs) {
    damaged(std::to_string(inputs.size()) + " inputs, where it takes " + std::to_string(program->inputs));
  }
  std::vector<Strides> strides;
  for (size_t i = 0; i < inputs.size(); i++) strides.push_back(strides_of(*program, program->values[i], inputs[i]));
  return std::make_unique<Plan>(std::move(program), std::move(strides));
}

std::vector<Tensor> fused(std::vector<Tensor> inputs, std::string text) {
  std::vector<char*> data;
  for (Tensor& x : inputs) {
    x = in_pieces(x) ? contiguous(x) : x;
    data.push_back(static_cast<char*>(x.data_ptr()));
  }
  const std::unique_ptr<Plan> plan = plan_of(text, inputs);
  std::vector<Tensor> results;
  for (const Output& output : plan->program().outputs) {
    const Value& value = plan->program().values[output.value];
    std::vector<int64_t> sizes = plan->program().outer;
    sizes.push_back(value.width);
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        static_cast<int64_t>(sizes.size()), sizes.data(), output.strides.data(), dtype_of(value),
        aoti_torch_device_type_cpu(), 0, &handle));
    data.push_back(static_cast<char*>(results.emplace_back(handle).data_ptr()));
  }
  plan->point(data.data());
  plan->run();
  return results;
}

std::unique_ptr<Planned> plan_fused(const PlannedArgument* arguments) {
  const std::vector<Tensor> inputs = tensors_of(arguments[0]);
  return std::any_of(inputs.begin(), inputs.end(), in_pieces) ? nullptr : plan_of(arguments[1].text, inputs);
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) { m.def("fused(Tensor[] inputs, str program) -> Tensor[]"); }

NXD_IMPL(CPU, m) { m.impl("fused", TORCH_BOX(&nxd::fused)); }

NXD_PLAN(fused, nxd::plan_fused);
