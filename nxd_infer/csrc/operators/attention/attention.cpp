// cache_attention: writes the new keys and values, then shares the tiles of attention.h among threads. Schema, shapes
// and meaning are those of nxd_infer/ops/attention.py.
#include "attention/attention.h"
#include "machine/cpu.h"
#include "attention/large_pages.h"
#include "machine/parallel.h"
#include "interface/plans.h"
#include "interface/registration.h"
#include "machine/scalar.h"
#include "interface/tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kWorkerBytes = 64 * 1024;        // of keys and values that justify another thread
constexpr int64_t kPartialBytes = 4 * 1024 * 1024; // of partial results, at most
constexpr int64_t kPageTurns = 64;                 // pages due at about the same time are collapsed in turn
constexpr int64_t kTilesPerThread = 4;             // of equal length; with fewer, threads share the chunks of tiles

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("nxd: cache_attention: " + what); }

void check_shape(const Tensor& x, std::initializer_list<int64_t> shape, const char* name) {
  const auto sizes = x.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    refuse(std::string(name) + " has shape " + text(sizes) + ", not " + text(shape));
  }
}

bool is_int8(const Tensor& x) { return x.scalar_type() == ScalarType::Char; }

void check_floating(const Tensor& x, const char* name) {
  const auto type = x.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half &&
      type != ScalarType::Double) {
    refuse(std::string(name) + " is neither float32, bfloat16, float16 nor float64");
  }
}

Tensor integers(const Tensor& x, const char* name) {
  if (x.scalar_type() != ScalarType::Long) refuse(std::string(name) + " is not int64");
  return contiguous(x);
}

bool has_dense_rows(const Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1; }

// x in the dtype of `cache`, with dense rows.
Tensor fitting(const Tensor& x, const Tensor& cache) {
  if (x.dtype() == cache.dtype()) return has_dense_rows(x) ? x : contiguous(x);
  Tensor y = new_like(cache, shape_of(x));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(y.get(), x.get(), 0));
  return y;
}

Strided strided(const Tensor& x) {
  const auto width = static_cast<int64_t>(x.element_size());
  return {static_cast<char*>(x.data_ptr()), {x.stride(0) * width, x.stride(1) * width, x.stride(2) * width}};
}

