// Linear layers over packed weights (packed.h): the product, the gather of rows for tied embeddings, packing itself.
#include "packed.h"
#include "parallel.h"
#include "registration.h"
#include "tensors.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

constexpr int64_t kLeftBytes = 3 << 19;   // of the left side at a time: it is read once a panel, from the second cache
constexpr int64_t kSmallWork = 32 << 10;  // bytes of weights that are not worth another thread

// Memory that a thread keeps from call to call: a fresh page for every kilobyte would cost as much as the product.
struct Scratch {
  std::vector<char> bytes;
  template <typename T>
  T* take(int64_t count) {
    const size_t needed = static_cast<size_t>(count) * sizeof(T) + 64;
    if (bytes.size() < needed) bytes.resize(needed);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  }
};
thread_local Scratch left_scratch, sums_scratch, panel_scratch;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

std::string text(const Tensor& x) {
  std::string found = "[";
  for (const int64_t size : shape_of(x)) found += (found.size() > 1 ? ", " : "") + std::to_string(size);
  return found + "]";
}

// The weight of a packed operator: [N, K], contiguous. Returns its dtype.
int32_t check_weight(const Tensor& weight, const char* what) {
  const int32_t dtype = dtype_code(weight);
  if (dtype != aoti_torch_dtype_float32() && dtype != aoti_torch_dtype_bfloat16()) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": a packed weight is float32 or bfloat16, got dtype number " +
        std::to_string(dtype));
  }
  if (weight.dim() != 2 || !weight.is_contiguous()) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": a packed weight is a contiguous matrix, got shape " + text(weight));
  }
  return dtype;
}

// --- the left side ---

template <typename U, typename T>
NXD_INLINE U converted(T x) {
  if constexpr (std::is_same_v<T, U>) {
    return x;
  } else {
    return widen(x);
  }
}

template <typename U, typename T>
Left rows_of(const T* x, int64_t rows, int64_t width, int64_t K, int64_t padded) {
  if constexpr (std::is_same_v<T, U>) {
    if (rows == 1 && K == padded) return Left{x, 1, 1, padded};
  }
  constexpr int64_t unit = 4 / sizeof(U);
  const int64_t groups = (rows + width - 1) / width;
  U* data = left_scratch.take<U>(groups * width * padded);
  parallel_for(0, groups, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width * padded)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * width; row < std::min(end * width, rows); row++) {
      const T* from = x + row * K;
      U* to = data + row / width * width * padded + row % width * unit;
      for (int64_t k = 0; k < K / unit * unit; k += unit) {
        for (int64_t part = 0; part < unit; part++) to[k * width + part] = converted<U>(from[k + part]);
      }
      for (int64_t k = K / unit * unit; k < padded; k++) {
        to[k / unit * unit * width + k % unit] = k < K ? converted<U>(from[k]) : U{};
      }
    }
  });
  return Left{data, rows, width, width * padded};
}

// Tiles of 16 rows by 32 values, those of one group of rows behind one another; absent rows are zeros.
Left tiles_of(const BFloat16* x, int64_t rows, int64_t K, int64_t padded) {
  const int64_t groups = (rows + 15) / 16;
  BFloat16* data = left_scratch.take<BFloat16>(groups * 16 * padded);
  parallel_for(0, groups, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, padded)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * 16; row < end * 16; row++) {
      BFloat16* to = data + row / 16 * 16 * padded + row % 16 * 32;
      for (int64_t k = 0; k < padded; k += 32, to += 16 * 32) {
        if (row < rows && k + 32 <= K) {
          std::memcpy(to, x + row * K + k, 64);
        } else {
          std::memset(to, 0, 64);
          if (row < rows) std::memcpy(to, x + row * K + k, (K - k) * 2);
        }
      }
    }
  });
  return Left{data, rows, 16, 16 * padded};
}

// Rows of a group: groups of about the same size, none of more than `most` rows.
int64_t group_rows(int64_t rows, int64_t most) {
  const int64_t groups = (rows + most - 1) / most;
  return (rows + groups - 1) / groups;
}

template <typename T>
Left left_side(const Kernel<T>& kernel, const T* x, int64_t rows, int64_t K) {
  const int64_t padded = round_up(K, kernel.step);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (kernel.tiles) return tiles_of(x, rows, K, padded);
    if (!kernel.widened) return rows_of<BFloat16>(x, rows, group_rows(rows, kernel.width), K, padded);
  }
  return rows_of<float>(x, rows, group_rows(rows, kernel.width), K, padded);
}

