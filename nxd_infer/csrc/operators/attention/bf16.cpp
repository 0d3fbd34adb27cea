// Attention with bfloat16 instructions: dot products of pairs, and tiles.
#include "machine/cpu.h"
#if NXD_X86
#define NXD_TARGET NXD_AMX
#include "attention/kernel.h"
#include "machine/tiles.h"

namespace nxd {
namespace {

// Many rows: products are out[i][r] = sum over j of a[i][j] * b[j][r], with adjacent pairs of j in b: [J / 2, R, 2].
struct Bf16Many {
  static NXD_INLINE int32_t pair_at(const void* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
  }

  // The 32-bit columns of 16 rows.
  static NXD_AVX512_BF16 void transpose(const __m512i* in, __m512i* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
      a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // b[i + j]: in quarter q, column 4q + j of rows i .. i + 3
      b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
      b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
      b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
      b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
      const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
      const __m512i late_even = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
      const __m512i late_odd = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
      out[j] = _mm512_shuffle_i32x4(even, late_even, 0x88);
      out[4 + j] = _mm512_shuffle_i32x4(odd, late_odd, 0x88);
      out[8 + j] = _mm512_shuffle_i32x4(even, late_even, 0xdd);
      out[12 + j] = _mm512_shuffle_i32x4(odd, late_odd, 0xdd);
    }
  }

  // Loads a row's values as lanes, zero past `count`.
  static NXD_AVX512_BF16 NXD_INLINE __m512i part(const void* row, int64_t count) {
    return count >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << count) - 1, row);
  }

  // Rearranges R rows [D] to [D / 2, R, 2], zero-padded to a multiple of 32.
  static NXD_AVX512_BF16 void queries(const char* const* rows, int64_t R, int64_t D, BFloat16* out) {
    __m512i in[16], columns[16];
    for (int64_t d = 0; d < D; d += 32) {
      for (int64_t r = 0; r < R; r += 16) {
        for (int i = 0; i < 16; i++) in[i] = part(rows[r + i] + 2 * d, D - d);
        transpose(in, columns);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (d + 2 * i) * R + 2 * r, columns[i]);
      }
    }
  }

  // Packs weights [n, R], already rounded, into pairs of bfloat16 [filled / 2, R, 2] in the same memory, zero-padded.
  static NXD_AVX512_BF16 BFloat16* narrow_weights(float* weights, int64_t n, int64_t filled, int64_t R) {
    std::fill(weights + n * R, weights + filled * R, 0.0f);
    auto* pairs = reinterpret_cast<BFloat16*>(weights);  // [filled / 2, R, 2], never ahead of what is still to be read
    for (int64_t t = 0; t < filled; t += 2) {
      __m512i both[kRows / 16];
      for (int64_t r = 0; r < R; r += 16) {
        both[r / 16] = interleave(
            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + t * R + r)),
            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + (t + 1) * R + r)));
      }
      for (int64_t r = 0; r < R; r += 16) _mm512_storeu_si512(pairs + t * R + 2 * r, both[r / 16]);
    }
    return pairs;
  }

  // 16 * kVectors rows. The pairs of a[i] begin at row(i) and are `step` bytes apart. I is rounded up to four.
  template <int kVectors, typename Row>
  static NXD_AVX512_BF16 void product(
      const Row& row, int64_t step, int64_t I, int64_t J, const BFloat16* b, float* out) {
    constexpr int64_t R = 16 * kVectors;
    for (int64_t i = 0; i < I; i += 4) {
      const char* a[4] = {row(i), row(i + 1), row(i + 2), row(i + 3)};
      __m512 sum[4][kVectors];
#pragma GCC unroll 16
      for (int s = 0; s < 4 * kVectors; s++) sum[s / kVectors][s % kVectors] = _mm512_setzero_ps();
      for (int64_t j = 0; j < J; j += 2) {
        __m512bh lanes[kVectors];
#pragma GCC unroll 4
        for (int s = 0; s < kVectors; s++) lanes[s] = (__m512bh)_mm512_loadu_si512(b + j * R + 32 * s);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          const auto factor = (__m512bh)_mm512_set1_epi32(pair_at(a[u] + j / 2 * step));
#pragma GCC unroll 4
          for (int s = 0; s < kVectors; s++) sum[u][s] = _mm512_dpbf16_ps(sum[u][s], factor, lanes[s]);
        }
      }
#pragma GCC unroll 16
      for (int s = 0; s < 4 * kVectors; s++) {
        _mm512_storeu_ps(out + (i + s / kVectors) * R + 16 * (s % kVectors), sum[s / kVectors][s % kVectors]);
      }
    }
  }

  template <typename Row>
  static NXD_AVX512_BF16 void products(
      const Row& row, int64_t step, int64_t I, int64_t J, const BFloat16* b, int64_t R, float* out) {
    if (R == 64) product<4>(row, step, I, J, b, out);
    if (R == 48) product<3>(row, step, I, J, b, out);
    if (R == 32) product<2>(row, step, I, J, b, out);
    if (R == 16) product<1>(row, step, I, J, b, out);
  }

  // scores [n, R] of n keys, and of up to three more that repeat the last key.
  static NXD_AVX512_BF16 void scores(
      const char* const* k, int64_t n, int64_t D, BFloat16*, const BFloat16* q, float* scores, int64_t R) {
    products([&](int64_t t) { return k[std::min(t, n - 1)]; }, 4, n, D, q, R, scores);
  }

  // out [D, R] = sum over t of v[t] times weights [n, R], which become bfloat16. `values` is room for [kKeys, D rounded
  // up to 16].
  static NXD_AVX512_BF16 void weigh(
      const char* const* v, int64_t n, int64_t D, BFloat16* values, float* weights, float* out, int64_t R) {
    const int64_t filled = round_up(n, 2), width = round_up(D, 16);
    const BFloat16* pairs = narrow_weights(weights, n, filled, R);
    for (int64_t t = 0; t < filled; t += 2) {  // [filled / 2, width, 2]
      for (int64_t d = 0; d < width; d += 16) {
        const __mmask16 mask = D - d >= 16 ? 0xffff : (1u << (D - d)) - 1;
        const __m512i both = interleave(
            _mm256_maskz_loadu_epi16(mask, v[t] + 2 * d),
            _mm256_maskz_loadu_epi16(t + 1 < n ? mask : 0, v[std::min(t + 1, n - 1)] + 2 * d));
        _mm512_storeu_si512(values + t * width + 2 * d, both);
      }
    }
    const char* begin = reinterpret_cast<const char*>(values);
    products([&](int64_t d) { return begin + 4 * d; }, 4 * width, width, filled, pairs, R, out);
  }

  // a0 b0 a1 b1 ..
  static NXD_AVX512_BF16 NXD_INLINE __m512i interleave(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  }
};

