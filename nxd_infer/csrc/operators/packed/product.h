// The product of rows and packed weights (packed.h), for any storage type of the weights: prepares blocks for a kernel,
// shares them among threads, and rounds the results. Included by the operators' files, each with its own memory.
#pragma once

#include "packed/packed.h"
#include "packed/int8.h"
#include "packed/left.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace nxd {
namespace {

constexpr int64_t kLeftBytes = 3 << 19;   // of the left side at a time: it is read once per panel, from L2
constexpr int64_t kSmallWork = 32 << 10;  // bytes of weights below which another thread does not pay off

// --- the weight ---

// Copies values [from, K) of a block into one `filled` columns wide, zero-padded to `padded` values of k.
template <typename T>
void fill_up(const T* block, int64_t width, int64_t K, int64_t from, int64_t padded, int64_t filled, T* to) {
  std::fill(to, to + (padded - from) * filled, T{});
  for (int64_t k = from; k < K; k++) {
    for (int64_t c = 0; c < width; c++) to[place<T>(k - from, c, filled, padded - from)] = block[place<T>(k, c, width, K)];
  }
}

// Values from one row of the stored weight to the next.
template <typename W>
int64_t row_size(int64_t K) {
  return std::is_same_v<W, int8_t> ? K + kScaleBytes : K;
}

// Widens an int8 block to a packed block of T with `filled` columns and `padded` values of k.
[[maybe_unused]] NXD_CLONES void widen_block(
    const int8_t* q, int64_t width, int64_t K, int64_t filled, int64_t padded, float* to) {
  if (width == filled) {
    for (int64_t i = 0; i < K * width; i++) to[i] = q[i];
  } else {
    for (int64_t k = 0; k < K; k++) {
      for (int64_t c = 0; c < filled; c++) to[k * filled + c] = c < width ? q[k * width + c] : 0;
    }
  }
  std::fill(to + K * filled, to + padded * filled, 0.0f);
}

[[maybe_unused]] NXD_CLONES void widen_block(
    const int8_t* q, int64_t width, int64_t K, int64_t filled, int64_t padded, BFloat16* to) {
  const auto bits = [](float x) {
    uint32_t found;
    std::memcpy(&found, &x, 4);
    return found;  // the low half is zero
  };
  const auto pairs = [&](const int8_t* first, const int8_t* second, int64_t count, BFloat16* out) {
    for (int64_t c = 0; c < count; c++) {
      const uint32_t pair = bits(first[c]) >> 16 | (second == nullptr ? 0 : bits(second[c]));
      std::memcpy(out + 2 * c, &pair, 4);
    }
  };
  if (width < filled) std::fill(to, to + padded * filled, BFloat16{});
  int64_t k = 0;
  for (; k + 2 <= K; k += 2) {
    if (width == kColumns) {
      pairs(q + k * kColumns, q + (k + 1) * kColumns, kColumns, to + k * kColumns);
    } else {
      pairs(q + k * width, q + (k + 1) * width, width, to + k * filled);
    }
  }
  if (k < K) {
    pairs(q + k * width, nullptr, width, to + k * filled);
    k += 2;
  }
  if (k < padded) std::fill(to + k * filled, to + padded * filled, BFloat16{});
}

// Blocks of W as a kernel over T takes them: in place if they consist of whole vectors and groups, else a copy.
template <typename T, typename W = T>
class Panels {
 public:
  Panels(const W* weight, int64_t N, int64_t K, int64_t step)
      : weight_(weight), N_(N), K_(K), step_(step), padded_(round_up(K, step)) {
    room_ = panel_scratch.take<T>(padded_ * kColumns);
  }

  Panel<T> at(int64_t number) {
    const int64_t column = number * kColumns, whole = K_ / step_ * step_;
    const int64_t width = std::min(kColumns, N_ - column), filled = round_up(width, kLane);
    const W* block = weight_ + column * row_size<W>(K_);
    if constexpr (!std::is_same_v<T, W>) {
      widen_block(block, width, K_, filled, padded_, room_);
      return Panel<T>{room_, nullptr, filled, padded_ / step_};
    } else {
      return in_place(block, width, whole, filled);
    }
  }

 private:
  Panel<T> in_place(const T* block, int64_t width, int64_t whole, int64_t filled) {
    const bool plain = width == filled && K_ % group_of<T>() == 0;
    const int64_t from = plain ? whole : 0;
    if (from < padded_) fill_up(block, width, K_, from, padded_, filled, room_ + from * filled);
    return Panel<T>{plain ? block : room_, whole < K_ ? room_ + whole * filled : nullptr, filled, K_ / step_};
  }

