// Multiplication by packed bfloat16 weights with AMX tiles.
#include "machine/cpu.h"
#include "packed/packed.h"
#include "machine/tiles.h"

#if NXD_X86

#include <immintrin.h>

namespace nxd {
namespace {

constexpr int64_t kTile = 16 * 32;          // values in a tile
constexpr int64_t kSpan = 8;                // steps of k at a time: 16 KB of weights stay in L1 beside 16 KB of x
constexpr int64_t kOut = 4 * kColumns;      // bytes from one row of sums to the next
constexpr int64_t kUnder = 16 * kColumns;   // sums of 16 rows

// Prefetches the rows of a tile of weights that a later step reads.
NXD_INLINE void fetch(const BFloat16* tile, int64_t stride) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; line++) __builtin_prefetch(tile + line * stride);
}

// One step: 16 rows times kLanes * 16 columns. `stride` in values, from one pair of k to the next.
template <int kLanes, bool kAhead>
NXD_AMX NXD_INLINE void step_of(const BFloat16* x, const BFloat16* w, int64_t stride) {
  _tile_loadd(4, x, 64);
  if (kAhead) fetch(w + 16 * stride, stride);
  _tile_loadd(5, w, 2 * stride);
  _tile_dpbf16ps(0, 4, 5);
  if (kLanes > 1) {
    if (kAhead) fetch(w + 16 * stride + 32, stride);
    _tile_loadd(6, w + 32, 2 * stride);
    _tile_dpbf16ps(1, 4, 6);
  }
}

// 16 rows and a whole block, for decoding. The weights come from memory, so they are prefetched.
template <int kLanes>
NXD_AMX void few_rows(const BFloat16* x, const Panel<BFloat16>& panel, float* out) {
  constexpr int64_t stride = 2 * kLanes * kLane;
  _tile_zero(0);
  if (kLanes > 1) _tile_zero(1);
  for (int64_t step = 0; step < panel.steps; step++) {
    step_of<kLanes, true>(x + step * kTile, panel.body + step * 16 * stride, stride);
  }
  if (panel.tail != nullptr) step_of<kLanes, false>(x + panel.steps * kTile, panel.tail, stride);
  _tile_stored(0, out, kOut);
  if (kLanes > 1) _tile_stored(1, out + kLane, kOut);
}

// 32 rows and 32 columns over `steps` steps, added to `out` unless these are the first.
NXD_AMX void many_rows(
    const BFloat16* x0, const BFloat16* x1, const BFloat16* w0, const BFloat16* w1, int64_t stride, int64_t steps,
    bool first, float* out) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, kOut);
    _tile_loadd(1, out + kLane, kOut);
    _tile_loadd(2, out + kUnder, kOut);
    _tile_loadd(3, out + kUnder + kLane, kOut);
  }
  for (int64_t step = 0; step < steps; step++) {
    _tile_loadd(4, x0 + step * kTile, 64);
    _tile_loadd(6, w0 + step * 16 * stride, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + step * 16 * stride, 2 * stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1 + step * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kOut);
  _tile_stored(1, out + kLane, kOut);
  _tile_stored(2, out + kUnder, kOut);
  _tile_stored(3, out + kUnder + kLane, kOut);
}

void multiply_tiles(const Left& x, const Panel<BFloat16>& panel, float* out) {
  settle(x.data);
  const BFloat16* data = static_cast<const BFloat16*>(x.data);
  const int64_t groups = (x.rows + 15) / 16, lanes = panel.width / kLane, stride = 2 * panel.width;
  const int64_t paired = groups == 1 ? 0 : groups / 2 * 2;
  // A narrow block is multiplied twice, the second time into unused columns.
  const auto pairs = [&](const BFloat16* w, int64_t step, int64_t steps) {
    for (int64_t group = 0; group < paired; group += 2) {
      const BFloat16* left = data + group * x.stride + step * kTile;
      many_rows(
          left, left + x.stride, w, lanes == 2 ? w + 32 : w, stride, steps, step == 0, out + group * kUnder);
    }
  };
  for (int64_t step = 0; step < panel.steps && paired > 0; step += kSpan) {
    const int64_t steps = panel.steps - step < kSpan ? panel.steps - step : kSpan;
    pairs(panel.body + step * 16 * stride, step, steps);
  }
  if (panel.tail != nullptr) pairs(panel.tail, panel.steps, 1);
  if (paired < groups) {
    const BFloat16* left = data + paired * x.stride;
    float* to = out + paired * kUnder;
    if (lanes == 1) few_rows<1>(left, panel, to);
    if (lanes == 2) few_rows<2>(left, panel, to);
  }
  settle(out);
}

} // namespace

const Kernel<BFloat16>& tile_kernel() {
  static const Kernel<BFloat16> kernel{multiply_tiles, 32, false, true, 16, tiles_begin, tiles_end};
  return kernel;
}

} // namespace nxd

#endif
