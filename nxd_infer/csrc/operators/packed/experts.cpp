// packed_experts: rows times packed matrices (packed.h) of which each row has its own. Rows of one expert are multiplied
// together, as in packed_linears; the matrices of experts without rows are not read.
#include "packed/packed.h"
#include "packed/left.h"
#include "packed/product.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

thread_local Scratch gathered_scratch;

// Rows of one expert, at most as many as stay in a cache.
struct Group {
  int64_t expert;
  const int64_t* rows;
  int64_t count;
};

// The rows by expert, each expert's in their order; rows whose expert does not exist are in no group.
struct Groups {
  std::vector<int64_t> rows;
  std::vector<Group> all;
  int64_t largest = 0;

  Groups(const int64_t* experts, int64_t N, int64_t E, int64_t most) {
    std::vector<int64_t> ends(E + 1, 0);  // first of the rows before an expert, then of those up to it
    const auto exists = [&](int64_t row) { return experts[row] >= 0 && experts[row] < E; };
    for (int64_t row = 0; row < N; row++) {
      if (exists(row)) ends[experts[row] + 1]++;
    }
    for (int64_t expert = 0; expert < E; expert++) ends[expert + 1] += ends[expert];
    rows.resize(ends[E]);
    for (int64_t row = 0; row < N; row++) {
      if (exists(row)) rows[ends[experts[row]]++] = row;
    }
    for (int64_t expert = 0, first = 0; expert < E; first = ends[expert++]) {
      while (first < ends[expert]) {
        const int64_t count = std::min(most, ends[expert] - first);
        all.push_back(Group{expert, rows.data() + first, count});
        largest = std::max(largest, count);
        first += count;
      }
    }
  }
};

template <typename T, typename W>
struct Experts {
  const T* x;
  const W* weight;
  const int64_t* experts;
  T* y;
  int64_t N, E, O, K;

  const W* matrix(int64_t expert) const { return weight + expert * O * row_size<W>(K); }
};

// The left side of a group, in this thread's memory.
template <typename P, typename T>
Left arranged(const Kernel<P>& kernel, const T* x, const Group& group, int64_t K) {
  if (group.count == 1) return left_side(kernel, x + group.rows[0] * K, 1, K);
  T* gathered = gathered_scratch.take<T>(group.count * K);
  for (int64_t i = 0; i < group.count; i++) std::memcpy(gathered + i * K, x + group.rows[i] * K, K * sizeof(T));
  return left_side(kernel, gathered, group.count, K);
}

// Threads share the blocks of all groups, as if their matrices were stacked. A thread arranges the rows of a group
// whose blocks it takes: most groups have one thread, or two.
template <typename P, typename T, typename W>
void multiply(const Kernel<P>& kernel, const Experts<T, W>& of, const Groups& groups) {
  const int64_t blocks = (of.O + kColumns - 1) / kColumns, items = blocks * static_cast<int64_t>(groups.all.size());
  const int64_t tiles = 1 + static_cast<int64_t>(groups.rows.size() / groups.all.size()) / 16;
  const int64_t work = kColumns * of.K * static_cast<int64_t>(sizeof(W)) * tiles;
  const int64_t grain = std::max<int64_t>(1, kSmallWork / std::max<int64_t>(1, work));
  const int64_t workers = std::clamp<int64_t>(items / grain, 1, thread_count());
  Stretches stretches(items, workers);
  work_together(workers, [&](int64_t worker) {
    float* sums = sums_scratch.take<float>(round_up(groups.largest, 32) * kColumns);
    const Group* known = nullptr;
    Left left{};
    kernel.begin();
    stretches.work(worker, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; item++) {
        const Group& group = groups.all[item / blocks];
        if (known != &group) left = arranged(kernel, of.x, group, of.K);
        known = &group;
        Panels<P, W> panels(of.matrix(group.expert), of.O, of.K, kernel.step);
        const int64_t block = item % blocks, width = panels.multiply(kernel, left, block, sums);
        for (int64_t i = 0; i < group.count; i++) {
          T* y = of.y + group.rows[i] * of.O + block * kColumns;
          store(sums + i * kColumns, 1, width, static_cast<const T*>(nullptr), y, of.O);
        }
      }
    });
    kernel.end();
  });
}