// --- the weight ---

// Copies values [from, K) of a block into one `filled` columns wide, filled up with zeros to `padded` values of k.
template <typename T>
void fill_up(const T* block, int64_t width, int64_t K, int64_t from, int64_t padded, int64_t filled, T* to) {
  std::fill(to, to + (padded - from) * filled, T{});
  for (int64_t k = from; k < K; k++) {
    for (int64_t c = 0; c < width; c++) to[place<T>(k - from, c, filled, padded - from)] = block[place<T>(k, c, width, K)];
  }
}

// Blocks as a kernel takes them: in place where they are made of whole vectors and groups, else a copy that is.
template <typename T>
class Panels {
 public:
  Panels(const T* weight, int64_t N, int64_t K, int64_t step)
      : weight_(weight), N_(N), K_(K), step_(step), padded_(round_up(K, step)) {
    room_ = panel_scratch.take<T>(padded_ * kColumns);
  }

  Panel<T> at(int64_t number) {
    const int64_t column = number * kColumns, whole = K_ / step_ * step_;
    const int64_t width = std::min(kColumns, N_ - column), filled = round_up(width, kLane);
    const T* block = weight_ + column * K_;
    const bool plain = width == filled && K_ % group_of<T>() == 0;
    const int64_t from = plain ? whole : 0;
    if (from < padded_) fill_up(block, width, K_, from, padded_, filled, room_ + from * filled);
    return Panel<T>{plain ? block : room_, whole < K_ ? room_ + whole * filled : nullptr, filled, K_ / step_};
  }

 private:
  const T* weight_;
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

// A layer: y [M, N] = x @ weight.T + bias.
template <typename T>
struct Layer {
  const T* weight;
  const T* bias;  // or nullptr
  T* y;
  int64_t N;

  int64_t blocks() const { return (N + kColumns - 1) / kColumns; }
};

// Layers of one x, as if their weights stood below each other: the threads start and wait once for all of them.
template <typename T>
void multiply(const Kernel<T>& kernel, const T* x, const std::vector<Layer<T>>& layers, int64_t M, int64_t K) {
  int64_t blocks = 0;
  for (const Layer<T>& layer : layers) blocks += layer.blocks();
  const int64_t row_bytes = round_up(K, kernel.step) * (kernel.widened ? 4 : sizeof(T));
  const int64_t parts = std::max<int64_t>(1, (M * row_bytes + kLeftBytes - 1) / kLeftBytes);
  const int64_t chunk = round_up((M + parts - 1) / parts, 32);
  for (int64_t first = 0; first < M; first += chunk) {
    const int64_t rows = std::min(chunk, M - first);
    const Left left = left_side(kernel, x + first * K, rows, K);
    const int64_t work = kColumns * K * static_cast<int64_t>(sizeof(T)) * ((rows + 15) / 16);
    const int64_t grain = std::max<int64_t>(1, kSmallWork / std::max<int64_t>(1, work));
    parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      float* sums = sums_scratch.take<float>(round_up(rows, 32) * kColumns);
      kernel.begin();
      int64_t before = 0;
      for (const Layer<T>& layer : layers) {
        Panels<T> panels(layer.weight, layer.N, K, kernel.step);
        const int64_t last = std::min(end - before, layer.blocks());
        for (int64_t block = std::max<int64_t>(0, begin - before); block < last; block++) {
          kernel.multiply(left, panels.at(block), sums);
          const int64_t column = block * kColumns;
          store(
              sums, rows, std::min(kColumns, layer.N - column), layer.bias == nullptr ? nullptr : layer.bias + column,
              layer.y + first * layer.N + column, layer.N);
        }
        before += layer.blocks();
      }
      kernel.end();
    });
  }
}

