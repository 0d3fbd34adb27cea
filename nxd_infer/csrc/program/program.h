// A graph as a list of steps over a table of values, run without Python: operators are found once, arguments that are
// constants are converted once, and a value is dropped after its last use.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "frame.h"

namespace nxd {

class Program;

// An argument of a step: a constant, a value of the table, or a list of values (-1: None).
struct Argument {
  c10::IValue constant;
  int64_t value = -1;
  std::vector<int64_t> values;
  enum { kConstant, kValue, kTensors, kOptionalTensors } kind = kConstant;
  bool tensor = false;  // it must be a tensor: a number becomes a new one at each call
};

struct Step {
  std::optional<c10::OperatorHandle> op;  // of an operator
  bool plain = false;                     // an operator that needs nothing of autograd
  int64_t index = 0;                      // of a getitem, which has no operator and one argument
  c10::intrusive_ptr<Program> branches[2];  // of a cond: if true, if false
  std::vector<Argument> arguments;
  std::vector<int64_t> dead;  // values whose last use this is
};

// Calls step number `number` by torch's dispatcher.
c10::IValue call(const Step& step, int64_t number, const Table& table);

// Held by one user of what it guards at a time; others do without.
class Turn {
 public:
  explicit Turn(std::atomic_flag& taken) : own(!taken.test_and_set(std::memory_order_acquire)), taken_(taken) {}
  ~Turn() {
    if (own) taken_.clear(std::memory_order_release);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  const bool own;

 private:
  std::atomic_flag& taken_;
};

// Values are numbered: the placeholders, then one for each step. Steps are added in order, then `finish` is called.
class Program : public torch::CustomClassHolder {
 public:
  explicit Program(int64_t placeholders);

  // An argument is described by a kind and what belongs to it: 0 and a constant, 1 and a value's number, 2 and a list of
  // numbers (None: an empty one), 3: the operator's default.
  void add_operator(
      const std::string& name, const std::string& overload, const std::vector<int64_t>& kinds,
      const std::vector<c10::IValue>& arguments);
  void add_getitem(int64_t value, int64_t index);
  void add_cond(
      int64_t condition, const c10::intrusive_ptr<Program>& if_true, const c10::intrusive_ptr<Program>& if_false,
      const std::vector<int64_t>& operands);
  void finish(const std::vector<int64_t>& outputs);

  // Sets the first and the last placeholders, for all later runs.
  void hold(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& last);
  // Runs on the other placeholders; several threads may run at once, and an operator may run its own program.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& values);

 private:
  int64_t defined(int64_t value) const;
  void forget();
  std::vector<at::Tensor> run_anew(const Table& placeholders, bool framing);

  int64_t placeholders_;
  bool finished_ = false;
  bool steady_ = true;  // a frame may be made
  std::deque<Step> steps_;
  std::vector<int64_t> outputs_;
  std::mutex holding_;
  std::vector<at::Tensor> first_, last_;
  std::atomic_flag framing_ = ATOMIC_FLAG_INIT;  // a run uses what follows
  std::unique_ptr<Frame> frame_;
  std::atomic<int64_t> tries_{0};  // frames that were made since a run could use one
  std::atomic<bool> forget_{false};
};

} // namespace nxd
