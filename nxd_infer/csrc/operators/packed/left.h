// The left side of a product with packed weights (packed.h), arranged once for all columns. Included by the files of
// operators, each with its own memory.
#pragma once

#include "packed/packed.h"
#include "machine/parallel.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace nxd {
namespace {

// Memory that a thread keeps between calls: page faults on new memory would cost as much as the product.
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

using Pair = uint32_t;  // of bfloat16

NXD_INLINE float converted(float x) { return x; }
NXD_INLINE float converted(BFloat16 x) { return widen(x); }
NXD_INLINE Pair converted(Pair x) { return x; }

// to[k][row] = x[row][k] for `count` of k and the first `rows` of `width`; rows of x are `stride` bytes apart.
template <int64_t kWidth, typename U, typename T>
NXD_INLINE void stand_beside(
    const char* x, const T*, int64_t rows, int64_t stride, int64_t count, int64_t width, U* __restrict to) {
  if (kWidth > 0) rows = width = kWidth;
  for (int64_t k = 0; k < count; k++) {
    for (int64_t row = 0; row < rows; row++) {
      T value;
      std::memcpy(&value, x + row * stride + k * sizeof(T), sizeof(T));  // rows of odd length are unaligned
      to[k * width + row] = converted(value);
    }
  }
}

#define NXD_BESIDE(U, T)                                                                                    \
  NXD_CLONES void beside(                                                                                   \
      const char* x, const T* type, int64_t rows, int64_t stride, int64_t count, int64_t width, U* to) {    \
    if (rows == 4 && width == 4) return stand_beside<4>(x, type, rows, stride, count, width, to);           \
    if (rows == 8 && width == 8) return stand_beside<8>(x, type, rows, stride, count, width, to);           \
    stand_beside<0>(x, type, rows, stride, count, width, to);                                               \
  }
NXD_BESIDE(float, float)
NXD_BESIDE(float, BFloat16)
NXD_BESIDE(Pair, Pair)

template <typename U, typename T>
Left rows_of(const T* x, int64_t rows, int64_t width, int64_t K, int64_t padded) {
  if constexpr (std::is_same_v<T, U>) {
    if (rows == 1 && K == padded) return Left{x, 1, 1, padded};
  }
  constexpr int64_t unit = 4 / sizeof(U);
  using Unit = std::conditional_t<unit == 2, Pair, float>;
  using From = std::conditional_t<unit == 2, Pair, T>;
  const int64_t groups = (rows + width - 1) / width, stride = K * sizeof(T);
  U* data = left_scratch.take<U>(groups * width * padded);
  parallel_for(0, groups, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width * padded)), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * width; first < std::min(end * width, rows); first += width) {
      const int64_t count = std::min(width, rows - first);
      const char* from = reinterpret_cast<const char*>(x + first * K);
      Unit* to = reinterpret_cast<Unit*>(data + first * padded);
      beside(from, static_cast<const From*>(nullptr), count, stride, K / unit, width, to);
      for (int64_t k = K / unit; k < padded / unit; k++) {
        for (int64_t row = 0; row < count; row++) {
          to[k * width + row] = Unit{};
          if (k * unit < K) std::memcpy(to + k * width + row, from + row * stride + k * 4, sizeof(T));
        }
      }
    }
  });
  return Left{data, rows, width, width * padded};
}

// Tiles of 16 rows by 32 values, consecutive within a group of rows; missing rows are zeros.
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

// Rows per group: groups of about equal size, none above `most` rows.
int64_t group_rows(int64_t rows, int64_t most) {
  const int64_t groups = (rows + most - 1) / most;
  return (rows + groups - 1) / groups;
}

template <typename P, typename T>
Left left_side(const Kernel<P>& kernel, const T* x, int64_t rows, int64_t K) {
  const int64_t padded = round_up(K, kernel.step);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (kernel.tiles) return tiles_of(x, rows, K, padded);
    if (!kernel.widened) return rows_of<BFloat16>(x, rows, group_rows(rows, kernel.width), K, padded);
  }
  return rows_of<float>(x, rows, group_rows(rows, kernel.width), K, padded);
}

} // namespace
} // namespace nxd
