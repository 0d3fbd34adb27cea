// Linear layers over packed weights (packed.h): the product, the gather of rows for tied embeddings, and packing.
#include "machine/cpu.h"
#include "packed/packed.h"
#include "packed/product.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

// The weight of a packed operator: [N, K], contiguous. Returns its dtype.
int32_t check_weight(const Tensor& weight, const char* what) {
  const int32_t dtype = weight.dtype();
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

Operands checked_operands(const Tensor& x, const std::vector<Tensor>& layers, bool biased) {
  return operands(
      "packed_linear", x, layers, biased, 0, [](const Tensor& weight) { return check_weight(weight, "packed_linear"); });
}

std::vector<Tensor> packed_linears(Tensor x, std::vector<Tensor> layers, bool biased) {
  Operands all = checked_operands(x, layers, biased);
  if (all.M == 0) return std::move(all.results);
  const void* rows = all.x.data_ptr();
  if (all.dtype == aoti_torch_dtype_float32()) {
    multiply(float_kernel(), static_cast<const float*>(rows), all.layers<float, float>(), all.M, all.K);
  } else {
    multiply(bfloat16_kernel(), static_cast<const BFloat16*>(rows), all.layers<BFloat16, BFloat16>(), all.M, all.K);
  }
  return std::move(all.results);
}

template <bool several>
std::unique_ptr<Planned> plan_linears(const PlannedArgument* arguments) {
  const PlannedLayers given(arguments, several);
  if (!given.whole) return nullptr;
  const Operands all = checked_operands(given.x, given.layers, given.biased);
  if (all.dtype == aoti_torch_dtype_float32()) return planned<float, float>(float_kernel(), all);
  return planned<BFloat16, BFloat16>(bfloat16_kernel(), all);
}

Tensor packed_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  std::vector<Tensor> layer{weight};
  if (bias.has_value()) layer.push_back(*bias);
  return std::move(packed_linears(std::move(x), std::move(layer), bias.has_value())[0]);
}

// --- packing: a transposition of four-byte units, for any dtype ---

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

// One cache line of every row at a time: rows a power of two apart would evict each other.
template <int64_t kWidth>
NXD_INLINE void pack_units(const char* rows, int64_t row_bytes, int64_t width, char* block, bool asking) {
  constexpr int64_t kLine = 16;  // units
  width = kWidth > 0 ? kWidth : width;
  uint32_t lines[kColumns][kLine];
  for (int64_t unit = 0; unit < row_bytes / kUnit; unit += kLine) {
    const int64_t count = std::min(kLine, row_bytes / kUnit - unit);
    for (int64_t c = 0; c < width; c++) {
      // Most hardware prefetchers follow fewer streams than there are rows.
      if (asking) __builtin_prefetch(rows + c * row_bytes + (unit + kLine) * kUnit);
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
  if (shape_of(weight) != shape_of(out) || weight.dtype() != dtype) {
    throw std::runtime_error("nxd: pack: a weight of shape " + text(weight) + " into one of shape " + text(out));
  }
  const int64_t N = out.size(0);
  const int64_t row_bytes = out.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : 2);
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  if (row_bytes == 0) return;
  const bool asking = asks();
  each_block(N, row_bytes, [&](int64_t column, int64_t width) {
    const char* rows = from + column * row_bytes;
    char* block = to + column * row_bytes;
    if (width == kColumns) {
      pack_units<kColumns>(rows, row_bytes, width, block, asking);
    } else {
      pack_units<0>(rows, row_bytes, width, block, asking);
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
  const Tensor ids = contiguous(ids_in);
  const int64_t N = weight.size(0), count = ids.numel();
  const int64_t row_bytes = weight.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : 2);
  const std::vector<int64_t> rows = row_numbers("packed_embedding", ids, N);
  auto shape = shape_of(ids);
  shape.push_back(weight.size(1));
  Tensor y = new_like(weight, shape);
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

NXD_PLAN(packed_linear, nxd::plan_linears<false>);
NXD_PLAN(packed_linears, nxd::plan_linears<true>);