// A thread's memory, kept between calls.
class Buffer {
 public:
  char* get(int64_t bytes) {
    if (bytes > size_) {
      memory_ = std::make_unique<char[]>(bytes + 64);
      size_ = bytes;
    }
    return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// Calls work(item, scratch) for every item, on the next free thread.
template <typename Work>
void share(int64_t items, int64_t workers, int64_t scratch_bytes, const Work& work) {
  std::atomic<int64_t> next{0};
  work_together(std::min(items, workers), [&](int64_t) {
    static thread_local Buffer buffer;
    char* scratch = buffer.get(scratch_bytes);
    for (int64_t item = next++; item < items; item = next++) work(item, scratch);
  });
}

const AttentionKernel& find_kernel(const Attention& x) {
  if (x.q_type == ScalarType::Double) return attention_portable_f64();
#if NXD_X86
  if (cpu() >= Cpu::amx_bf16) return attention_amx_bf16();
  if (cpu() >= Cpu::avx512_bf16) return attention_avx512_bf16();
  if (cpu() >= Cpu::avx512) return attention_avx512();
  if (cpu() >= Cpu::avx2) return attention_avx2();
#endif
  return attention_portable();
}

// The number of live queries of row b: within its length and its blocks.
int64_t live(const Attention& x, int64_t b) {
  return std::clamp<int64_t>(x.n * x.L - x.start[b], 0, x.length[b]);
}

void check_rows(const Attention& x) {
  for (int64_t b = 0; b < x.B; b++) {
    const std::string row = "[" + std::to_string(b) + "] = ";
    if (x.start[b] < 0) refuse("start" + row + std::to_string(x.start[b]) + " is negative");
    if (x.length[b] < 0 || x.length[b] > x.S) {
      refuse("length" + row + std::to_string(x.length[b]) + " is not in 0 .. " + std::to_string(x.S));
    }
    const int64_t count = live(x, b);
    const int64_t used = count == 0 ? 0 : (x.start[b] + count + x.L - 1) / x.L;
    for (int64_t i = 0; i < used; i++) {
      const int64_t block = x.table[b * x.n + i];
      if (block < 0 || block >= x.N) {
        refuse(
            "block_table[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(block) +
            " is none of the cache's " + std::to_string(x.N) + " blocks");
      }
    }
  }
}

// Writes D numbers in eight bits and their scale, the largest of them / 127. A NaN makes the scale one.
template <typename T>
void round_row(const char* from, char* to, int64_t D) {
  const T* x = reinterpret_cast<const T*>(from);
  float most = 0;
  for (int64_t d = 0; d < D; d++) {
    const float size = std::abs(static_cast<float>(widen(x[d])));
    most = size > most || size != size ? size : most;
  }
  const float scale = most == 0 ? 1 : most / 127;
  for (int64_t d = 0; d < D; d++) {
    const float q = std::nearbyint(static_cast<float>(widen(x[d])) / scale);
    to[d] = static_cast<char>(q == q ? static_cast<int8_t>(std::clamp(q, -127.0f, 127.0f)) : 0);
  }
  std::memcpy(to + D, &scale, sizeof scale);
}

void round_row(ScalarType type, const char* from, char* to, int64_t D) {
  switch (type) {
    case ScalarType::Float:
      return round_row<float>(from, to, D);
    case ScalarType::BFloat16:
      return round_row<BFloat16>(from, to, D);
    case ScalarType::Half:
      return round_row<c10::Half>(from, to, D);
    default:
      return round_row<double>(from, to, D);
  }
}

// Writes the live positions of `from` [B, S, KH, D] into the cache; padding is not written.
void write(const Attention& x, const Strided& from, const Strided& cache) {
  const bool rounds = x.cache_type == ScalarType::Char;
  const int64_t bytes = x.D * (x.kv_type == ScalarType::Double ? 8 : x.kv_type == ScalarType::Float ? 4 : 2);
  parallel_for(0, x.B * x.S, kWorkerBytes / (x.KH * bytes) + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t b = i / x.S, s = i % x.S, p = x.start[b] + s;
      if (s >= live(x, b)) continue;
      for (int64_t kh = 0; kh < x.KH; kh++) {
        char* to = cache.at(x.table[b * x.n + p / x.L], kh, p % x.L);
        if (rounds) {
          round_row(x.kv_type, from.at(b, s, kh), to, x.D);
        } else {
          std::memcpy(to, from.at(b, s, kh), bytes);
        }
      }
    }
  });
}

// Neighbours get different turns, and so do pages 64 or 4096 apart, like those of slots and layers.
int64_t turn_of(int64_t page) { return (page ^ page >> 6 ^ page >> 12) % kPageTurns; }

// Requests huge pages when this call fills a block past their middle. With small pages a core misses its TLB every 4
// KiB; but a huge page is allocated as a whole, so a context has to use it (if two blocks share a page, one of them).
// Pages that fill up together take turns over the quarter after their middle: a step has time for a few, not for those
// of all rows and layers.
void enlarge_pages(const Attention& x, const Strided& cache) {
  if (cache.stride[0] < kLargePage / 2 || cache.stride[2] <= 0) return;  // small blocks share pages with others
  const int64_t period = std::min(x.L, std::max<int64_t>(kLargePage / cache.stride[2], 1));  // positions in a page
  int64_t asked = 0;
  for (int64_t b = 0; b < x.B; b++) {
    const int64_t end = x.start[b] + live(x, b);
    for (int64_t first = x.start[b]; first < end; first = (first / x.L + 1) * x.L) {
      const int64_t block = x.table[b * x.n + first / x.L];
      const int64_t low = first % x.L, high = std::min(x.L, low + end - first);
      for (int64_t page = low / period; page * period < high; page++) {
        const int64_t middle = page * period + period / 2;
        for (int64_t kh = 0; kh < x.KH && middle < x.L; kh++) {
          const char* address = cache.at(block, kh, middle);
          const int64_t wait = turn_of(large_page(address)) * period / (4 * kPageTurns);
          const int64_t due = std::min(middle + wait, x.L - 1);
          if (due < low || due >= high || large_page(address) == asked) continue;
          asked = large_page(address);  // heads may share one
          make_large_page(address);
        }
      }
    }
  }
}

// A few queries, such as those verifying a draft, are bit-equal to separate calls.
int64_t tile_rows(const Attention& x) { return x.S <= kFewQueries && x.G <= kFewRows ? kFewRows : kRows; }

