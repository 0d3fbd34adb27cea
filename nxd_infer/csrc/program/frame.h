// How a program runs again on tensors that lie like those of an earlier run, as those of a bucket always do: results
// have their places in one piece of memory, planned by when they are used; views are made once; and operators that can
// be planned (../operators/interface/planned.h) are called without torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "planned.h"

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

// Memory for the results of runs, which all frames of the process share: a piece for each run that is going on.
class Pool {
 public:
  using Piece = std::pair<c10::DataPtr, size_t>;  // and its size
  static std::shared_ptr<Pool> shared();
  // The piece at `preferred` if it is free and large enough.
  Piece take(size_t bytes, const void* preferred);
  void give(Piece piece);

 private:
  std::mutex mutex_;
  std::vector<Piece> free_;
};

class Frame {
 public:
  Frame(
      const std::deque<Step>& steps, const std::vector<int64_t>& outputs, const Record& record,
      const Table& placeholders);

  // Whether placeholder number `i` may be this tensor, which it then is. `held`: it is never changed but by another
  // tensor in its place.
  bool take(size_t i, const at::Tensor& x, bool held);
  // After all placeholders were taken. If a value lies otherwise than in the first run, this run goes on without the
  // frame, which is then no longer `good`.
  std::vector<at::Tensor> run();
  bool good() const { return good_; }

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
  bool run_part(const Part& part);
  std::vector<at::Tensor> run_without(int64_t from);

  const std::deque<Step>& steps_;
  const std::vector<int64_t> outputs_;
  std::vector<Seen> placeholders_;
  std::vector<bool> stays_;        // values that have a tensor of their own for all runs
  std::vector<const void*> data_;  // of the placeholders
  Table table_;
  std::vector<View> views_;
  std::vector<Part> parts_;
  size_t bytes_ = 0;
  const std::shared_ptr<Pool> pool_ = Pool::shared();
  c10::Storage memory_;  // a piece of the pool's in a run; between runs, that of the last one
  bool stale_ = true;    // views and plans are of tensors that lie elsewhere
  bool good_ = true;
};

} // namespace nxd
