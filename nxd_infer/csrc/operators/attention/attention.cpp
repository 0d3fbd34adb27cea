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

Tensor with_dense_rows(const Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1 ? x : contiguous(x); }

Strided strided(const Tensor& x) {
  const auto width = static_cast<int64_t>(x.element_size());
  return {static_cast<char*>(x.data_ptr()), {x.stride(0) * width, x.stride(1) * width, x.stride(2) * width}};
}

double element(ScalarType type, const char* row, int64_t i) {
  switch (type) {
    case ScalarType::Float:
      return reinterpret_cast<const float*>(row)[i];
    case ScalarType::BFloat16:
      return widen(reinterpret_cast<const BFloat16*>(row)[i]);
    case ScalarType::Half:
      return widen(reinterpret_cast<const c10::Half*>(row)[i]);
    default:
      return reinterpret_cast<const double*>(row)[i];
  }
}

void set_element(ScalarType type, char* row, int64_t i, double x) {
  switch (type) {
    case ScalarType::Float:
      reinterpret_cast<float*>(row)[i] = static_cast<float>(x);
      return;
    case ScalarType::BFloat16:
      reinterpret_cast<BFloat16*>(row)[i] = narrow<BFloat16>(static_cast<float>(x));
      return;
    case ScalarType::Half:
      reinterpret_cast<c10::Half*>(row)[i] = static_cast<float>(x);
      return;
    default:
      reinterpret_cast<double*>(row)[i] = x;
  }
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

void check_rows(const Attention& x, int64_t B, int64_t N) {
  for (int64_t b = 0; b < B; b++) {
    const std::string row = "[" + std::to_string(b) + "] = ";
    if (x.start[b] < 0) refuse("start" + row + std::to_string(x.start[b]) + " is negative");
    if (x.length[b] < 0 || x.length[b] > x.S) {
      refuse("length" + row + std::to_string(x.length[b]) + " is not in 0 .. " + std::to_string(x.S));
    }
    const int64_t count = live(x, b);
    const int64_t used = count == 0 ? 0 : (x.start[b] + count + x.L - 1) / x.L;
    for (int64_t i = 0; i < used; i++) {
      const int64_t block = x.table[b * x.n + i];
      if (block < 0 || block >= N) {
        refuse(
            "block_table[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(block) +
            " is none of the cache's " + std::to_string(N) + " blocks");
      }
    }
  }
}

// Writes the live positions of x [B, S, KH, D] into the cache; padding is not written.
void write(const Attention& x, const Strided& from, ScalarType type, const Strided& cache, int64_t B) {
  const int64_t bytes = x.D * (x.cache_type == ScalarType::Double ? 8 : x.cache_type == ScalarType::Float ? 4 : 2);
  parallel_for(0, B * x.S, kWorkerBytes / (x.KH * bytes) + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t b = i / x.S, s = i % x.S, p = x.start[b] + s;
      if (s >= live(x, b)) continue;
      for (int64_t kh = 0; kh < x.KH; kh++) {
        const char* row = from.at(b, s, kh);
        char* to = cache.at(x.table[b * x.n + p / x.L], kh, p % x.L);
        if (type == x.cache_type) {
          std::memcpy(to, row, bytes);
          continue;
        }
        for (int64_t d = 0; d < x.D; d++) set_element(x.cache_type, to, d, element(type, row, d));
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
void enlarge_pages(const Attention& x, const Strided& cache, int64_t B) {
  if (cache.stride[0] < kLargePage / 2 || cache.stride[2] <= 0) return;  // small blocks share pages with others
  const int64_t period = std::min(x.L, std::max<int64_t>(kLargePage / cache.stride[2], 1));  // positions in a page
  int64_t asked = 0;
  for (int64_t b = 0; b < B; b++) {
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

std::vector<Tile> cut(const Attention& x, int64_t B) {
  const int64_t most = tile_rows(x);
  std::vector<Tile> tiles;
  tiles.reserve(B * x.KH * ((x.S * x.G + most - 1) / most));
  for (int64_t b = 0; b < B; b++) {
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

void attend(const Attention& x, int64_t B) {
  const AttentionKernel& kernel = find_kernel(x);
  const std::vector<Tile> tiles = cut(x, B);
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

// A call with its operands checked and made dense where they must be.
struct Checked {
  Tensor q, k, v, k_cache, v_cache, table, start, length, out;
  double scale;

  Checked(
      const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& k_cache_in, const Tensor& v_cache_in,
      const Tensor& table_in, const Tensor& start_in, const Tensor& length_in, double scale_in)
      : q(q_in), k(k_in), v(v_in), k_cache(k_cache_in), v_cache(v_cache_in), table(table_in), start(start_in),
        length(length_in), out(q_in), scale(scale_in) {
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
    check_shape(k_cache, {N, KH, L, D}, "k_cache");
    check_shape(v_cache, {N, KH, L, D}, "v_cache");
    check_shape(table, {B, n}, "block_table");
    check_shape(start, {B}, "start");
    check_shape(length, {B}, "length");
    for (const Tensor* x : {&q, &k, &v, &k_cache, &v_cache}) check_floating(*x, "an operand");
    if (v_cache.scalar_type() != k_cache.scalar_type()) refuse("the caches differ in dtype");
    if (D > 1 && (k_cache.stride(3) != 1 || v_cache.stride(3) != 1)) refuse("the caches' last dimension is not dense");
    out = new_like(q, {B, S, H, D});
    if (out.numel() == 0) return;
    for (Tensor* x : {&q, &k, &v}) *x = with_dense_rows(*x);
    table = integers(table, "block_table");
    start = integers(start, "start");
    length = integers(length, "length");
  }

  Attention attention() const {
    return {
        q.scalar_type(), k_cache.scalar_type(), q.size(1), k.size(2), q.size(2) / k.size(2), q.size(3),
        k_cache.size(2), table.size(1), scale, strided(q), strided(out), strided(k_cache), strided(v_cache),
        static_cast<const int64_t*>(table.data_ptr()), static_cast<const int64_t*>(start.data_ptr()),
        static_cast<const int64_t*>(length.data_ptr()),
    };
  }
};

// What a call reads and writes, without tensors.
struct Call {
  Attention x;
  Strided k, v;
  ScalarType k_type, v_type;
  int64_t B, N;

  explicit Call(const Checked& all)
      : x(all.attention()), k(strided(all.k)), v(strided(all.v)), k_type(all.k.scalar_type()),
        v_type(all.v.scalar_type()), B(all.q.size(0)), N(all.k_cache.size(0)) {}

  void run() const {
    check_rows(x, B, N);
    write(x, k, k_type, x.k_cache, B);
    write(x, v, v_type, x.v_cache, B);
    enlarge_pages(x, x.k_cache, B);
    enlarge_pages(x, x.v_cache, B);
    for (int64_t b = 0; b < B; b++) {  // the results of padding
      for (int64_t s = live(x, b); s < x.S; s++) std::memset(x.out.at(b, s, 0), 0, x.out.stride[1]);
    }
    attend(x, B);
  }
};

Tensor cache_attention(
    Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor table, Tensor start, Tensor length,
    double scale) {
  const Checked all(q, k, v, k_cache, v_cache, table, start, length, scale);
  if (all.out.numel() > 0) Call(all).run();
  return all.out;
}

class PlannedAttention : public Planned {
 public:
  explicit PlannedAttention(const Checked& all) : call_(all) {}
  void point(char* const* data) override {
    for (Strided* to : {&call_.x.q, &call_.k, &call_.v, &call_.x.k_cache, &call_.x.v_cache}) to->data = *data++;
    for (const int64_t** to : {&call_.x.table, &call_.x.start, &call_.x.length}) {
      *to = reinterpret_cast<const int64_t*>(*data++);
    }
    call_.x.out.data = *data;
  }
  void run() override { call_.run(); }

 private:
  Call call_;
};

std::unique_ptr<Planned> plan_attention(const PlannedArgument* given) {
  const auto tensor = [&](int64_t i) { return tensor_of(given[i]); };
  for (int64_t i : {0, 1, 2}) {
    if (tensor(i).dim() != 4 || (tensor(i).stride(3) != 1 && tensor(i).size(3) != 1)) return nullptr;
  }
  for (int64_t i : {5, 6, 7}) {
    if (!tensor(i).is_contiguous()) return nullptr;
  }
  const Checked all(
      tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), tensor(5), tensor(6), tensor(7), given[8].number);
  return all.out.numel() > 0 ? std::make_unique<PlannedAttention>(all) : nullptr;
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