std::vector<Tile> cut(const Attention& x) {
  const int64_t most = tile_rows(x);
  std::vector<Tile> tiles;
  tiles.reserve(x.B * x.KH * ((x.S * x.G + most - 1) / most));
  for (int64_t b = 0; b < x.B; b++) {
    const int64_t rows = live(x, b) * x.G;
    for (int64_t kh = 0; kh < x.KH; kh++) {
      for (int64_t row = 0; row < rows; row += most) {
        Tile tile{b, kh, row, std::min(most, rows - row), 0};
        tile.keys = tile.position(x, tile.rows - 1) + 1;
        tiles.push_back(tile);
      }
    }
  }
  // The longest first, so that no thread finishes long after the others.
  const auto longer = [](const Tile& a, const Tile& b) { return a.chunks() > b.chunks(); };
  if (!std::is_sorted(tiles.begin(), tiles.end(), longer)) std::stable_sort(tiles.begin(), tiles.end(), longer);
  return tiles;
}

void attend(const Attention& x) {
  const AttentionKernel& kernel = find_kernel(x);
  const std::vector<Tile> tiles = cut(x);
  const int64_t count = static_cast<int64_t>(tiles.size()), scratch = kernel.scratch_bytes(x);
  std::vector<int64_t> first_chunk{0};
  first_chunk.reserve(count + 1);
  int64_t chunks = 0, work = 0, partial = 0;
  for (const Tile& tile : tiles) {
    first_chunk.push_back(chunks += tile.chunks());
    work += tile.keys * std::max<int64_t>(tile.rows, 4) * x.D;
    partial = std::max(partial, kernel.partial_bytes(x, tile.rows));
  }
  const int64_t workers = std::clamp<int64_t>(work / kWorkerBytes, 1, thread_count());
  const bool even = count > 0 && tiles[0].chunks() * kTilesPerThread * workers <= chunks;  // the first is the longest

  if (workers == 1 || even || chunks == count || chunks * partial > kPartialBytes) {
    share(count, workers, scratch + 2 * partial, [&](int64_t item, char* memory) {
      const Tile& tile = tiles[item];
      const Tile* next = item + workers < count ? &tiles[item + workers] : nullptr;
      char *result = memory + scratch, *later = result + partial;
      kernel.queries(x, tile, memory);
      kernel.chunk(x, tile, 0, next, memory, result);
      for (int64_t c = 1; c < tile.chunks(); c++) {
        kernel.chunk(x, tile, c, next, memory, later);
        kernel.merge(x, tile, result, later);
      }
      kernel.finish(x, tile, result);
    });
    return;
  }
  static thread_local Buffer buffer;
  char* partials = buffer.get(chunks * partial);
  // Each thread takes consecutive chunks, so that it knows what it reads next.
  share(workers, workers, scratch, [&](int64_t worker, char* memory) {
    const int64_t begin = chunks * worker / workers, end = chunks * (worker + 1) / workers;
    int64_t place = std::upper_bound(first_chunk.begin(), first_chunk.end(), begin) - first_chunk.begin() - 1;
    for (int64_t item = begin; item < end; place++) {
      const Tile* next = first_chunk[place + 1] < end ? &tiles[place + 1] : nullptr;
      kernel.queries(x, tiles[place], memory);
      for (; item < std::min(end, first_chunk[place + 1]); item++) {
        kernel.chunk(x, tiles[place], item - first_chunk[place], next, memory, partials + item * partial);
      }
    }
  });
  share(count, workers, 0, [&](int64_t item, char*) {
    char* result = partials + first_chunk[item] * partial;
    for (int64_t c = 1; c < tiles[item].chunks(); c++) kernel.merge(x, tiles[item], result, result + c * partial);
    kernel.finish(x, tiles[item], result);
  });
}

// The tensors of a call, in the order of the operator's arguments.
struct Operands {
  Tensor q, k, v, k_cache, v_cache, table, start, length;
};

