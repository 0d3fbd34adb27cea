// Rounding of weights to four bits (nibbles.h): each row's groups of k by the scale, and the zero, with the least squared
// error of sixteen that are tried.
#include "interface/registration.h"
#include "interface/tensors.h"
#include "machine/parallel.h"
#include "machine/scalar.h"
#include "packed/nibbles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")  // the same rounding as PyTorch's, operation by operation
#endif

namespace nxd {
namespace {

constexpr int kTries = 16;
constexpr float kSmallest = 7.5231638e-37f;  // 2^-120: below it a scale is 0, as its inverse would overflow
typedef float Columns[kEight];

// The steps of one group in eight columns: u = round(w / scale + zero), w = (u - zero) * scale.
struct Steps {
  Columns scale, inverse, zero;
};

NXD_INLINE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // ties to even

NXD_INLINE float whole_of(float w, float inverse, float zero) {
  const float u = w * inverse + zero, capped = u < 15.0f ? u : 15.0f;
  return nearest(capped > 0.0f ? capped : 0.0f);
}

// Try number `number` of a group whose values are in low .. high.
// Without zeros, the value of largest magnitude is `most` steps: 6.75 to 9 on the side of -8, 6.25 to 7.5 on that of 7.
// With zeros, the range is cut by up to 3 / 16 on either side.
NXD_INLINE void steps_of(int number, bool zeros, const float* low, const float* high, Steps* to) {
  const float most = number < 10 ? -6.75f - 0.25f * static_cast<float>(number)
                                 : 6.25f + 0.25f * static_cast<float>(number - 10);
  const float below = 1.0f - 0.0625f * static_cast<float>(number % 4);
  const float above = 1.0f - 0.0625f * static_cast<float>(number / 4);
  for (int c = 0; c < kEight; c++) {
    const float lowest = low[c] * below;
    const float found = zeros ? (high[c] * above - lowest) / 15.0f : (high[c] < -low[c] ? low[c] : high[c]) / most;
    const float half = widen(narrow<BFloat16>(found)), scale = std::fabs(half) < kSmallest ? 0.0f : half;
    to->scale[c] = scale;
    to->inverse[c] = scale == 0.0f ? 0.0f : 1.0f / scale;
    const float sixteenths = nearest(-lowest * to->inverse[c] * 16.0f);
    to->zero[c] = !zeros ? 8.0f : (sixteenths < 240.0f ? sixteenths : 240.0f) * 0.0625f;
  }
}

NXD_INLINE void errors_of(const Columns* w, int64_t group, const Steps& steps, float* errors) {
  Columns scale, inverse, zero, sum = {};
  std::memcpy(scale, steps.scale, sizeof(scale));
  std::memcpy(inverse, steps.inverse, sizeof(inverse));
  std::memcpy(zero, steps.zero, sizeof(zero));
  for (int64_t k = 0; k < group; k++) {
    for (int c = 0; c < kEight; c++) {
      const float apart = (whole_of(w[k][c], inverse[c], zero[c]) - zero[c]) * scale[c] - w[k][c];
      sum[c] += apart * apart;
    }
  }
  std::memcpy(errors, sum, sizeof(sum));
}

// Rounds eight columns of a group: numbers, scales and zeros (or nullptr) as nibbles.h has them, for `count` columns.
NXD_CLONES void round_group(
    const Columns* w, int64_t group, int64_t count, uint8_t* numbers, uint8_t* scales, uint8_t* zeros) {
  Columns low = {}, high = {}, least;
  for (int64_t k = 0; k < group; k++) {
    for (int c = 0; c < kEight; c++) {
      low[c] = w[k][c] < low[c] ? w[k][c] : low[c];
      high[c] = w[k][c] > high[c] ? w[k][c] : high[c];
    }
  }
  Steps best{};
  for (int c = 0; c < kEight; c++) {
    least[c] = std::numeric_limits<float>::infinity();
    best.scale[c] = std::numeric_limits<float>::quiet_NaN();  // stays if a value is not finite
  }
  for (int number = 0; number < kTries; number++) {
    Steps steps;
    Columns errors;
    steps_of(number, zeros != nullptr, low, high, &steps);
    errors_of(w, group, steps, errors);
    for (int c = 0; c < kEight; c++) {
      const bool better = errors[c] < least[c];
      least[c] = better ? errors[c] : least[c];
      best.scale[c] = better ? steps.scale[c] : best.scale[c];
      best.inverse[c] = better ? steps.inverse[c] : best.inverse[c];
      best.zero[c] = better ? steps.zero[c] : best.zero[c];
    }
  }
  for (int64_t k = 0; k < group; k++) {
    uint8_t* to = numbers + k / 8 * count * 4 + k % 4;
    for (int64_t c = 0; c < count; c++) {
      const auto u = static_cast<uint8_t>(whole_of(w[k][c], best.inverse[c], best.zero[c]));
      to[4 * c] = static_cast<uint8_t>(k % 8 < 4 ? u : to[4 * c] | u << 4);
    }
  }
  for (int64_t c = 0; c < count; c++) {
    const BFloat16 half = narrow<BFloat16>(best.scale[c]);
    std::memcpy(scales + 2 * c, &half, 2);
    if (zeros != nullptr) zeros[c] = static_cast<uint8_t>(best.zero[c] * 16.0f);
  }
}

// A block of `width` rows.
template <typename T>
void round_block(const T* rows, int64_t width, int64_t K, NibbleForm form, uint8_t* block) {
  const int64_t group = form.group();
  std::vector<float> room(group * kEight);
  auto* w = reinterpret_cast<Columns*>(room.data());
  for (int64_t k = 0; k < K; k += group, block += width * form.bytes) {
    uint8_t* scales = block + width * group / 2;
    uint8_t* zeros = form.zeros() ? scales + 2 * width : nullptr;
    for (int64_t column = 0; column < width; column += kEight) {
      const int64_t count = std::min(kEight, width - column), values = std::min(group, K - k);
      std::fill(room.begin(), room.end(), 0.0f);
      for (int64_t c = 0; c < count; c++) {
        for (int64_t i = 0; i < values; i++) w[i][c] = widen(rows[(column + c) * K + k + i]);
      }
      round_group(
          w, group, count, block + column * group / 2, scales + 2 * column, zeros == nullptr ? nullptr : zeros + column);
    }
  }
}

void pack_int4(Tensor out, Tensor weight_in) {
  const Tensor weight = contiguous(weight_in);
  const bool wide = weight.dtype() == aoti_torch_dtype_float32();
  const NibbleForm form{out.dim() == 3 ? out.size(2) : 0};
  const bool fits = form.valid() && out.dtype() == aoti_torch_dtype_uint8() && out.is_contiguous() &&
      weight.dim() == 2 && out.size(0) == weight.size(0) && out.size(1) == form.groups(weight.size(1)) &&
      (wide || weight.dtype() == aoti_torch_dtype_bfloat16());
  if (!fits) {
    throw std::runtime_error(
        "nxd: pack_int4: a weight of shape " + text(weight) + " (dtype number " + std::to_string(weight.dtype()) +
        ") into one of shape " + text(out) + ", which is uint8 [N, groups, bytes]");
  }
  const int64_t N = weight.size(0), K = weight.size(1), row_bytes = out.size(1) * form.bytes;
  auto* to = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(0, (N + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kColumns; column < std::min(end * kColumns, N); column += kColumns) {
      const int64_t width = std::min(kColumns, N - column);
      if (wide) {
        round_block(static_cast<const float*>(weight.data_ptr()) + column * K, width, K, form, to + column * row_bytes);
      } else {
        round_block(static_cast<const BFloat16*>(weight.data_ptr()) + column * K, width, K, form, to + column * row_bytes);
      }
    }
  });
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) { m.def("pack_int4(Tensor(a!) out, Tensor weight) -> ()"); }

NXD_IMPL(CPU, m) { m.impl("pack_int4", TORCH_BOX(&nxd::pack_int4)); }
