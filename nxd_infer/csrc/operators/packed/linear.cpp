// packed_linears: layers of one x over packed weights (packed.h), plain, or of eight or four bits. Shares their blocks among
// threads.
#include "packed/packed.h"
#include "packed/left.h"
#include "packed/nibble_panels.h"
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
#include <type_traits>
#include <utility>
#include <vector>

namespace nxd {
namespace {

// A layer: y [M, N] = x @ weight.T + bias.
template <typename T, typename W = T>
struct Layer {
  const W* weight;
  const T* bias;  // or nullptr
  T* y;
  int64_t N;
  int64_t row;      // values from one row of the stored weight to the next
  NibbleForm form;  // of one of four bits

  int64_t blocks() const { return (N + kColumns - 1) / kColumns; }
};

// Tells the crew which weights each worker reads now: it prefetches those that were read next last time.
template <typename T, typename W>
void announce(const std::vector<Layer<T, W>>& layers, int64_t blocks, int64_t workers) {
  int64_t before = 0;
  for (const Layer<T, W>& layer : layers) {
    Spans* spans = begins(layer.weight);
    if (spans == nullptr) return;
    // The first column of this layer that does not belong to the workers before `worker`.
    const int64_t column_bytes = layer.row * static_cast<int64_t>(sizeof(W));
    const auto column = [&](int64_t worker) {
      const int64_t block = blocks * std::min(worker, workers) / workers - before;
      return std::clamp<int64_t>(block * kColumns, 0, layer.N);
    };
    for (int64_t worker = 0; worker < crew_size(); worker++) {
      const int64_t first = column(worker), bytes = (column(worker + 1) - first) * column_bytes;
      spans->of[worker].set(reinterpret_cast<const char*>(layer.weight) + first * column_bytes, bytes);
    }
    before += layer.blocks();
  }
}

// Layers of one x, as if their weights were stacked: threads start and synchronise once for all of them.
template <typename P, typename T, typename W>
void multiply(const Kernel<P>& kernel, const T* x, const std::vector<Layer<T, W>>& layers, int64_t M, int64_t K) {
  int64_t blocks = 0;
  for (const Layer<T, W>& layer : layers) blocks += layer.blocks();
  const int64_t row_bytes = round_up(K, kernel.step) * static_cast<int64_t>(kernel.widened ? 4 : sizeof(T));
  const int64_t parts = std::max<int64_t>(1, (M * row_bytes + kLeftBytes - 1) / kLeftBytes);
  const int64_t chunk = round_up((M + parts - 1) / parts, 32);
  for (int64_t first = 0; first < M; first += chunk) {
    const int64_t rows = std::min(chunk, M - first);
    const Left left = left_side(kernel, x + first * K, rows, K);
    const int64_t work = kColumns * K * static_cast<int64_t>(sizeof(W)) * ((rows + 15) / 16);
    const int64_t grain = std::max<int64_t>(1, kSmallWork / std::max<int64_t>(1, work));
    const int64_t workers = std::clamp<int64_t>(blocks / grain, 1, thread_count());
    Stretches stretches(blocks, workers);
    if (first + rows == M) announce(layers, blocks, workers);
    work_together(workers, [&](int64_t worker) {
      float* sums = sums_scratch.take<float>(round_up(rows, 32) * kColumns);
      kernel.begin();
      stretches.work(worker, [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (const Layer<T, W>& layer : layers) {
          Panels<P, W> panels(layer.weight, layer.N, K, kernel.step, layer.form);
          const int64_t last = std::min(end - before, layer.blocks());
          for (int64_t block = std::max<int64_t>(0, begin - before); block < last; block++) {
            const int64_t column = block * kColumns, width = panels.multiply(kernel, left, block, sums);
            store(
                sums, rows, width, layer.bias == nullptr ? nullptr : layer.bias + column,
                layer.y + first * layer.N + column, layer.N);
          }
          before += layer.blocks();
        }
      });
      kernel.end();
    });
  }
}

// --- the operator ---

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("nxd: packed_linears: " + what); }

std::string typed(const Tensor& x) { return text(x) + " (dtype number " + std::to_string(x.dtype()) + ")"; }

struct Operands {
  Tensor x;  // contiguous
  std::vector<Tensor> weights, biases, results;
  int64_t M, K;
  int32_t stored;  // dtype of the weights: that of x, int8, or uint8 for four bits