template <bool kAsk>
struct Bf16Pairs : Bf16Many {
  static constexpr bool kTiles = false;
  static constexpr bool kAsks = kAsk;

  // sum[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
  static NXD_AVX512_BF16 NXD_INLINE Avx512 dot(const BFloat16* a, const BFloat16* b, Avx512 sum) {
    return {_mm512_dpbf16_ps(sum.x, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b))};
  }

  // Rounds to the nearest bfloat16, as a float.
  static NXD_AVX512_BF16 NXD_INLINE Avx512 rounded(Avx512 a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.x)), 16))};
  }

  // Loops::weigh() of R rows for kParts * 32 columns from d on, two keys at a time: half the instructions of widened
  // values. The weights [R, kKeys] are zero past the last one.
  template <int R, int kParts>
  static NXD_AVX512_BF16 NXD_INLINE void weigh_pairs(
      const BFloat16* weights, const char* const* v, int64_t n, int64_t d, float* values, int64_t ldv) {
    __m512 sum[R][2 * kParts];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kParts * R; i++) sum[i / (2 * kParts)][i % (2 * kParts)] = _mm512_setzero_ps();
    for (int64_t t = 0; t < n; t += 2) {
      static const char zeros[64 * kParts] = {};
      const char *one = v[t] + 2 * d, *other = t + 1 < n ? v[t + 1] + 2 * d : zeros;
      __m512bh pair[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) pair[r] = (__m512bh)_mm512_set1_epi32(pair_at(weights + r * kKeys + t));
#pragma GCC unroll 16
      for (int part = 0; part < kParts; part++) {
        if (kAsk) {
          __builtin_prefetch(v[t + kAhead] + 2 * d + 64 * part, 0, 0);
          __builtin_prefetch(v[t + 1 + kAhead] + 2 * d + 64 * part, 0, 0);
        }
        const __m512i first = _mm512_loadu_si512(one + 64 * part), second = _mm512_loadu_si512(other + 64 * part);
        const auto low = (__m512bh)_mm512_unpacklo_epi16(first, second);  // of each eight columns the first four
        const auto high = (__m512bh)_mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          sum[r][2 * part] = _mm512_dpbf16_ps(sum[r][2 * part], pair[r], low);
          sum[r][2 * part + 1] = _mm512_dpbf16_ps(sum[r][2 * part + 1], pair[r], high);
        }
      }
    }
    const __m512i front = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
      for (int part = 0; part < kParts; part++) {
        const __m512 low = sum[r][2 * part], high = sum[r][2 * part + 1];
        float* to = values + r * ldv + d + part * 32;
        _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, front, high));
        _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, back, high));
      }
    }
  }

  template <int R>
  static NXD_AVX512_BF16 void weigh_few(
      const float* weights, const char* const* v, int64_t n, int64_t D, float* values, int64_t ldv) {
    BFloat16 narrowed[R * kKeys];
    for (int r = 0; r < R; r++) {
      for (int64_t t = 0; t < n; t += 16) {
        const auto some = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + r * kKeys + t));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(narrowed + r * kKeys + t), some);
      }
    }
    int64_t d = 0;
    for (; d + 64 <= D; d += 64) weigh_pairs<R, 2>(narrowed, v, n, d, values, ldv);
    for (; d < D; d += 32) weigh_pairs<R, 1>(narrowed, v, n, d, values, ldv);
  }
};

