// Setup and release of AMX tiles, for every kernel that uses them.
#pragma once

#include "machine/cpu.h"
#include "machine/scalar.h"

#include <cstdint>

#if NXD_X86

#include <immintrin.h>

namespace nxd {

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The intrinsics read memory without telling the compiler: forces pending writes to `memory`.
NXD_INLINE void settle(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// Eight tiles of 16 rows of 64 bytes, until tiles_end().
NXD_AMX inline void tiles_begin() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = 16;
  }
  settle(&shapes);
  _tile_loadconfig(&shapes);
}

NXD_AMX inline void tiles_end() { _tile_release(); }

} // namespace nxd

#endif
