// Linear layers over packed int8 weights (int8.h): the product, the gather of rows for tied embeddings, and
// packing, which quantizes a weight.
#include "packed/int8.h"
#include "packed/product.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

void check_packed(const Tensor& weight, const char* what) {
  if (weight.dtype() != aoti_torch_dtype_int8() || weight.dim() != 2 || weight.size(1) <= kScaleBytes ||
      !weight.is_contiguous()) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": a weight packed in eight bits is a contiguous int8 matrix [N, K + 4], got " +
        text(weight) + " (dtype number " + std::to_string(weight.dtype()) + ")");
  }
}

void check_type(int32_t dtype, const char* what) {
  if (dtype != aoti_torch_dtype_float32() && dtype != aoti_torch_dtype_bfloat16()) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": values are float32 or bfloat16, got dtype number " + std::to_string(dtype));
  }
}

// Calls use(kernel) with the one for so many rows: with more groups every block would be widened more often.
template <typename T, typename Use>
auto with_kernel(const Operands& all, const Kernel<T>& wide, const Use& use) {
  const Kernel<int8_t>& narrow = int8_kernel<T>();
  return all.M <= 2 * narrow.width ? use(narrow) : use(wide);
}

template <typename T>
void product(const Operands& all, const Kernel<T>& wide) {
  with_kernel(all, wide, [&](const auto& kernel) {
    multiply(kernel, static_cast<const T*>(all.x.data_ptr()), all.layers<T, int8_t>(), all.M, all.K);
  });
}

Operands checked_operands(const Tensor& x, const std::vector<Tensor>& layers, bool biased) {
  const char* what = "packed_int8_linear";
  check_type(x.dtype(), what);
  return operands(what, x, layers, biased, kScaleBytes, [&](const Tensor& weight) {
    check_packed(weight, what);
    return x.dtype();
  });
}

std::vector<Tensor> packed_int8_linears(Tensor x, std::vector<Tensor> layers, bool biased) {
  Operands all = checked_operands(x, layers, biased);
  if (all.M == 0) return std::move(all.results);
  if (all.dtype == aoti_torch_dtype_float32()) {
    product<float>(all, float_kernel());
  } else {
    product<BFloat16>(all, bfloat16_kernel());
  }
  return std::move(all.results);
}

template <bool several>
std::unique_ptr<Planned> plan_linears(const PlannedArgument* arguments) {
  const PlannedLayers given(arguments, several);
  if (!given.whole) return nullptr;
  const Operands all = checked_operands(given.x, given.layers, given.biased);
  if (all.dtype == aoti_torch_dtype_float32()) {
    return with_kernel(all, float_kernel(), [&](const auto& kernel) { return planned<float, int8_t>(kernel, all); });
  }
  return with_kernel(all, bfloat16_kernel(), [&](const auto& kernel) { return planned<BFloat16, int8_t>(kernel, all); });
}

Tensor packed_int8_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  std::vector<Tensor> layer{weight};
  if (bias.has_value()) layer.push_back(*bias);
  return std::move(packed_int8_linears(std::move(x), std::move(layer), bias.has_value())[0]);
}

// --- packing ---

// The scale of a row: 1 for a zero row, NaN for one with non-finite values. Rounded as in PyTorch.
template <typename T>
NXD_INLINE float scale_of(const T* row, int64_t K) {
  float largest = 0;
  bool finite = true;
  for (int64_t k = 0; k < K; k++) {
    const float value = std::fabs(widen(row[k]));
    largest = value > largest ? value : largest;
    finite &= value <= std::numeric_limits<float>::max();
  }
  const float found = largest / 127.0f;
  return !finite ? std::numeric_limits<float>::quiet_NaN() : found > 0 ? found : 1.0f;
}

template <typename T>
NXD_INLINE void pack_block_body(const T* rows, int64_t width, int64_t K, int8_t* block) {
  float scales[kColumns];
  for (int64_t c = 0; c < width; c++) scales[c] = scale_of(rows + c * K, K);
  constexpr int64_t kSome = 64;  // values of every row at a time: rows a power of two apart share cache sets
  int8_t some[kColumns][kSome];
  for (int64_t first = 0; first < K; first += kSome) {
    const int64_t count = std::min(kSome, K - first);
    for (int64_t c = 0; c < width; c++) {
      for (int64_t k = 0; k < count; k++) {
        const float value = widen(rows[c * K + first + k]) / scales[c];
        const float bounded = value < 127 ? (value > -127 ? value : -127) : 127;
        some[c][k] = static_cast<int8_t>((bounded + 12582912.0f) - 12582912.0f);  // to the nearest, ties to even
      }
    }
    for (int64_t k = 0; k < count; k++) {
      for (int64_t c = 0; c < width; c++) block[(first + k) * width + c] = some[c][k];
    }
  }
  std::memcpy(block + K * width, scales, width * kScaleBytes);
}

