// The loops of the attention kernels over a vector type (simd.h), on plain pointers. Included through
// attention_kernel.h, once per instruction set, with NXD_TARGET defined.
#include "attention/attention.h"
#include "machine/simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace nxd {
namespace {

NXD_INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Whether the loops prefetch (cpu.h).
template <typename Bf16>
constexpr bool asked() {
  if constexpr (std::is_void_v<Bf16>) {
    return true;
  } else {
    return Bf16::kAsks;
  }
}

// V: the vector type. Bf16: multiplies bfloat16 without widening it (attention_bf16.cpp), or void.
template <typename V, typename Bf16>
struct Loops {
  using A = typename V::Scalar;
  using ScalarType = torch::headeronly::ScalarType;
  static constexpr int W = V::width;
  static constexpr bool kAsks = asked<Bf16>();

  // --- rows of any dtype ------------------------------------------------------------------------------

  template <typename T>
  NXD_TARGET static NXD_INLINE void widen_row(const char* from, A* to, int64_t D, int64_t Dp) {
    const T* x = reinterpret_cast<const T*>(from);
    for (int64_t d = 0; d < D; d++) to[d] = static_cast<A>(widen(x[d]));
    for (int64_t d = D; d < Dp; d++) to[d] = 0;
  }

  // A row of eight bits, followed by its scale.
  NXD_TARGET static NXD_INLINE void scale_row(const char* from, A* to, int64_t D, int64_t Dp) {
    const int8_t* x = reinterpret_cast<const int8_t*>(from);
    float scale;
    std::memcpy(&scale, from + D, sizeof scale);
    for (int64_t d = 0; d < D; d++) to[d] = static_cast<A>(static_cast<float>(x[d]) * scale);
    for (int64_t d = D; d < Dp; d++) to[d] = 0;
  }

  NXD_TARGET static void load_row(ScalarType type, const char* from, A* to, int64_t D, int64_t Dp) {
    switch (type) {
      case ScalarType::Float:
        return widen_row<float>(from, to, D, Dp);
      case ScalarType::BFloat16:
        return widen_row<BFloat16>(from, to, D, Dp);
      case ScalarType::Half:
        return widen_row<c10::Half>(from, to, D, Dp);
      case ScalarType::Char:
        return scale_row(from, to, D, Dp);
      default:
        return widen_row<double>(from, to, D, Dp);
    }
  }

  NXD_TARGET static void store_row(ScalarType type, const A* from, char* to, int64_t D) {
    switch (type) {
      case ScalarType::Float:
        for (int64_t d = 0; d < D; d++) reinterpret_cast<float*>(to)[d] = static_cast<float>(from[d]);
        return;
      case ScalarType::BFloat16:
        for (int64_t d = 0; d < D; d++) {
          reinterpret_cast<BFloat16*>(to)[d] = narrow<BFloat16>(static_cast<float>(from[d]));
        }
        return;
      case ScalarType::Half:
        for (int64_t d = 0; d < D; d++) reinterpret_cast<c10::Half*>(to)[d] = static_cast<float>(from[d]);
        return;
      default:
        for (int64_t d = 0; d < D; d++) reinterpret_cast<double*>(to)[d] = from[d];
    }
  }

  // --- arithmetic -------------------------------------------------------------------------------------

  // 2^x for x <= 0, 0 below the smallest normal number; the polynomial is that of Cephes' exp2f (1e-7).
  NXD_TARGET static NXD_INLINE V exp2(V x) {
    if constexpr (sizeof(A) == 8) {
      return V::each([&](int i) { return std::exp2(x.lane[i]); });
    } else {
      const V bounded = V::where_less(x, V::set(-126), V::set(-126), x);
      const V whole = V::round(bounded), rest = V::sub(bounded, whole);
      V y = V::fma(V::set(1.535336188319500e-4f), rest, V::set(1.339887440266574e-3f));
      y = V::fma(y, rest, V::set(9.618437357674640e-3f));
      y = V::fma(y, rest, V::set(5.550332471162809e-2f));
      y = V::fma(y, rest, V::set(2.402264791363012e-1f));
      y = V::fma(y, rest, V::set(6.931472028550421e-1f));
      y = V::fma(y, rest, V::set(1));
      return V::where_less(x, V::set(-126), V::set(0), V::scale(y, whole));
    }
  }