// Throws for operands that do not fit together; makes dense what must be. The result is to be written to `out`.
Attention checked(Operands& all, const Tensor& out, double scale) {
  Tensor &q = all.q, &k = all.k, &v = all.v, &k_cache = all.k_cache, &v_cache = all.v_cache, &table = all.table;
  if (q.dim() != 4 || k.dim() != 4 || k_cache.dim() != 4 || table.dim() != 2) {
    refuse("q, k and the caches have four dimensions and block_table has two");
  }
  const int64_t B = q.size(0), S = q.size(1), H = q.size(2), D = q.size(3);
  const int64_t KH = k.size(2), N = k_cache.size(0), L = k_cache.size(2), n = table.size(1);
  if (KH < 1 || H % KH != 0) {
    refuse(std::to_string(H) + " query heads do not divide by " + std::to_string(KH) + " key/value heads");
  }
  check_shape(k, {B, S, KH, D}, "k");
  check_shape(v, {B, S, KH, D}, "v");
  const int64_t width = is_int8(k_cache) ? D + static_cast<int64_t>(sizeof(float)) : D;
  check_shape(k_cache, {N, KH, L, width}, "k_cache");
  check_shape(v_cache, {N, KH, L, width}, "v_cache");
  check_shape(table, {B, n}, "block_table");
  check_shape(all.start, {B}, "start");
  check_shape(all.length, {B}, "length");
  for (const Tensor* x : {&q, &k, &v}) check_floating(*x, "an operand");
  if (!is_int8(k_cache)) check_floating(k_cache, "a cache that is not int8");
  if (v_cache.scalar_type() != k_cache.scalar_type()) refuse("the caches differ in dtype");
  if (D > 1 && (k_cache.stride(3) != 1 || v_cache.stride(3) != 1)) refuse("the caches' last dimension is not dense");
  q = fitting(q, q);
  for (Tensor* x : {&k, &v}) *x = fitting(*x, is_int8(k_cache) ? k : k_cache);
  table = integers(table, "block_table");
  all.start = integers(all.start, "start");
  all.length = integers(all.length, "length");
  const auto numbers = [](const Tensor& x) { return static_cast<const int64_t*>(x.data_ptr()); };
  return {
      q.scalar_type(), k.scalar_type(), k_cache.scalar_type(), B, S, KH, H / KH, D, N, L, n, scale, strided(q), strided(k), strided(v),
      strided(out), strided(k_cache), strided(v_cache), numbers(table), numbers(all.start), numbers(all.length)};
}

class PlannedAttention : public Planned {
 public:
  explicit PlannedAttention(const Attention& x) : x_(x) {}
  void point(char* const* data) override {
    for (Strided* to : {&x_.q, &x_.k, &x_.v, &x_.k_cache, &x_.v_cache}) to->data = *data++;
    for (const int64_t** to : {&x_.table, &x_.start, &x_.length}) *to = reinterpret_cast<const int64_t*>(*data++);
    x_.out.data = *data;
  }
  void run() override {
    check_rows(x_);
    write(x_, x_.k, x_.k_cache);
    write(x_, x_.v, x_.v_cache);
    enlarge_pages(x_, x_.k_cache);
    enlarge_pages(x_, x_.v_cache);
    for (int64_t b = 0; b < x_.B; b++) {  // the results of padding
      for (int64_t s = live(x_, b); s < x_.S; s++) std::memset(x_.out.at(b, s, 0), 0, x_.out.stride[1]);
    }
    attend(x_);
  }

 private:
  Attention x_;
};

Tensor cache_attention(
    Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor table, Tensor start, Tensor length,
    double scale) {
  Operands all{q, k, v, k_cache, v_cache, table, start, length};
  const Tensor out = new_like(q, shape_of(q));
  const Attention x = checked(all, out, scale);
  if (out.numel() > 0) PlannedAttention(x).run();
  return out;
}

std::unique_ptr<Planned> plan_attention(const PlannedArgument* arguments) {
  const auto tensor = [&](int64_t i) { return tensor_of(arguments[i]); };
  Operands all{tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), tensor(5), tensor(6), tensor(7)};
  for (const Tensor* x : {&all.q, &all.k, &all.v}) {
    if (x->dim() != 4 || !has_dense_rows(*x) || x->numel() == 0) return nullptr;
  }
  for (const Tensor* x : {&all.table, &all.start, &all.length}) {
    if (!x->is_contiguous()) return nullptr;
  }
  const Tensor& stored = is_int8(all.k_cache) ? all.k : all.k_cache;
  if (all.k.dtype() != stored.dtype() || all.v.dtype() != stored.dtype()) return nullptr;
  const Tensor out = new_like(all.q, shape_of(all.q));
  return std::make_unique<PlannedAttention>(checked(all, out, arguments[8].number));
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def(
      "cache_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, "
      "Tensor start, Tensor length, float scale) -> Tensor");
}

NXD_IMPL(CPU, m) { m.impl("cache_attention", TORCH_BOX(&nxd::cache_attention)); }

NXD_PLAN(cache_attention, nxd::plan_attention);
