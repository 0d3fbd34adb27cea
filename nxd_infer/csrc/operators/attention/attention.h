// Attention over a cache, split into pieces of fixed size that every thread computes alike: the result of a row depends
// neither on the number of threads nor on the other rows of the batch.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace nxd {

constexpr int64_t kKeys = 128;       // positions of the context in a chunk
constexpr int64_t kRows = 64;        // rows of a tile
constexpr int64_t kFewRows = 8;      // most rows of a tile that uses the decode kernel
constexpr int64_t kAhead = 48;       // prefetch distance, in rows of the cache
constexpr int64_t kFewQueries = 16;  // most queries of a call that is split into tiles of few rows

// A tensor [.., .., .., D] whose last dimension is dense; strides in bytes.
struct Strided {
  char* data;
  int64_t stride[3];

  char* at(int64_t i, int64_t j, int64_t k) const { return data + i * stride[0] + j * stride[1] + k * stride[2]; }
};

// The operands of one call. Shapes as in nxd_infer/ops/attention.py; G = H / KH.
struct Attention {
  torch::headeronly::ScalarType q_type, kv_type, cache_type;
  int64_t B, S, KH, G, D, N, L, n;
  double scale;
  Strided q, k, v, out;      // [B, S, H or KH, D]; k and v in the dtype of the caches, unless these are int8
  Strided k_cache, v_cache;  // [N, KH, L, D]; int8 has D numbers and their scale, a float
  const int64_t* table;      // [B, n]
  const int64_t* start;      // [B]
  const int64_t* length;     // [B]
};

// Rows of one key/value head of one row of the batch, a row being a query of one head: row r is query r / G of head
// kh * G + r % G. `keys` is the number of positions that the last of them sees.
struct Tile {
  int64_t b, kh, row, rows, keys;

  int64_t chunks() const { return (keys + kKeys - 1) / kKeys; }
  // Position of row r's query.
  int64_t position(const Attention& x, int64_t r) const { return x.start[b] + (row + r) / x.G; }
};

// The kernels for one instruction set. Each chunk of a tile is computed separately into a partial result (maximum, sum
// and weighted values per row); the partial results are then merged in order. All sizes are multiples of 64 bytes.
struct AttentionKernel {
  int64_t (*scratch_bytes)(const Attention&);
  int64_t (*partial_bytes)(const Attention&, int64_t rows);
  void (*queries)(const Attention&, const Tile&, char* scratch);  // before the chunks, into the same scratch
  // `next`: the tile that this thread will probably process after this one, or nullptr
  void (*chunk)(const Attention&, const Tile&, int64_t chunk, const Tile* next, char* scratch, char* partial);
  void (*merge)(const Attention&, const Tile&, char* into, const char* later);
  void (*finish)(const Attention&, const Tile&, const char* partial);
};

const AttentionKernel& attention_portable_f64();
const AttentionKernel& attention_portable();
const AttentionKernel& attention_avx2();
const AttentionKernel& attention_avx512();
const AttentionKernel& attention_avx512_bf16();
const AttentionKernel& attention_amx_bf16();

} // namespace nxd
