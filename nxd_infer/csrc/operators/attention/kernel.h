// The kernels of attention.h as one template over a vector type. Included by one file per instruction set, which
// defines NXD_TARGET; everything here is local to that file.
//
// Few rows (decode): the cache is read in place, once, and every score is a dot product with a row of K. Many rows
// (prefill): lanes are rows, so only the queries and the result are transposed; K and V are widened into scratch, chunk
// by chunk, unless bfloat16 is multiplied in pairs or tiles (pairs: for an even D).
#include "attention/loops.h"

namespace nxd {
namespace {

template <typename V, typename Bf16>
struct Kernel : Loops<V, Bf16> {
  using Base = Loops<V, Bf16>;
  using typename Base::A;
  using typename Base::ScalarType;
  using Base::W;
  static constexpr bool kPairs = !std::is_void_v<Bf16>;

  static int64_t padded(const Attention& x) { return round_up(x.D, 16); }
  // Larger groups never use the decode kernel, not even for the last rows of a draft: the same query alone would not.
  static bool is_few(const Attention& x, const Tile& tile) { return tile.rows <= kFewRows && x.G <= kFewRows; }

  // A thread's scratch memory besides the partial results.
  struct Scratch {
    A *q, *k, *v, *scores;  // [rows, Dp] or transposed [Dp, R]; [kKeys, Dp] twice; [rows, kKeys] or [kKeys, R]
    BFloat16* pairs;        // [kFewRows, D]

    Scratch(const Attention& x, char* memory) {
      const int64_t Dp = padded(x);
      q = reinterpret_cast<A*>(memory);
      k = q + kRows * Dp;
      v = k + kKeys * Dp;
      scores = v + kKeys * Dp;
      pairs = reinterpret_cast<BFloat16*>(scores + kKeys * kRows);
    }
    static int64_t bytes(const Attention& x) {
      const int64_t Dp = padded(x);
      return (kRows * Dp + 2 * kKeys * Dp + kKeys * kRows) * sizeof(A) + kFewRows * Dp * sizeof(BFloat16);
    }
  };

  // Maximum and sum of each row's weights, and its weighted values: [rows, Dp], or [Dp, R] if lanes are rows.
  struct Partial {
    A *maximum, *sum, *values;

    Partial(const Tile& tile, const char* memory) {
      maximum = reinterpret_cast<A*>(const_cast<char*>(memory));
      sum = maximum + round_up(tile.rows, 16);
      values = sum + round_up(tile.rows, 16);
    }
    static int64_t bytes(const Attention& x, int64_t rows) { return round_up(rows, 16) * (2 + padded(x)) * sizeof(A); }
  };

  template <int R, typename Q, typename C, typename Size>
  NXD_TARGET static void few_rows(
      const Attention& x, const Tile& tile, int64_t r, int64_t begin, int64_t n, const Q* q, int64_t ldq,
      const char* const* k, A* scores, const Partial& out, Size D) {
    Base::template dots<R, Q, C, Size>(q + r * ldq, ldq, k, n, D, scores);
    for (int64_t i = r; i < r + R; i++) {
      const int64_t seen = std::clamp<int64_t>(tile.position(x, i) + 1 - begin, 0, n);
      Base::template soften<Q>(scores + (i - r) * kKeys, seen, n, factor(x), out.maximum + i, out.sum + i);
    }
    if constexpr (std::is_same_v<Q, BFloat16>) {
      Bf16::template weigh_few<R>(scores, k + n, n, D, out.values + r * padded(x), padded(x));
    } else {
      Base::template weigh<R, C>(scores, k + n, n, D, out.values + r * padded(x), padded(x));
    }
  }

  template <typename Q, typename C, typename Size>
  NXD_TARGET static void few(
      const Attention& x, const Tile& tile, int64_t begin, int64_t n, const Q* q, int64_t ldq, const char* const* k,
      A* scores, const Partial& out, Size D) {
    int64_t r = 0;
    for (; r + 4 <= tile.rows; r += 4) few_rows<4, Q, C>(x, tile, r, begin, n, q, ldq, k, scores, out, D);
    for (; r + 2 <= tile.rows; r += 2) few_rows<2, Q, C>(x, tile, r, begin, n, q, ldq, k, scores, out, D);
    for (; r < tile.rows; r++) few_rows<1, Q, C>(x, tile, r, begin, n, q, ldq, k, scores, out, D);
  }

  static A factor(const Attention& x) { return static_cast<A>(x.scale * 1.4426950408889634); }

  // --- the kernels of attention.h ---------------------------------------------------------------------

