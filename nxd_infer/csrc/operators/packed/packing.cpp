// Packing of weights (packed.h), which rounds them if they are of eight bits, and rows of a packed table.
#include "machine/cpu.h"
#include "machine/parallel.h"
#include "interface/registration.h"
#include "interface/tensors.h"
#include "packed/packed.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("nxd: " + what); }

// The bytes of a row of values; 0 if they are neither float32 nor bfloat16.
int64_t row_bytes_of(const Tensor& x) {
  const int32_t dtype = x.dtype();
  return x.size(1) * (dtype == aoti_torch_dtype_float32() ? 4 : dtype == aoti_torch_dtype_bfloat16() ? 2 : 0);
}

bool is_int8(const Tensor& x) { return x.dtype() == aoti_torch_dtype_int8(); }

// A packed weight: a contiguous matrix of float32 or bfloat16, or of eight bits with a scale at the end of each row.
void check_packed(const Tensor& weight, const char* what) {
  const bool matrix = weight.dim() == 2 && weight.is_contiguous();
  const bool typed = is_int8(weight) || weight.dtype() == aoti_torch_dtype_float32() ||
      weight.dtype() == aoti_torch_dtype_bfloat16();
  if (!matrix || !typed || (is_int8(weight) && weight.size(1) <= kScaleBytes)) {
    refuse(
        std::string(what) + ": a packed weight is a contiguous matrix [N, K] of float32 or bfloat16, or int8 " +
        "[N, K + 4], got " + text(weight) + " (dtype number " + std::to_string(weight.dtype()) + ")");
  }
}

// The plain weight of shape [N, K] that is packed into `out`.
Tensor plain_weight(const Tensor& weight, const Tensor& out, const char* what) {
  check_packed(out, what);
  const int64_t K = out.size(1) - (is_int8(out) ? kScaleBytes : 0);
  const bool fits = weight.dim() == 2 && weight.size(0) == out.size(0) && weight.size(1) == K;
  if (!fits || (is_int8(out) ? K > 0 && row_bytes_of(weight) == 0 : weight.dtype() != out.dtype())) {
    refuse(
        std::string(what) + ": a weight of shape " + text(weight) + " (dtype number " +
        std::to_string(weight.dtype()) + ") into one of shape " + text(out));
  }
  return contiguous(weight);
}

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

// --- plain: a transposition of four-byte units, for any dtype ---

constexpr int64_t kUnit = 4;

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
  const Tensor weight = plain_weight(weight_in, out, "pack");
  const int64_t row_bytes = row_bytes_of(out);
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  if (row_bytes == 0) return;
  const bool asking = asks();
  each_block(out.size(0), row_bytes, [&](int64_t column, int64_t width) {
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

void unpack_row(const char* packed, int64_t N, int64_t row_bytes, int64_t row, char* to) {
  const int64_t column = row / kColumns * kColumns, c = row - column, width = std::min(kColumns, N - column);
  const char* block = packed + column * row_bytes;
  const int64_t rest = row_bytes % kUnit, whole = row_bytes - rest;
  for (int64_t unit = 0; unit < whole / kUnit; unit++) {
    std::memcpy(to + unit * kUnit, block + (unit * width + c) * kUnit, kUnit);
  }
  std::memcpy(to + whole, block + whole * width + c * rest, rest);
}

// --- eight bits ---

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

void pack_int8(Tensor out, Tensor weight_in) {
  const Tensor weight = plain_weight(weight_in, out, "pack_int8");
  const int64_t K = weight.size(1);
  int8_t* to = static_cast<int8_t*>(out.data_ptr());
  const void* from = weight.data_ptr();
  each_block(out.size(0), row_bytes_of(weight), [&](int64_t column, int64_t width) {
    int8_t* block = to + column * out.size(1);
    if (weight.dtype() == aoti_torch_dtype_float32()) {
      pack_block(static_cast<const float*>(from) + column * K, width, K, block);
    } else {
      pack_block(static_cast<const BFloat16*>(from) + column * K, width, K, block);
    }
  });
}

template <typename T>
void unpack_row(const int8_t* packed, int64_t N, int64_t K, int64_t row, T* to) {
  const int64_t column = row / kColumns * kColumns, c = row - column, width = std::min(kColumns, N - column);
  const int8_t* block = packed + column * (K + kScaleBytes);
  float factor;
  std::memcpy(&factor, block + width * K + c * kScaleBytes, kScaleBytes);
  for (int64_t k = 0; k < K; k++) to[k] = narrow<T>(static_cast<float>(block[k * width + c]) * factor);
}

// --- rows of a table ---

// Throws for an id out of range.
std::vector<int64_t> row_numbers(const Tensor& ids, int64_t N) {
  const bool wide = ids.dtype() == aoti_torch_dtype_int64();
  if (!wide && ids.dtype() != aoti_torch_dtype_int32()) refuse("packed_embedding: the ids must be int64 or int32");
  std::vector<int64_t> rows(ids.numel());
  for (size_t i = 0; i < rows.size(); i++) {
    rows[i] = wide ? static_cast<const int64_t*>(ids.data_ptr())[i] : static_cast<const int32_t*>(ids.data_ptr())[i];
    if (rows[i] < 0 || rows[i] >= N) {
      refuse(
          "packed_embedding: index " + std::to_string(rows[i]) + " is out of range for a table of " +
          std::to_string(N) + " rows");
    }
  }
  return rows;
}

Tensor packed_embedding(Tensor weight, Tensor ids_in, bool bfloat16) {
  check_packed(weight, "packed_embedding");
  const Tensor ids = contiguous(ids_in);
  const bool int8 = is_int8(weight);
  const int64_t N = weight.size(0), K = weight.size(1) - (int8 ? kScaleBytes : 0);
  const std::vector<int64_t> rows = row_numbers(ids, N);
  auto shape = shape_of(ids);
  shape.push_back(K);
  const int32_t rounded = bfloat16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  Tensor y = empty_strided_cpu(shape, int8 ? rounded : weight.dtype());
  const int64_t row_bytes = K * (y.dtype() == aoti_torch_dtype_float32() ? 4 : 2);
  const char* from = static_cast<const char*>(weight.data_ptr());
  char* to = static_cast<char*>(y.data_ptr());
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_bytes));
  parallel_for(0, static_cast<int64_t>(rows.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      char* row = to + i * row_bytes;
      if (!int8) {
        unpack_row(from, N, row_bytes, rows[i], row);
      } else if (bfloat16) {
        unpack_row(reinterpret_cast<const int8_t*>(from), N, K, rows[i], reinterpret_cast<BFloat16*>(row));
      } else {
        unpack_row(reinterpret_cast<const int8_t*>(from), N, K, rows[i], reinterpret_cast<float*>(row));
      }
    }
  });
  return y;
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def("packed_embedding(Tensor weight, Tensor ids, bool bfloat16) -> Tensor");
  m.def("pack(Tensor(a!) out, Tensor weight) -> ()");
  m.def("pack_int8(Tensor(a!) out, Tensor weight) -> ()");
}

NXD_IMPL(CPU, m) {
  m.impl("packed_embedding", TORCH_BOX(&nxd::packed_embedding));
  m.impl("pack", TORCH_BOX(&nxd::pack));
  m.impl("pack_int8", TORCH_BOX(&nxd::pack_int8));
}
