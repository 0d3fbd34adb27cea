// Products of the left side (left.h) with the blocks of a packed weight (packed.h), plain or of eight bits: prepares blocks
// for a kernel, and rounds the results. Included by the files of operators, each with its own memory.
#pragma once

#include "packed/left.h"
#include "packed/packed.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace nxd {
namespace {

constexpr int64_t kLeftBytes = 3 << 19;   // of the left side at a time: it is read once per panel, from L2
constexpr int64_t kSmallWork = 32 << 10;  // bytes of weights below which another thread does not pay off

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
NXD_CLONES void widen_block(
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

NXD_CLONES void widen_block(
    const int8_t* q, int64_t width, int64_t K, int64_t filled, int64_t padded, BFloat16* to) {
  const auto pairs = [&](const int8_t* first, const int8_t* second, int64_t count, BFloat16* out) {
    for (int64_t c = 0; c < count; c++) {
      const uint32_t pair = bits_of(first[c]) >> 16 | (second == nullptr ? 0 : bits_of(second[c]));  // low halves are 0
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

// Multiplies the sums of an int8 block by the scales after it.
NXD_CLONES void scale(float* sums, int64_t rows, int64_t width, const char* scales) {
  float factors[kColumns] = {};
  std::memcpy(factors, scales, width * kScaleBytes);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t c = 0; c < kColumns; c++) sums[row * kColumns + c] *= factors[c];
  }
}

// Blocks of W as a kernel over T takes them: in place if they consist of whole vectors and groups, else a copy.
template <typename T, typename W = T>
class Panels {
 public:
  Panels(const W* weight, int64_t N, int64_t K, int64_t step, NibbleForm = {})
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

  // out[row][column] of block `number`, with the scales; returns how many columns it has.
  int64_t multiply(const Kernel<T>& kernel, const Left& left, int64_t number, float* out) {
    kernel.multiply(left, at(number), out);
    const int64_t column = number * kColumns, width = std::min(kColumns, N_ - column);
    if constexpr (std::is_same_v<W, int8_t>) {
      const int8_t* values = weight_ + column * row_size<W>(K_);
      scale(out, left.rows, width, reinterpret_cast<const char*>(values + width * K_));
    }
    return width;
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

} // namespace
} // namespace nxd