  // Whether this tile of many rows multiplies bfloat16 operands without widening.
  static bool narrow_many(const Attention& x, const Tile& tile) {
    if constexpr (kPairs) {
      return !is_few(x, tile) && x.q_type == ScalarType::BFloat16 && x.cache_type == ScalarType::BFloat16 &&
             (Bf16::kTiles || x.D % 2 == 0);
    }
    return false;
  }

  NXD_TARGET static void queries(const Attention& x, const Tile& tile, char* memory) {
    const Scratch scratch(x, memory);
    const int64_t Dp = padded(x), R = round_up(tile.rows, 16);
    const bool few = is_few(x, tile);
    const auto at = [&](int64_t r) {
      const int64_t row = tile.row + r;
      return x.q.at(tile.b, row / x.G, tile.kh * x.G + row % x.G);
    };
    if constexpr (kPairs) {
      if (narrow_many(x, tile)) {
        const char* rows[kRows];
        for (int64_t r = 0; r < R; r++) rows[r] = at(std::min(r, tile.rows - 1));  // extra rows are ignored
        return Bf16::queries(rows, R, x.D, reinterpret_cast<BFloat16*>(scratch.q));
      }
    }
    for (int64_t r = 0; r < tile.rows; r++) {
      A* to = few ? scratch.q + r * Dp : scratch.k;
      Base::load_row(x.q_type, at(r), to, x.D, Dp);
      if (!few) {
        for (int64_t d = 0; d < Dp; d++) scratch.q[d * R + r] = to[d];
      } else if (kPairs) {
        for (int64_t d = 0; d < Dp; d++) scratch.pairs[r * Dp + d] = narrow<BFloat16>(static_cast<float>(to[d]));
      }
    }
    for (int64_t r = tile.rows; !few && r < R; r++) {
      for (int64_t d = 0; d < Dp; d++) scratch.q[d * R + r] = 0;
    }
  }

  NXD_TARGET static void chunk(
      const Attention& x, const Tile& tile, int64_t index, const Tile* next, char* memory, char* partial) {
    const Scratch scratch(x, memory);
    const Partial out(tile, partial);
    const int64_t Dp = padded(x), begin = index * kKeys, n = std::min(kKeys, tile.keys - begin);
    // Keys, values, and the next keys: of this context, or past its end, of the next tile's.
    // dots() reads up to 15 extra rows, weigh_pairs() one more after an odd number
    constexpr int64_t kLater = std::max<int64_t>(kAhead + 1, 16);
    const char* k[2 * kKeys + kLater];
    const char **v = k + n, **later = v + n;
    find_rows(x, x.k_cache, tile, begin, n, k);
    find_rows(x, x.v_cache, tile, begin, n, v);
    if (!is_few(x, tile)) return many(x, tile, begin, n, k, v, scratch, out);
    int64_t found = std::min(tile.keys - begin - n, kAhead);
    find_rows(x, x.k_cache, tile, begin + n, found, later);
    if (found == 0 && next != nullptr) find_rows(x, x.k_cache, *next, 0, found = std::min(next->keys, kAhead), later);
    std::fill(later + found, later + kLater, later[found - 1]);
    if (x.cache_type == ScalarType::BFloat16 && sizeof(A) == 4) {
      if constexpr (kPairs) {
        if (x.q_type == ScalarType::BFloat16 && x.D % (2 * W) == 0) {
          const auto run = [&](auto D) {
            few<BFloat16, BFloat16>(x, tile, begin, n, scratch.pairs, Dp, k, scratch.scores, out, D);
          };
          if constexpr (!Base::kAsks) {  // a compile-time size, so that its loops are unrolled
            if (x.D == 64) return run(std::integral_constant<int64_t, 64>{});
            if (x.D == 128) return run(std::integral_constant<int64_t, 128>{});
          }
          return run(x.D);
        }
      }
      if (x.D % W == 0) return few<A, BFloat16>(x, tile, begin, n, scratch.q, Dp, k, scratch.scores, out, x.D);
    }
    const bool native = x.cache_type == (sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float) && x.D % W == 0;
    if (!native) {
      widen_rows(x, n, k, scratch.k);
      widen_rows(x, n, v, scratch.v);
      std::fill(later, later + 16, v[n - 1]);
    }
    few<A, A>(x, tile, begin, n, scratch.q, Dp, k, scratch.scores, out, native ? x.D : Dp);
  }

  // Finds the rows of n positions of the context.
  static void find_rows(
      const Attention& x, const Strided& cache, const Tile& tile, int64_t begin, int64_t n, const char** rows) {
    for (int64_t t = 0; t < n;) {
      const int64_t p = begin + t, block = x.table[tile.b * x.n + p / x.L], at = p % x.L;
      const int64_t run = std::min(n - t, x.L - at);
      const char* row = cache.at(block, tile.kh, at);
      for (int64_t i = 0; i < run; i++) rows[t + i] = row + i * cache.stride[2];
      t += run;
    }
  }

