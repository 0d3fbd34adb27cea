// The kernels for weights of four bits (nibbles.h), and the rounding of the rows that they are multiplied by.
#include "packed/nibbles.h"

#include "machine/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if NXD_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of what its own header leaves undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")  // every product is rounded, with all instructions
#endif

namespace nxd {
namespace {

constexpr int64_t kCellBytes = kCell * kEight / 2;  // of the numbers of eight columns
constexpr int64_t kAhead = 4096;                    // bytes between what is read and what is prefetched

NXD_INLINE void round_cell(const float* x, Cell* cell) {
  float largest = 0;
  bool finite = true;
  for (int64_t k = 0; k < kCell; k++) {
    const float value = std::fabs(x[k]);
    largest = value > largest ? value : largest;
    finite &= value <= std::numeric_limits<float>::max();
  }
  const float found = largest / 127.0f;
  cell->scale = !finite ? std::numeric_limits<float>::quiet_NaN() : found > 0 ? found : 1.0f;
  int sum = 0;
  for (int64_t k = 0; k < kCell; k++) {
    const float value = x[k] / cell->scale;
    const float bounded = value < 127 ? (value > -127 ? value : -127) : 127;
    const int q = static_cast<int>((bounded + 12582912.0f) - 12582912.0f);  // to the nearest, ties to even
    cell->q[k] = static_cast<int8_t>(q);
    sum += q;
  }
  cell->sum = static_cast<float>(sum);
}

template <typename T>
NXD_INLINE void round_body(const T* x, int64_t rows, int64_t K, Cell* cells) {
  for (int64_t k = 0; k < K; k += kCell) {
    for (int64_t row = 0; row < rows; row++, cells++) {
      float wide[kCell] = {};
      const T* from = x + row * K + k;
      if (k + kCell <= K) {
        for (int64_t i = 0; i < kCell; i++) wide[i] = widen(from[i]);
      } else {
        for (int64_t i = 0; i < K - k; i++) wide[i] = widen(from[i]);
      }
      round_cell(wide, cells);
    }
  }
}

NXD_CLONES void round_floats(const float* x, int64_t rows, int64_t K, Cell* cells) { round_body(x, rows, K, cells); }
NXD_CLONES void round_halves(const BFloat16* x, int64_t rows, int64_t K, Cell* cells) { round_body(x, rows, K, cells); }

#define NXD_LEVEL portable
#define NXD_TARGET
#define NXD_BYTES 0
#include "packed/nibble_rows.h"

#if NXD_X86
#define NXD_LEVEL avx2
#define NXD_TARGET NXD_AVX2
#define NXD_BYTES 1
#include "packed/nibble_rows.h"

#define NXD_LEVEL vnni
#define NXD_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")))
#define NXD_BYTES 2
#include "packed/nibble_rows.h"
#endif

void nothing() {}

Kernel<Nibbles>::Multiply best() {
#if NXD_X86
  if (cpu() >= Cpu::avx512_bf16) return vnni::multiply;
  if (cpu() >= Cpu::avx2) return avx2::multiply;
#endif
  return portable::multiply;
}

} // namespace

void round_rows(const float* x, int64_t rows, int64_t K, Cell* cells) { round_floats(x, rows, K, cells); }
void round_rows(const BFloat16* x, int64_t rows, int64_t K, Cell* cells) { round_halves(x, rows, K, cells); }

const Kernel<Nibbles>& nibble_kernel() {
  static const Kernel<Nibbles> chosen{best(), kCell, false, false, 32, nothing, nothing};
  return chosen;
}

} // namespace nxd