  // Prefetches a row of the cache that is read once, soon, into L1 only: a line that waits in L2 occupies one of the
  // core's few miss buffers a second time, and evicts data that is read again.
  NXD_TARGET static NXD_INLINE void fetch(const char* row, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, 0, 0);
  }

  // One step of the dot products of R rows and a key: a sum every W / R vectors.
  template <int R, typename Q, typename C>
  NXD_TARGET static NXD_INLINE void add_dots(const Q* q, int64_t ldq, const C* key, V* sum) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      V& to = sum[r * (W / R)];
      if constexpr (std::is_same_v<Q, BFloat16>) {
        to = Bf16::dot(q + r * ldq, key, to);
      } else {
        to = V::fma(V::load(q + r * ldq), V::load(key), to);
      }
    }
  }

  // scores[r][t] = q[r] . k[t] for R rows and the keys up to n, and a few more: `scores` is padded. The rows that are
  // read next follow `k`, at least kAhead + 1 of them; if kAsks, each is prefetched that many rows ahead.
  template <int R, typename Q, typename C, typename Size>
  NXD_TARGET static NXD_INLINE void dots(
      const Q* q, int64_t ldq, const char* const* k, int64_t n, Size D, A* scores) {
    constexpr int T = W / R;
    for (int64_t t0 = 0; t0 < n; t0 += T) {
      for (int64_t t = t0; kAsks && t < std::min(t0 + T, n); t++) fetch(k[t + kAhead], D * static_cast<int64_t>(sizeof(C)));
      V sum[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) sum[i] = V::set(0);
      constexpr int step = std::is_same_v<Q, BFloat16> ? 2 * W : W;
      if constexpr (kAsks) {
        for (int64_t d = 0; d < D; d += step) {
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) add_dots<R>(q + d, ldq, reinterpret_cast<const C*>(k[t0 + t]) + d, sum + t);
        }
      } else {  // in memory order, so that the hardware prefetcher recognises it
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
          for (int64_t d = 0; d < D; d += step) {
            add_dots<R>(q + d, ldq, reinterpret_cast<const C*>(k[t0 + t]) + d, sum + t);
          }
        }
      }
      A lanes[W];
      V::sums(sum).store(lanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) std::memcpy(scores + r * kKeys + t0, lanes + r * T, T * sizeof(A));
    }
  }

  // values[r] = sum over t of weights[r][t] * v[t], for R rows and B vectors of the head dimension. The rows that are
  // read next follow `v`, as in dots(); here the same part of each is prefetched.
  template <int R, int B, typename C>
  NXD_TARGET static NXD_INLINE void weigh_block(
      const A* weights, const char* const* v, int64_t n, int64_t d, A* values, int64_t ldv) {
    V sum[R * B];
#pragma GCC unroll 16
    for (int i = 0; i < R * B; i++) sum[i] = V::set(0);
    for (int64_t t = 0; t < n; t++) {
      const C* value = reinterpret_cast<const C*>(v[t]) + d;
      if (kAsks) fetch(v[t + kAhead] + d * static_cast<int64_t>(sizeof(C)), B * W * static_cast<int64_t>(sizeof(C)));
#pragma GCC unroll 16
      for (int b = 0; b < B; b++) {
        const V x = V::load(value + b * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r * B + b] = V::fma(V::set(weights[r * kKeys + t]), x, sum[r * B + b]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
      for (int b = 0; b < B; b++) sum[r * B + b].store(values + r * ldv + d + b * W);
    }
  }

  template <int R, typename C>
  NXD_TARGET static void weigh(
      const A* weights, const char* const* v, int64_t n, int64_t D, A* values, int64_t ldv) {
    constexpr int B = V::registers / (2 * R) < 8 ? V::registers / (2 * R) : 8;
    int64_t d = 0;
    for (; d + B * W <= D; d += B * W) weigh_block<R, B, C>(weights, v, n, d, values, ldv);
    if constexpr (B == 8) {  // a head of 64 has four vectors: alone, each step would wait for the previous sum
      for (; d + 4 * W <= D; d += 4 * W) weigh_block<R, 4, C>(weights, v, n, d, values, ldv);
    }
    for (; d < D; d += W) weigh_block<R, 1, C>(weights, v, n, d, values, ldv);
  }

  // Reduces the lanes to one number in halves: a serial chain takes four times as long.
  template <typename F>
  NXD_TARGET static NXD_INLINE A fold(V x, F f) {
    A lanes[W];
    x.store(lanes);
#pragma GCC unroll 4
    for (int half = W / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; i++) lanes[i] = f(lanes[i], lanes[i + half]);
    }
    return lanes[0];
  }

  // Turns the first `seen` of n scores into weights 2^(score * factor - maximum); the others get weight 0.
  template <typename Q>
  NXD_TARGET static void soften(A* scores, int64_t seen, int64_t n, A factor, A* maximum, A* sum) {
    const int64_t end = round_up(n, W);
    for (int64_t t = 0; t < end; t += W) V::mul(V::load(scores + t), V::set(factor)).store(scores + t);
    for (int64_t t = seen; t < end; t++) scores[t] = -std::numeric_limits<A>::infinity();
    V most = V::set(std::numeric_limits<A>::lowest());
    for (int64_t t = 0; t < end; t += W) most = V::max(V::load(scores + t), most);
    const A top = fold(most, [](A a, A b) { return a > b ? a : b; });
    V total = V::set(0);
    for (int64_t t = 0; t < end; t += W) {
      V weight = exp2(V::sub(V::load(scores + t), V::set(top)));
      if constexpr (std::is_same_v<Q, BFloat16>) weight = Bf16::rounded(weight);
      weight.store(scores + t);
      total = V::add(total, weight);
    }
    *maximum = top;
    *sum = fold(total, [](A a, A b) { return a + b; });
  }

  // out[i][..] = sum over j of a[i * si + j * sj] * b[j][..], for B vectors of lanes and I a multiple of 4.
  template <int B>
  NXD_TARGET static void product(
      const A* a, int64_t si, int64_t sj, int64_t I, int64_t J, const A* b, A* out, int64_t ld) {
    for (int64_t i = 0; i < I; i += 4) {
      V sum[4 * B];
#pragma GCC unroll 16
      for (int s = 0; s < 4 * B; s++) sum[s] = V::set(0);
      for (int64_t j = 0; j < J; j++) {
        V row[B];
#pragma GCC unroll 16
        for (int s = 0; s < B; s++) row[s] = V::load(b + j * ld + s * W);
#pragma GCC unroll 16
        for (int u = 0; u < 4; u++) {
          const V factor = V::set(a[(i + u) * si + j * sj]);
#pragma GCC unroll 16
          for (int s = 0; s < B; s++) sum[u * B + s] = V::fma(factor, row[s], sum[u * B + s]);
        }
      }
#pragma GCC unroll 16
      for (int u = 0; u < 4; u++) {
#pragma GCC unroll 16
        for (int s = 0; s < B; s++) sum[u * B + s].store(out + (i + u) * ld + s * W);
      }
    }
  }

  NXD_TARGET static void products(
      const A* a, int64_t si, int64_t sj, int64_t I, int64_t J, const A* b, A* out, int64_t ld) {
    constexpr int B = V::registers / 8;
    int64_t lane = 0;
    for (; lane + B * W <= ld; lane += B * W) product<B>(a, si, sj, I, J, b + lane, out + lane, ld);
    for (; lane < ld; lane += W) product<1>(a, si, sj, I, J, b + lane, out + lane, ld);
  }

  // soften() if lanes are rows: scores [n, R], of which row r sees the first seen[r].
  template <typename Q>
  NXD_TARGET static void soften_lanes(
      A* scores, const A* seen, int64_t n, int64_t R, A factor, A* maximum, A* total) {
    const V least = V::set(-std::numeric_limits<A>::infinity()), scale = V::set(factor);
    for (int64_t lane = 0; lane < R; lane += W) {
      const V limit = V::load(seen + lane);
      V most = V::set(std::numeric_limits<A>::lowest()), sum = V::set(0);
      for (int64_t t = 0; t < n; t++) {
        A* at = scores + t * R + lane;
        const V score = V::where_less(V::set(static_cast<A>(t)), limit, V::mul(V::load(at), scale), least);
        score.store(at);
        most = V::max(score, most);
      }
      for (int64_t t = 0; t < n; t++) {
        A* at = scores + t * R + lane;
        V weight = exp2(V::sub(V::load(at), most));
        if constexpr (std::is_same_v<Q, BFloat16>) weight = Bf16::rounded(weight);
        weight.store(at);
        sum = V::add(sum, weight);
      }
      most.store(maximum + lane);
      sum.store(total + lane);
    }
  }
};

} // namespace
} // namespace nxd