  // Copies n rows of the cache to [n, Dp], and points to the copies.
  NXD_TARGET static void widen_rows(const Attention& x, int64_t n, const char** rows, A* to) {
    const int64_t Dp = padded(x);
    for (int64_t t = 0; t < n; t++) {
      Base::load_row(x.cache_type, rows[t], to + t * Dp, x.D, Dp);
      rows[t] = reinterpret_cast<const char*>(to + t * Dp);
    }
  }

  NXD_TARGET static void many(
      const Attention& x, const Tile& tile, int64_t begin, int64_t n, const char** k, const char** v,
      const Scratch& scratch, const Partial& out) {
    const int64_t Dp = padded(x), R = round_up(tile.rows, 16);
    A seen[kRows];
    for (int64_t r = 0; r < R; r++) {
      const int64_t position = tile.position(x, std::min(r, tile.rows - 1));
      seen[r] = static_cast<A>(std::clamp<int64_t>(position + 1 - begin, 0, n));
    }
    if constexpr (kPairs) {
      if (narrow_many(x, tile)) {
        auto* keys = reinterpret_cast<BFloat16*>(scratch.k);
        auto* values = reinterpret_cast<BFloat16*>(scratch.v);
        Bf16::scores(k, n, x.D, keys, reinterpret_cast<const BFloat16*>(scratch.q), scratch.scores, R);
        Base::template soften_lanes<BFloat16>(scratch.scores, seen, n, R, factor(x), out.maximum, out.sum);
        return Bf16::weigh(v, n, x.D, values, scratch.scores, out.values, R);
      }
    }
    widen_rows(x, n, k, scratch.k);
    widen_rows(x, n, v, scratch.v);
    const int64_t filled = round_up(n, 4);
    std::fill(scratch.k + n * Dp, scratch.k + filled * Dp, A(0));
    Base::products(scratch.k, Dp, 1, filled, x.D, scratch.q, scratch.scores, R);
    Base::template soften_lanes<A>(scratch.scores, seen, n, R, factor(x), out.maximum, out.sum);
    Base::products(scratch.v, 1, Dp, Dp, n, scratch.scores, out.values, R);
  }

  NXD_TARGET static void merge(const Attention& x, const Tile& tile, char* into, const char* later) {
    const Partial a(tile, into), b(tile, later);
    const int64_t Dp = padded(x), R = round_up(tile.rows, 16);
    A keep[kRows], take[kRows];
    for (int64_t r = 0; r < R; r += W) {
      const V ours = V::load(a.maximum + r), theirs = V::load(b.maximum + r), most = V::max(ours, theirs);
      const V kept = Base::exp2(V::sub(ours, most)), taken = Base::exp2(V::sub(theirs, most));
      V::fma(V::load(a.sum + r), kept, V::mul(V::load(b.sum + r), taken)).store(a.sum + r);
      most.store(a.maximum + r);
      kept.store(keep + r);
      taken.store(take + r);
    }
    const bool few = is_few(x, tile);
    const int64_t lines = few ? tile.rows : Dp, length = few ? Dp : R;
    for (int64_t i = 0; i < lines; i++) {
      for (int64_t j = 0; j < length; j += W) {
        const V kept = few ? V::set(keep[i]) : V::load(keep + j), taken = few ? V::set(take[i]) : V::load(take + j);
        A* at = a.values + i * length + j;
        V::fma(V::load(at), kept, V::mul(V::load(b.values + i * length + j), taken)).store(at);
      }
    }
  }

  NXD_TARGET static void finish(const Attention& x, const Tile& tile, const char* partial) {
    const Partial in(tile, partial);
    const int64_t Dp = padded(x), R = round_up(tile.rows, 16);
    const bool few = is_few(x, tile);
    A* line = in.values + round_up(tile.rows, 16) * Dp;
    for (int64_t r = 0; r < tile.rows; r++) {
      const int64_t row = tile.row + r;
      const A factor = 1 / in.sum[r];
      for (int64_t d = 0; d < x.D; d++) line[d] = (few ? in.values[r * Dp + d] : in.values[d * R + r]) * factor;
      Base::store_row(x.q_type, line, x.out.at(tile.b, row / x.G, tile.kh * x.G + row % x.G), x.D);
    }
  }

  static int64_t scratch_bytes(const Attention& x) { return round_up(Scratch::bytes(x), 64); }
  // One extra cache line, for finish().
  static int64_t partial_bytes(const Attention& x, int64_t rows) {
    return round_up(Partial::bytes(x, rows) + padded(x) * static_cast<int64_t>(sizeof(A)), 64);
  }

  static constexpr AttentionKernel table{scratch_bytes, partial_bytes, queries, chunk, merge, finish};
};

} // namespace
} // namespace nxd
