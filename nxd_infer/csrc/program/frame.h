// How a program runs again on tensors that lie like those of an earlier run, as those of a bucket always do: results
// have their places in one piece of memory, planned by when they are used; views are made once; and operators that can
// be planned (../planned.h) are called without torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "../planned.h"

namespace nxd {

struct Step;
using Table = std::vector<c10::IValue>;

// How a tensor lies.
struct Seen {
  c10::DimVector sizes, strides;
  int64_t offset;  // elements from the beginning of its memory
  c10::ScalarType dtype;
  int64_t memory;  // a number: tensors that share memory have the same
  size_t bytes;    // of that memory
  bool plain;      // only this and its memory tell what it is

  Seen(const at::Tensor& x, int64_t memory);
  bool like(const at::Tensor& x) const;  // but for where its memory is
};

// The values of a run: for each a tensor, several, or none.
class Record {
 public:
  explicit Record(const Table& placeholders);
  // The result of the next step, while the table has its arguments.
  void see(const Step& step, const Table& table, const c10::IValue& result);

  std::vector<std::vector<Seen>> values;
  std::vector<bool> single;  // it is a tensor, not a list of one

 private:
  int64_t memories_ = 0;
};

// A piece of memory for the results of one run at a time; programs share it.
class Scratch {
 public:
  Scratch() = default;
  Scratch(size_t bytes, const void* preferred);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return memory_.get(); }

 private:
  c10::DataPtr memory_;
  size_t bytes_ = 0;
};

class Frame {
 public:
  Frame(
      const std::deque<Step>& steps, const std::vector<int64_t>& outputs, const Record& record,
      const Table& placeholders);

  // Whether placeholder number `i` may be this tensor, which it then is. `held`: it is never changed but by another
  // tensor in its place.
  bool take(size_t i, const at::Tensor& x, bool held);
  // After all placeholders were taken.
  std::vector<at::Tensor> run();

 private:
  struct View {
    int64_t value, from, skipped;  // elements
  };
  struct Dropping {
    void (*drop)(void*);
    void operator()(void* plan) const { drop(plan); }
  };
  struct Part {  // a step that has something to do
    const Step* step;
    int64_t number, value;
    std::vector<int64_t> dead;  // values whose last use this is, but for those that stay
    const PlannedFunctions* functions = nullptr;
    std::unique_ptr<void, Dropping> plan{nullptr, Dropping{nullptr}};
    std::vector<int64_t> operands;   // values
    std::vector<at::Tensor> results;  // of one that is planned
    bool moving = false;             // an operand is made anew in each run
    std::vector<Seen> lies;          // the operands
  };

  bool plan(Part& part, const Record& record);
  void point(const Part& part) const;
  void refresh();
  void run_part(const Part& part);

  const std::vector<int64_t> outputs_;
  std::vector<Seen> placeholders_;
  std::vector<const void*> data_;  // of the placeholders
  Table table_;
  std::vector<View> views_;
  std::vector<Part> parts_;
  size_t bytes_ = 0;
  c10::Storage memory_;  // of a Scratch, in a run
  bool stale_ = true;    // plans do not know where tensors lie
};

} // namespace nxd