  // `layers` has the weights, followed by a bias for each if `biased`.
  Operands(const Tensor& x_in, const std::vector<Tensor>& layers, bool biased)
      : x(contiguous(x_in)), M(1), stored(x.dtype()) {
    const int32_t dtype = x.dtype();
    if ((dtype != aoti_torch_dtype_float32() && dtype != aoti_torch_dtype_bfloat16()) || x.dim() == 0) {
      refuse("the input is float32 or bfloat16 of shape [.., K], got " + typed(x));
    }
    const size_t count = biased ? layers.size() / 2 : layers.size();
    if (count == 0 || (biased && layers.size() != 2 * count)) {
      refuse(std::to_string(layers.size()) + " tensors are no weights" + (biased ? " with a bias each" : ""));
    }
    auto shape = shape_of(x);
    for (size_t d = 0; d + 1 < shape.size(); d++) M *= shape[d];
    K = shape.back();
    const int32_t first = layers[0].dtype();
    if (first == aoti_torch_dtype_int8() || first == aoti_torch_dtype_uint8()) stored = first;
    for (size_t i = 0; i < count; i++) {
      const Tensor& weight = layers[i];
      const bool fits = weight.dtype() == stored && weight.is_contiguous() &&
          (four() ? weight.dim() == 3 && form(weight).valid() && weight.size(1) == form(weight).groups(K)
                  : weight.dim() == 2 && weight.size(1) == (eight() ? row_size<int8_t>(K) : K));
      if (!fits) refuse("the input " + typed(x) + " does not fit the packed weight " + typed(weight));
      weights.push_back(weight);
      shape.back() = weight.size(0);
      results.push_back(new_like(x, shape));
      if (!biased) continue;
      const Tensor& bias = layers[count + i];
      if (bias.dim() != 1 || bias.size(0) != weight.size(0) || bias.dtype() != dtype) {
        refuse("the bias " + typed(bias) + " does not fit the input " + typed(x) + " and the weight " + typed(weight));
      }
      biases.push_back(contiguous(bias));
    }
  }

  bool eight() const { return stored == aoti_torch_dtype_int8(); }
  bool four() const { return stored == aoti_torch_dtype_uint8(); }
  NibbleForm form(const Tensor& weight) const { return NibbleForm{four() ? weight.size(2) : 0}; }

  template <typename T, typename W>
  std::vector<Layer<T, W>> layers() const {
    std::vector<Layer<T, W>> all;
    for (size_t i = 0; i < weights.size(); i++) {
      all.push_back(Layer<T, W>{
          static_cast<const W*>(weights[i].data_ptr()),
          biases.empty() ? nullptr : static_cast<const T*>(biases[i].data_ptr()),
          static_cast<T*>(results[i].data_ptr()), weights[i].size(0), weights[i].size(1) * (four() ? weights[i].size(2) : 1),
          form(weights[i])});
    }
    return all;
  }
};

// P: what the kernel reads; W: what is stored.
template <typename P, typename T, typename W>
class PlannedLinears : public Planned {
 public:
  PlannedLinears(const Kernel<P>& kernel, const Operands& all)
      : kernel_(kernel), layers_(all.layers<T, W>()), biased_(!all.biases.empty()), M_(all.M), K_(all.K),
        x_(static_cast<const T*>(all.x.data_ptr())) {}

  void point(char* const* data) override {
    const size_t count = layers_.size();
    x_ = reinterpret_cast<const T*>(data[0]);
    char* const* biases = data + 1 + count;
    char* const* results = biased_ ? biases + count : biases;
    for (size_t i = 0; i < count; i++) {
      layers_[i].weight = reinterpret_cast<const W*>(data[1 + i]);
      if (biased_) layers_[i].bias = reinterpret_cast<const T*>(biases[i]);
      layers_[i].y = reinterpret_cast<T*>(results[i]);
    }
  }
  void run() override { multiply(kernel_, x_, layers_, M_, K_); }

 private:
  const Kernel<P>& kernel_;
  std::vector<Layer<T, W>> layers_;
  const bool biased_;
  const int64_t M_, K_;
  const T* x_;
};

template <typename T>
std::unique_ptr<Planned> planned(const Operands& all, const Kernel<T>& kernel) {
  if (all.four()) return std::make_unique<PlannedLinears<Nibbles, T, Nibbles>>(nibble_kernel(), all);
  if (!all.eight()) return std::make_unique<PlannedLinears<T, T, T>>(kernel, all);
  const Kernel<int8_t>& narrow = int8_kernel<T>();
  // With more groups of rows every block would be widened more often.
  if (all.M > 2 * narrow.width) return std::make_unique<PlannedLinears<T, T, int8_t>>(kernel, all);
  return std::make_unique<PlannedLinears<int8_t, T, int8_t>>(narrow, all);
}

std::unique_ptr<Planned> planned(const Operands& all) {
  if (all.x.dtype() == aoti_torch_dtype_float32()) return planned(all, float_kernel());
  return planned(all, bfloat16_kernel());
}

std::vector<Tensor> packed_linears(Tensor x, std::vector<Tensor> layers, bool biased) {
  Operands all(x, layers, biased);
  if (all.M > 0) planned(all)->run();
  return std::move(all.results);
}

std::unique_ptr<Planned> plan_linears(const PlannedArgument* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  const std::vector<Tensor> layers = tensors_of(arguments[1]);
  const auto whole = [](const Tensor& one) { return one.is_contiguous(); };
  if (x.numel() == 0 || !whole(x) || !std::all_of(layers.begin(), layers.end(), whole)) return nullptr;
  return planned(Operands(x, layers, arguments[2].integer != 0));
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) { m.def("packed_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]"); }

NXD_IMPL(CPU, m) { m.impl("packed_linears", TORCH_BOX(&nxd::packed_linears)); }

NXD_PLAN(packed_linears, nxd::plan_linears);
