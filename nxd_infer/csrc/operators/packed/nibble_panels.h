// Products with weights of four bits (nibbles.h), as product.h has those of others. Included by the files of operators.
#pragma once

#include "packed/left.h"
#include "packed/nibbles.h"
#include "packed/product.h"

#include <algorithm>
#include <cstring>

namespace nxd {
namespace {

// Groups of rows as cells.
template <typename T>
Left left_side(const Kernel<Nibbles>& kernel, const T* x, int64_t rows, int64_t K) {
  const int64_t cells = (K + kCell - 1) / kCell, width = kernel.width, groups = (rows + width - 1) / width;
  Cell* data = left_scratch.take<Cell>(rows * cells);
  parallel_for(0, groups, std::max<int64_t>(1, 1024 / std::max<int64_t>(1, cells * width)), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * width; first < std::min(end * width, rows); first += width) {
      round_rows(x + first * K, std::min(width, rows - first), K, data + first * cells);
    }
  });
  return Left{data, rows, width, width * cells};
}

template <>
class Panels<Nibbles, Nibbles> {
 public:
  Panels(const Nibbles* weight, int64_t N, int64_t K, int64_t step, NibbleForm form)
      : weight_(&weight->two), N_(N), cells_((K + step - 1) / step), form_(form), groups_(form.groups(K)) {}

  // out[row][column] of block `number`; returns how many columns it has.
  int64_t multiply(const Kernel<Nibbles>& kernel, const Left& left, int64_t number, float* out) {
    const int64_t column = number * kColumns, width = std::min(kColumns, N_ - column);
    const uint8_t* block = weight_ + column * groups_ * form_.bytes;
    if (width < kColumns) block = widened(block, width);
    kernel.multiply(left, Panel<Nibbles>{block, cells_, form_}, out);
    return width;
  }

 private:
  // A copy of a narrow block, with columns of zeros beside its own.
  const uint8_t* widened(const uint8_t* block, int64_t width) {
    const int64_t bytes = form_.bytes, group = form_.group();
    uint8_t* to = panel_scratch.take<uint8_t>(groups_ * kColumns * bytes);
    std::memset(to, 0, groups_ * kColumns * bytes);
    for (int64_t g = 0; g < groups_; g++, block += width * bytes) {
      uint8_t* out = to + g * kColumns * bytes;
      for (int64_t c = 0; c < width; c++) {
        for (int64_t k = 0; k < group; k += 8) {
          std::memcpy(out + nibble_place(k, c, kColumns, group), block + nibble_place(k, c, width, group), 4);
        }
      }
      const int64_t numbers = group / 2;
      std::memcpy(out + kColumns * numbers, block + width * numbers, width * 2);
      if (form_.zeros()) std::memcpy(out + kColumns * (numbers + 2), block + width * (numbers + 2), width);
    }
    return to;
  }

  const uint8_t* weight_;
  int64_t N_, cells_;
  NibbleForm form_;
  int64_t groups_;
};

} // namespace
} // namespace nxd