// `layers` holds the weights and, when `biased`, a bias for each behind all of them: a compiled graph cannot hand over a
// list that is empty.
std::vector<Tensor> packed_linears(Tensor x_in, std::vector<Tensor> layers, bool biased) {
  const size_t count = biased ? layers.size() / 2 : layers.size();
  if (count == 0 || (biased && layers.size() != 2 * count)) {
    throw std::runtime_error(
        "nxd: packed_linears: " + std::to_string(layers.size()) + " tensors are no weights" +
        (biased ? " with a bias each" : ""));
  }
  const std::vector<Tensor> weights(layers.begin(), layers.begin() + count);
  std::vector<Tensor> biases(layers.begin() + count, layers.end());
  const int32_t dtype = check_weight(weights[0], "packed_linear");
  const int64_t K = weights[0].size(1);
  for (size_t i = 0; i < weights.size(); i++) {
    const Tensor& weight = weights[i];
    if (x_in.dim() == 0 || x_in.size(x_in.dim() - 1) != weight.size(1) || dtype_code(x_in) != dtype ||
        check_weight(weight, "packed_linear") != dtype) {
      throw std::runtime_error(
          "nxd: packed_linear: the input " + text(x_in) + " (dtype number " + std::to_string(dtype_code(x_in)) +
          ") does not fit the weight " + text(weight) + " (dtype number " + std::to_string(dtype_code(weight)) + ")");
    }
    if (biases.empty()) continue;
    if (biases[i].dim() != 1 || biases[i].size(0) != weight.size(0) || dtype_code(biases[i]) != dtype) {
      throw std::runtime_error(
          "nxd: packed_linear: the bias " + text(biases[i]) + " does not fit the weight " + text(weight));
    }
    biases[i] = contiguous(biases[i]);
  }
  const Tensor x = contiguous(x_in);
  auto shape = shape_of(x);
  int64_t M = 1;
  for (size_t d = 0; d + 1 < shape.size(); d++) M *= shape[d];
  std::vector<Tensor> results;
  for (const Tensor& weight : weights) {
    shape.back() = weight.size(0);
    results.push_back(new_like(x, shape));
  }
  if (M == 0) return results;
  const auto run = [&](auto zero, const auto& kernel) {
    using T = decltype(zero);
    std::vector<Layer<T>> all;
    for (size_t i = 0; i < weights.size(); i++) {
      all.push_back(Layer<T>{
          static_cast<const T*>(weights[i].data_ptr()),
          biases.empty() ? nullptr : static_cast<const T*>(biases[i].data_ptr()),
          static_cast<T*>(results[i].data_ptr()), weights[i].size(0)});
    }
    multiply<T>(kernel, static_cast<const T*>(x.data_ptr()), all, M, K);
  };
  if (dtype == aoti_torch_dtype_float32()) {
    run(float{}, float_kernel());
  } else {
    run(BFloat16{}, bfloat16_kernel());
  }
  return results;
}

Tensor packed_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  std::vector<Tensor> layer{weight};
  if (bias.has_value()) layer.push_back(*bias);
  return packed_linears(x, layer, bias.has_value())[0];
}

// --- packing: a transposition of units of four bytes, whatever the type ---

constexpr int64_t kUnit = 4;

// Calls visit(first column, width) for every block of [0, N), on several threads.
template <typename Visit>
void each_block(int64_t N, int64_t row_bytes, const Visit& visit) {
  const int64_t grain = std::max<int64_t>(1, (256 << 10) / std::max<int64_t>(1, kColumns * row_bytes));
  parallel_for(0, (N + kColumns - 1) / kColumns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      visit(block * kColumns, std::min(kColumns, N - block * kColumns));
    }
  });
}

// Cache line by cache line of every row: rows a power of two apart would throw each other out of the cache.
template <int64_t kWidth>
NXD_INLINE void pack_units(const char* rows, int64_t row_bytes, int64_t width, char* block) {
  constexpr int64_t kLine = 16;  // units
  width = kWidth > 0 ? kWidth : width;
  uint32_t lines[kColumns][kLine];
  for (int64_t unit = 0; unit < row_bytes / kUnit; unit += kLine) {
    const int64_t count = std::min(kLine, row_bytes / kUnit - unit);
    for (int64_t c = 0; c < width; c++) {
      if (count == kLine) {
        std::memcpy(lines[c], rows + c * row_bytes + unit * kUnit, kLine * kUnit);
      } else {
        std::memcpy(lines[c], rows + c * row_bytes + unit * kUnit, count * kUnit);
      }
    }
    for (int64_t u = 0; u < count; u++) {
      char* to = block + (unit + u) * width * kUnit;
      for (int64_t c = 0; c < width; c++) std::memcpy(to + c * kUnit, &lines[c][u], kUnit);
    }
  }
}

