// Multiplying by packed bfloat16 weights with the instructions made for it: dot products of pairs, and tiles.
#include "cpu.h"
#include "packed.h"
#include "tiles.h"

#if NXD_X86

#include <immintrin.h>

#include <cstring>

namespace nxd {
namespace {

// --- dot products ---

constexpr int64_t kMostRows = 12;  // 2 * 12 sums, two weights and a row's pair fit into 32 registers

template <int kRows>
NXD_AVX512_BF16 NXD_INLINE void add_pairs(
    const BFloat16* x, const BFloat16* w0, const BFloat16* w1, __m512* sums0, __m512* sums1) {
  const __m512bh b0 = (__m512bh)_mm512_loadu_si512(w0), b1 = (__m512bh)_mm512_loadu_si512(w1);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    int pair;
    std::memcpy(&pair, x + 2 * row, 4);
    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    sums0[row] = _mm512_dpbf16_ps(sums0[row], a, b0);
    sums1[row] = _mm512_dpbf16_ps(sums1[row], a, b1);
  }
}

template <int kRows>
NXD_AVX512_BF16 void rows(const BFloat16* x, int64_t width, const Panel<BFloat16>& panel, float* out) {
  __m512 sums0[kRows], sums1[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) sums0[row] = sums1[row] = _mm512_setzero_ps();
  for (int64_t step = 0; step < panel.steps; step++) {
    const BFloat16 *w0 = panel.body[0] + step * 2 * kColumns, *w1 = panel.body[1] + step * 2 * kColumns;
    if (kRows <= 4) {
      __builtin_prefetch(reinterpret_cast<const char*>(w0) + kAhead);
      __builtin_prefetch(reinterpret_cast<const char*>(w1) + kAhead);
    }
    add_pairs<kRows>(x + step * 2 * width, w0, w1, sums0, sums1);
  }
  if (panel.tail[0] != nullptr) {
    add_pairs<kRows>(x + panel.steps * 2 * width, panel.tail[0], panel.tail[1], sums0, sums1);
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    _mm512_storeu_ps(out + row * 2 * kColumns, sums0[row]);
    _mm512_storeu_ps(out + row * 2 * kColumns + kColumns, sums1[row]);
  }
}

void multiply_rows(const Left& x, const Panel<BFloat16>& panel, float* out) {
  using Rows = void (*)(const BFloat16*, int64_t, const Panel<BFloat16>&, float*);
  static const Rows some[] = {nullptr, rows<1>, rows<2>, rows<3>, rows<4>,  rows<5>,  rows<6>,
                              rows<7>, rows<8>, rows<9>, rows<10>, rows<11>, rows<12>};
  const BFloat16* group = static_cast<const BFloat16*>(x.data);
  for (int64_t row = 0; row < x.rows; row += x.width, group += x.stride) {
    some[x.rows - row < x.width ? x.rows - row : x.width](group, x.width, panel, out + row * 2 * kColumns);
  }
}

// --- tiles ---

constexpr int64_t kTile = 16 * 32;   // values in a tile
constexpr int64_t kSpan = 8;         // steps of k at a time: 16 KB of weights stay in the first-level cache beside 16 KB of x

NXD_INLINE void fetch(const BFloat16* tile) {
  const char* ahead = reinterpret_cast<const char*>(tile) + kAhead;
#pragma GCC unroll 16
  for (int line = 0; line < 16; line++) __builtin_prefetch(ahead + 64 * line);
}

// 16 rows and 32 columns: what decoding does. The weights come from memory, so they are asked for ahead of time.
NXD_AMX void few_rows(const BFloat16* x, const Panel<BFloat16>& panel, float* out) {
  const BFloat16 *w0 = panel.body[0], *w1 = panel.body[1];
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < panel.steps; step++) {
    fetch(w0 + step * kTile);
    _tile_loadd(4, x + step * kTile, 64);
    _tile_loadd(6, w0 + step * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    fetch(w1 + step * kTile);
    _tile_loadd(7, w1 + step * kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (panel.tail[0] != nullptr) {
    _tile_loadd(4, x + panel.steps * kTile, 64);
    _tile_loadd(6, panel.tail[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel.tail[1], 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + kColumns, 128);
}

// 32 rows and 32 columns over `steps` steps, added to what `out` holds unless these are the first.
NXD_AMX void many_rows(
    const BFloat16* x0, const BFloat16* x1, const BFloat16* w0, const BFloat16* w1, int64_t steps, bool first,
    float* out) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, 128);
    _tile_loadd(1, out + kColumns, 128);
    _tile_loadd(2, out + 16 * 32, 128);
    _tile_loadd(3, out + 16 * 32 + kColumns, 128);
  }
  for (int64_t step = 0; step < steps; step++) {
    _tile_loadd(4, x0 + step * kTile, 64);
    _tile_loadd(6, w0 + step * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + step * kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1 + step * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + kColumns, 128);
  _tile_stored(2, out + 16 * 32, 128);
  _tile_stored(3, out + 16 * 32 + kColumns, 128);
}

void multiply_tiles(const Left& x, const Panel<BFloat16>& panel, float* out) {
  settle(x.data);
  const BFloat16* data = static_cast<const BFloat16*>(x.data);
  const int64_t groups = (x.rows + 15) / 16;
  const int64_t paired = groups == 1 ? 0 : groups / 2 * 2;
  for (int64_t step = 0; step < panel.steps && paired > 0; step += kSpan) {
    const int64_t steps = panel.steps - step < kSpan ? panel.steps - step : kSpan;
    for (int64_t group = 0; group < paired; group += 2) {
      const BFloat16* left = data + group * x.stride + step * kTile;
      many_rows(
          left, left + x.stride, panel.body[0] + step * kTile, panel.body[1] + step * kTile, steps, step == 0,
          out + group * 16 * 32);
    }
  }
  if (panel.tail[0] != nullptr) {
    for (int64_t group = 0; group < paired; group += 2) {
      const BFloat16* left = data + group * x.stride + panel.steps * kTile;
      many_rows(
          left, left + x.stride, panel.tail[0], panel.tail[1], 1, panel.steps == 0, out + group * 16 * 32);
    }
  }
  if (paired < groups) few_rows(data + paired * x.stride, panel, out + paired * 16 * 32);
  settle(out);
}

void nothing() {}

} // namespace

const Kernel<BFloat16>& dot_product_kernel() {
  static const Kernel<BFloat16> kernel{multiply_rows, 2, false, false, kMostRows, nothing, nothing};
  return kernel;
}

const Kernel<BFloat16>& tile_kernel() {
  static const Kernel<BFloat16> kernel{multiply_tiles, 32, false, true, 16, tiles_begin, tiles_end};
  return kernel;
}

} // namespace nxd

#endif