template <typename T, typename W>
void run(const Experts<T, W>& of, const Kernel<T>& kernel) {
  const int64_t most = std::max<int64_t>(32, kLeftBytes / std::max<int64_t>(1, of.K * 4) / 32 * 32);
  const Groups groups(of.experts, of.N, of.E, most);
  if (groups.rows.size() < static_cast<size_t>(of.N)) std::fill(of.y, of.y + of.N * of.O, T{});
  if (groups.all.empty()) return;
  if constexpr (std::is_same_v<W, int8_t>) {
    const Kernel<int8_t>& narrow = int8_kernel<T>();
    // With more sets of rows every block would be widened more often.
    const auto few = 2 * narrow.width * static_cast<int64_t>(groups.all.size());
    if (static_cast<int64_t>(groups.rows.size()) <= few) return multiply(narrow, of, groups);
  }
  multiply(kernel, of, groups);
}

// --- the operator ---

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("nxd: packed_experts: " + what); }

// Throws for what does not fit; reads no values.
void check(const Tensor& x, const Tensor& weight, const Tensor& experts) {
  const bool int8 = weight.dtype() == aoti_torch_dtype_int8();
  if (x.dim() != 2 || (x.dtype() != aoti_torch_dtype_float32() && x.dtype() != aoti_torch_dtype_bfloat16())) {
    refuse("the rows are float32 or bfloat16 of shape [N, K], got " + text(x));
  }
  const int64_t K = x.size(1);
  if (weight.dim() != 3 || !weight.is_contiguous() || weight.size(2) != (int8 ? row_size<int8_t>(K) : K) ||
      (!int8 && weight.dtype() != x.dtype())) {
    refuse("the rows " + text(x) + " do not fit the packed weight " + text(weight));
  }
  if (experts.dim() != 1 || experts.size(0) != x.size(0) || experts.dtype() != aoti_torch_dtype_int64()) {
    refuse("the experts of the rows " + text(x) + " are int64 [N], got " + text(experts));
  }
}

template <typename T, typename W>
class PlannedExperts : public Planned {
 public:
  explicit PlannedExperts(const Experts<T, W>& of, const Kernel<T>& kernel) : of_(of), kernel_(kernel) {}

  void point(char* const* data) override {
    of_.x = reinterpret_cast<const T*>(data[0]);
    of_.weight = reinterpret_cast<const W*>(data[1]);
    of_.experts = reinterpret_cast<const int64_t*>(data[2]);
    of_.y = reinterpret_cast<T*>(data[3]);
  }
  void run() override { nxd::run(of_, kernel_); }

 private:
  Experts<T, W> of_;
  const Kernel<T>& kernel_;
};

template <typename T>
std::unique_ptr<Planned> planned(const Tensor& x, const Tensor& weight, const Kernel<T>& kernel) {
  const int64_t N = x.size(0), K = x.size(1), E = weight.size(0), O = weight.size(1);
  if (weight.dtype() == aoti_torch_dtype_int8()) {
    return std::make_unique<PlannedExperts<T, int8_t>>(Experts<T, int8_t>{nullptr, nullptr, nullptr, nullptr, N, E, O, K}, kernel);
  }
  return std::make_unique<PlannedExperts<T, T>>(Experts<T, T>{nullptr, nullptr, nullptr, nullptr, N, E, O, K}, kernel);
}

std::unique_ptr<Planned> planned(const Tensor& x, const Tensor& weight) {
  if (x.dtype() == aoti_torch_dtype_float32()) return planned(x, weight, float_kernel());
  return planned(x, weight, bfloat16_kernel());
}

Tensor packed_experts(Tensor x_in, Tensor weight, Tensor experts_in) {
  check(x_in, weight, experts_in);
  const Tensor x = contiguous(x_in), experts = contiguous(experts_in);
  Tensor y = new_like(x, {x.size(0), weight.size(1)});
  const std::unique_ptr<Planned> plan = planned(x, weight);
  char* const data[] = {
      static_cast<char*>(x.data_ptr()), static_cast<char*>(weight.data_ptr()), static_cast<char*>(experts.data_ptr()),
      static_cast<char*>(y.data_ptr())};
  plan->point(data);
  plan->run();
  return y;
}

std::unique_ptr<Planned> plan_experts(const PlannedArgument* arguments) {
  const Tensor x = tensor_of(arguments[0]), weight = tensor_of(arguments[1]), experts = tensor_of(arguments[2]);
  check(x, weight, experts);
  if (!x.is_contiguous() || !experts.is_contiguous()) return nullptr;
  return planned(x, weight);
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) { m.def("packed_experts(Tensor x, Tensor weight, Tensor experts) -> Tensor"); }

NXD_IMPL(CPU, m) { m.impl("packed_experts", TORCH_BOX(&nxd::packed_experts)); }

NXD_PLAN(packed_experts, nxd::plan_experts);