void pack(Tensor out, Tensor weight_in) {
  const int32_t dtype = check_weight(out, "pack");
  const Tensor weight = contiguous(weight_in);
  if (shape_of(weight) != shape_of(out) || dtype_code(weight) != dtype) {
    throw std::runtime_error("nxd: pack: a weight of shape " + text(weight) + " into one of shape " + text(out));
  }
  const int64_t N = out.size(0);
  const int64_t row_bytes = out.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : 2);
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  if (row_bytes == 0) return;
  each_block(N, row_bytes, [&](int64_t column, int64_t width) {
    const char* rows = from + column * row_bytes;
    char* block = to + column * row_bytes;
    if (width == kColumns) {
      pack_units<kColumns>(rows, row_bytes, width, block);
    } else {
      pack_units<0>(rows, row_bytes, width, block);
    }
    const int64_t rest = row_bytes % kUnit, whole = row_bytes - rest;
    for (int64_t c = 0; c < width && rest > 0; c++) {
      std::memcpy(block + whole * width + c * rest, rows + c * row_bytes + whole, rest);
    }
  });
}

// Row `row` of the plain weight.
void unpack_row(const char* packed, int64_t N, int64_t row_bytes, int64_t row, char* to) {
  const int64_t column = row / kColumns * kColumns, c = row - column;
  const int64_t width = std::min(kColumns, N - column);
  const char* block = packed + column * row_bytes;
  const int64_t rest = row_bytes % kUnit, whole = row_bytes - rest;
  for (int64_t unit = 0; unit < whole / kUnit; unit++) {
    std::memcpy(to + unit * kUnit, block + (unit * width + c) * kUnit, kUnit);
  }
  std::memcpy(to + whole, block + whole * width + c * rest, rest);
}

Tensor unpack(Tensor packed) {
  const int32_t dtype = check_weight(packed, "unpack");
  const int64_t N = packed.size(0);
  const int64_t row_bytes = packed.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : 2);
  Tensor out = new_like(packed, shape_of(packed));
  const char* from = static_cast<const char*>(packed.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  each_block(N, row_bytes, [&](int64_t column, int64_t width) {
    for (int64_t row = column; row < column + width; row++) unpack_row(from, N, row_bytes, row, to + row * row_bytes);
  });
  return out;
}

Tensor packed_embedding(Tensor weight, Tensor ids_in) {
  const int32_t dtype = check_weight(weight, "packed_embedding");
  const bool wide = dtype_code(ids_in) == aoti_torch_dtype_int64();
  if (!wide && dtype_code(ids_in) != aoti_torch_dtype_int32()) {
    throw std::runtime_error("nxd: packed_embedding: the ids must be int64 or int32");
  }
  const Tensor ids = contiguous(ids_in);
  const int64_t N = weight.size(0), count = ids.numel();
  const int64_t row_bytes = weight.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : 2);
  auto shape = shape_of(ids);
  shape.push_back(weight.size(1));
  Tensor y = new_like(weight, shape);
  std::vector<int64_t> rows(count);
  for (int64_t i = 0; i < count; i++) {
    rows[i] = wide ? static_cast<const int64_t*>(ids.data_ptr())[i] : static_cast<const int32_t*>(ids.data_ptr())[i];
    if (rows[i] < 0 || rows[i] >= N) {
      throw std::runtime_error(
          "nxd: packed_embedding: index " + std::to_string(rows[i]) + " is out of range for a table of " +
          std::to_string(N) + " rows");
    }
  }
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(y.data_ptr());
  parallel_for(0, count, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) unpack_row(from, N, row_bytes, rows[i], to + i * row_bytes);
  });
  return y;
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("packed_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]");
  m.def("packed_embedding(Tensor weight, Tensor ids) -> Tensor");
  m.def("pack(Tensor(a!) out, Tensor weight) -> ()");
  m.def("unpack(Tensor packed) -> Tensor");
}

NXD_IMPL(CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&nxd::packed_linear));
  m.impl("packed_linears", TORCH_BOX(&nxd::packed_linears));
  m.impl("packed_embedding", TORCH_BOX(&nxd::packed_embedding));
  m.impl("pack", TORCH_BOX(&nxd::pack));
  m.impl("unpack", TORCH_BOX(&nxd::unpack));
}