  const W* weight_;
  int64_t N_, K_, step_, padded_;
  T* room_;
};

// --- the product ---

template <typename T>
NXD_INLINE void store_body(const float* sums, int64_t rows, int64_t width, const T* bias, T* y, int64_t stride) {
  for (int64_t row = 0; row < rows; row++) {
    const float* from = sums + row * kColumns;
    T* to = y + row * stride;
    if (bias == nullptr) {
      for (int64_t c = 0; c < width; c++) to[c] = narrow<T>(from[c]);
    } else {
      for (int64_t c = 0; c < width; c++) to[c] = narrow<T>(from[c] + widen(bias[c]));
    }
  }
}

#define NXD_STORE(T)                                                                                           \
  NXD_CLONES void store(const float* sums, int64_t rows, int64_t width, const T* bias, T* y, int64_t stride) { \
    if (width == kColumns) {                                                                                   \
      store_body(sums, rows, kColumns, bias, y, stride);                                                       \
    } else {                                                                                                   \
      store_body(sums, rows, width, bias, y, stride);                                                          \
    }                                                                                                          \
  }
NXD_STORE(float)
NXD_STORE(BFloat16)

// Multiplies the sums of an int8 block by the scales after it.
NXD_CLONES void scale(float* sums, int64_t rows, int64_t width, const char* scales) {
  float factors[kColumns] = {};
  std::memcpy(factors, scales, width * kScaleBytes);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t c = 0; c < kColumns; c++) sums[row * kColumns + c] *= factors[c];
  }
}

// A layer: y [M, N] = x @ weight.T + bias.
template <typename T, typename W = T>
struct Layer {
  const W* weight;
  const T* bias;  // or nullptr
  T* y;
  int64_t N;

  int64_t blocks() const { return (N + kColumns - 1) / kColumns; }
};