// Many rows by tiles.
struct Bf16Tiles : Bf16Pairs<true> {
  static constexpr bool kTiles = true;

  // Sums over `J` (a multiple of 32) for 16 values of i and 16 * kGroups rows.
  template <int kGroups>
  static NXD_AMX NXD_INLINE void product(
      const BFloat16* a, int64_t lda, int64_t J, const BFloat16* b, int64_t R, float* out) {
    _tile_zero(0);
    if (kGroups > 1) _tile_zero(1);
    if (kGroups > 2) _tile_zero(2);
    if (kGroups > 3) _tile_zero(3);
    for (int64_t j = 0; j < J; j += 32) {
      const BFloat16* at = b + j * R;
      _tile_loadd(4, a + j, 2 * lda);
      _tile_loadd(5, at, 4 * R);
      _tile_dpbf16ps(0, 4, 5);
      if (kGroups > 1) {
        _tile_loadd(6, at + 32, 4 * R);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (kGroups > 2) {
        _tile_loadd(7, at + 64, 4 * R);
        _tile_dpbf16ps(2, 4, 7);
      }
      if (kGroups > 3) {
        _tile_loadd(5, at + 96, 4 * R);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, out, 4 * R);
    if (kGroups > 1) _tile_stored(1, out + 16, 4 * R);
    if (kGroups > 2) _tile_stored(2, out + 32, 4 * R);
    if (kGroups > 3) _tile_stored(3, out + 48, 4 * R);
  }

  static NXD_AMX void products(
      const BFloat16* a, int64_t lda, int64_t I, int64_t J, const BFloat16* b, int64_t R, float* out) {
    tiles_begin();
    settle(a);
    for (int64_t i = 0; i < I; i += 16, a += 16 * lda, out += 16 * R) {
      if (R == 64) product<4>(a, lda, J, b, R, out);
      if (R == 48) product<3>(a, lda, J, b, R, out);
      if (R == 32) product<2>(a, lda, J, b, R, out);
      if (R == 16) product<1>(a, lda, J, b, R, out);
    }
    settle(out);
    tiles_end();
  }

  // scores [n, R] of n keys; `keys` is room for [kKeys, D rounded up to 32].
  static NXD_AMX void scores(
      const char* const* k, int64_t n, int64_t D, BFloat16* keys, const BFloat16* q, float* scores, int64_t R) {
    const int64_t width = round_up(D, 32), filled = round_up(n, 16);
    for (int64_t t = 0; t < filled; t++) {
      for (int64_t d = 0; d < D; d += 32) {
        _mm512_storeu_si512(keys + t * width + d, t < n ? part(k[t] + 2 * d, D - d) : _mm512_setzero_si512());
      }
    }
    products(keys, width, filled, width, q, R, scores);
  }

  // out [D, R] = sum over t of v[t] times weights [n, R], which become bfloat16. `values` is room for
  // [D rounded up to 16, kKeys].
  static NXD_AMX void weigh(
      const char* const* v, int64_t n, int64_t D, BFloat16* values, float* weights, float* out, int64_t R) {
    const int64_t filled = round_up(n, 32);
    const BFloat16* pairs = narrow_weights(weights, n, filled, R);
    __m512i in[16], columns[16];
    for (int64_t t = 0; t < filled; t += 32) {
      for (int64_t d = 0; d < D; d += 16) {
        const __mmask16 mask = D - d >= 16 ? 0xffff : (1u << (D - d)) - 1;
        for (int64_t i = 0; i < 16; i++) {
          const int64_t first = t + 2 * i;
          in[i] = interleave(
              _mm256_maskz_loadu_epi16(first < n ? mask : 0, v[std::min(first, n - 1)] + 2 * d),
              _mm256_maskz_loadu_epi16(first + 1 < n ? mask : 0, v[std::min(first + 1, n - 1)] + 2 * d));
        }
        transpose(in, columns);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(values + (d + i) * kKeys + t, columns[i]);
      }
    }
    products(values, kKeys, round_up(D, 16), filled, pairs, R, out);
  }
};

} // namespace

const AttentionKernel& attention_avx512_bf16() {
  return asks() ? Kernel<Avx512, Bf16Pairs<true>>::table : Kernel<Avx512, Bf16Pairs<false>>::table;
}
const AttentionKernel& attention_amx_bf16() { return Kernel<Avx512, Bf16Tiles>::table; }

} // namespace nxd
#endif