NXD_CLONES void pack_block(const float* rows, int64_t width, int64_t K, int8_t* block) {
  pack_block_body(rows, width, K, block);
}
NXD_CLONES void pack_block(const BFloat16* rows, int64_t width, int64_t K, int8_t* block) {
  pack_block_body(rows, width, K, block);
}

template <typename T>
void pack_rows(const T* from, int64_t N, int64_t K, int8_t* to) {
  const int64_t grain = std::max<int64_t>(1, (64 << 10) / (kColumns * K));
  parallel_for(0, (N + kColumns - 1) / kColumns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kColumns; column < std::min(N, end * kColumns); column += kColumns) {
      pack_block(from + column * K, std::min(kColumns, N - column), K, to + column * row_size<int8_t>(K));
    }
  });
}

void pack_int8(Tensor out, Tensor weight_in) {
  check_packed(out, "pack_int8");
  check_type(weight_in.dtype(), "pack_int8");
  const Tensor weight = contiguous(weight_in);
  const int64_t N = out.size(0), K = out.size(1) - kScaleBytes;
  if (weight.dim() != 2 || weight.size(0) != N || weight.size(1) != K) {
    throw std::runtime_error("nxd: pack_int8: a weight of shape " + text(weight) + " into one of " + text(out));
  }
  int8_t* to = static_cast<int8_t*>(out.data_ptr());
  if (weight.dtype() == aoti_torch_dtype_float32()) {
    pack_rows(static_cast<const float*>(weight.data_ptr()), N, K, to);
  } else {
    pack_rows(static_cast<const BFloat16*>(weight.data_ptr()), N, K, to);
  }
}

// --- rows of a table ---

template <typename T>
void unpack_row(const int8_t* packed, int64_t N, int64_t K, int64_t row, T* to) {
  const int64_t column = row / kColumns * kColumns, c = row - column, width = std::min(kColumns, N - column);
  const int8_t* block = packed + column * row_size<int8_t>(K);
  float factor;
  std::memcpy(&factor, block + width * K + c * kScaleBytes, kScaleBytes);
  for (int64_t k = 0; k < K; k++) to[k] = narrow<T>(static_cast<float>(block[k * width + c]) * factor);
}

template <typename T>
void gather(const int8_t* packed, int64_t N, int64_t K, const std::vector<int64_t>& rows, T* to) {
  parallel_for(0, static_cast<int64_t>(rows.size()), std::max<int64_t>(1, 8192 / K), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) unpack_row(packed, N, K, rows[i], to + i * K);
  });
}

Tensor packed_int8_embedding(Tensor weight, Tensor ids_in, bool bfloat16) {
  const char* what = "packed_int8_embedding";
  check_packed(weight, what);
  const Tensor ids = contiguous(ids_in);
  const int64_t N = weight.size(0), K = weight.size(1) - kScaleBytes;
  const std::vector<int64_t> rows = row_numbers(what, ids, N);
  auto shape = shape_of(ids);
  shape.push_back(K);
  Tensor y = empty_strided_cpu(shape, bfloat16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32());
  const int8_t* from = static_cast<const int8_t*>(weight.data_ptr());
  if (bfloat16) {
    gather(from, N, K, rows, static_cast<BFloat16*>(y.data_ptr()));
  } else {
    gather(from, N, K, rows, static_cast<float*>(y.data_ptr()));
  }
  return y;
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def("packed_int8_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("packed_int8_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]");
  m.def("packed_int8_embedding(Tensor weight, Tensor ids, bool bfloat16) -> Tensor");
  m.def("pack_int8(Tensor(a!) out, Tensor weight) -> ()");
}

NXD_IMPL(CPU, m) {
  m.impl("packed_int8_linear", TORCH_BOX(&nxd::packed_int8_linear));
  m.impl("packed_int8_linears", TORCH_BOX(&nxd::packed_int8_linears));
  m.impl("packed_int8_embedding", TORCH_BOX(&nxd::packed_int8_embedding));
  m.impl("pack_int8", TORCH_BOX(&nxd::pack_int8));
}

NXD_PLAN(packed_int8_linear, nxd::plan_linears<false>);
NXD_PLAN(packed_int8_linears, nxd::plan_linears<true>);