// Tells the crew which weights each worker reads now: it prefetches those that were read next last time.
template <typename T, typename W>
void announce(const std::vector<Layer<T, W>>& layers, int64_t blocks, int64_t workers, int64_t K) {
  const int64_t column_bytes = row_size<W>(K) * static_cast<int64_t>(sizeof(W));
  int64_t before = 0;
  for (const Layer<T, W>& layer : layers) {
    Spans* spans = begins(layer.weight);
    if (spans == nullptr) return;
    // The first column of this layer that does not belong to the workers before `worker`.
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
    if (first + rows == M) announce(layers, blocks, workers, K);
    work_together(workers, [&](int64_t worker) {
      float* sums = sums_scratch.take<float>(round_up(rows, 32) * kColumns);
      kernel.begin();
      stretches.work(worker, [&](int64_t begin, int64_t end) {
        int64_t before = 0;
        for (const Layer<T, W>& layer : layers) {
          Panels<P, W> panels(layer.weight, layer.N, K, kernel.step);
          const int64_t last = std::min(end - before, layer.blocks());
          for (int64_t block = std::max<int64_t>(0, begin - before); block < last; block++) {
            kernel.multiply(left, panels.at(block), sums);
            const int64_t column = block * kColumns, width = std::min(kColumns, layer.N - column);
            if constexpr (std::is_same_v<W, int8_t>) {
              const int8_t* values = layer.weight + column * row_size<W>(K);
              scale(sums, rows, width, reinterpret_cast<const char*>(values + width * K));
            }
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

// --- the operands of an operator ---

struct Operands {
  Tensor x;  // contiguous
  std::vector<Tensor> weights, biases, results;
  int64_t M, K;
  int32_t dtype;  // of x, the biases and the results

  template <typename T, typename W>
  std::vector<Layer<T, W>> layers() const {
    std::vector<Layer<T, W>> all;
    all.reserve(weights.size());
    for (size_t i = 0; i < weights.size(); i++) {
      all.push_back(Layer<T, W>{
          static_cast<const W*>(weights[i].data_ptr()),
          biases.empty() ? nullptr : static_cast<const T*>(biases[i].data_ptr()),
          static_cast<T*>(results[i].data_ptr()), weights[i].size(0)});
    }
    return all;
  }
};

// `layers` has the weights, followed by a bias for each if `biased`: a compiled graph cannot pass an empty list.
// `check(weight)` returns the dtype of x that it needs; `extra` columns of each weight are not values.
template <typename Check>
Operands operands(
    const char* what, const Tensor& x, const std::vector<Tensor>& layers, bool biased, int64_t extra,
    const Check& check) {
  const size_t count = biased ? layers.size() / 2 : layers.size();
  if (count == 0 || (biased && layers.size() != 2 * count)) {
    throw std::runtime_error(
        "nxd: " + std::string(what) + "s: " + std::to_string(layers.size()) + " tensors are no weights" +
        (biased ? " with a bias each" : ""));
  }
  const auto shape_text = [&](const Tensor& weight) {
    return "[" + std::to_string(weight.size(0)) + ", " + std::to_string(weight.size(1) - extra) + "]";
  };
  Operands all{contiguous(x), {}, {}, {}, 1, 0, x.dtype()};
  auto shape = shape_of(x);
  for (size_t d = 0; d + 1 < shape.size(); d++) all.M *= shape[d];
  all.weights.reserve(count);
  all.results.reserve(count);
  for (size_t i = 0; i < count; i++) {
    const Tensor& weight = layers[i];
    if (check(weight) != all.dtype || shape.empty() || shape.back() != weight.size(1) - extra) {
      throw std::runtime_error(
          "nxd: " + std::string(what) + ": the input " + text(x) + " (dtype number " + std::to_string(all.dtype) +
          ") does not fit the weight " + shape_text(weight) + " (dtype number " + std::to_string(weight.dtype()) +
          ")");
    }
    all.weights.push_back(weight);
    if (!biased) continue;
    const Tensor& bias = layers[count + i];
    if (bias.dim() != 1 || bias.size(0) != weight.size(0) || bias.dtype() != all.dtype) {
      throw std::runtime_error(
          "nxd: " + std::string(what) + ": the bias " + text(bias) + " does not fit the weight " + shape_text(weight));
    }
    all.biases.push_back(contiguous(bias));
  }
  all.K = shape.back();
  for (const Tensor& weight : all.weights) {
    shape.back() = weight.size(0);
    all.results.push_back(new_like(x, shape));
  }
  return all;
}

// A planned call: the layers and x have been checked, and lie where the last `point` said.
template <typename P, typename T, typename W>
class PlannedLinears : public Planned {
 public:
  PlannedLinears(const Kernel<P>& kernel, const Operands& all)
      : kernel_(kernel), layers_(all.layers<T, W>()), biased_(!all.biases.empty()), M_(all.M), K_(all.K) {}

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
  const T* x_ = nullptr;
};

template <typename T, typename W, typename P>
std::unique_ptr<Planned> planned(const Kernel<P>& kernel, const Operands& all) {
  return std::make_unique<PlannedLinears<P, T, W>>(kernel, all);
}

// Of the arguments of an operator for one layer (x, weight, bias) or for several (x, layers, biased): the latter's.
struct PlannedLayers {
  Tensor x;
  std::vector<Tensor> layers;
  bool biased;
  bool whole;  // nothing has to be copied first

  PlannedLayers(const PlannedArgument* arguments, bool several)
      : x(tensor_of(arguments[0])), layers(tensors_of(arguments[1])) {
    biased = several ? arguments[2].integer != 0 : arguments[2].count > 0;
    if (!several && biased) layers.push_back(tensor_of(arguments[2]));
    whole = x.numel() > 0 && x.is_contiguous();
    for (const Tensor& layer : layers) whole = whole && layer.is_contiguous();
  }
};

// The ids of rows to gather from a table of N. Throws for an id out of range.
inline std::vector<int64_t> row_numbers(const std::string& what, const Tensor& ids, int64_t N) {
  const bool wide = ids.dtype() == aoti_torch_dtype_int64();
  if (!wide && ids.dtype() != aoti_torch_dtype_int32()) {
    throw std::runtime_error("nxd: " + what + ": the ids must be int64 or int32");
  }
  std::vector<int64_t> rows(ids.numel());
  for (size_t i = 0; i < rows.size(); i++) {
    rows[i] = wide ? static_cast<const int64_t*>(ids.data_ptr())[i] : static_cast<const int32_t*>(ids.data_ptr())[i];
    if (rows[i] < 0 || rows[i] >= N) {
      throw std::runtime_error(
          "nxd: " + what + ": index " + std::to_string(rows[i]) + " is out of range for a table of " +
          std::to_string(N) + " rows");
    }
  }
  return rows;
}

} // namespace
} // namespace nxd
