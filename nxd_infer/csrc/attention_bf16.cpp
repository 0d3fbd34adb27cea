// Attention with the instructions made for bfloat16: dot products of pairs, and tiles.
#include "cpu.h"
#if NXD_X86
#define NXD_TARGET NXD_AMX
#include "attention_kernel.h"
#include "tiles.h"

namespace nxd {
namespace {

struct Bf16Pairs {
  static constexpr bool kTiles = false;

  // sum[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
  static NXD_AVX512_BF16 NXD_INLINE Avx512 dot(const BFloat16* a, const BFloat16* b, Avx512 sum) {
    return {_mm512_dpbf16_ps(sum.x, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b))};
  }
};

// A tile product is out[i][r] = sum over j of a[i][j] * b[j][r], with two values of j side by side in b: [J / 2, R, 2].
struct Bf16Tiles : Bf16Pairs {
  static constexpr bool kTiles = true;

  // The 32-bit columns of 16 rows.
  static NXD_AMX void transpose(const __m512i* in, __m512i* out) {
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

  // Values of a row as lanes, zero past `count`.
  static NXD_AMX NXD_INLINE __m512i part(const void* row, int64_t count) {
    return count >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << count) - 1, row);
  }

  // R rows [D] to [D / 2, R, 2].
  static NXD_AMX void queries(const char* const* rows, int64_t R, int64_t D, BFloat16* out) {
    __m512i in[16], columns[16];
    for (int64_t d = 0; d < D; d += 32) {
      for (int64_t r = 0; r < R; r += 16) {
        for (int i = 0; i < 16; i++) in[i] = part(rows[r + i] + 2 * d, D - d);
        transpose(in, columns);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (d + 2 * i) * R + 2 * r, columns[i]);
      }
    }
  }

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

  // out [D, R] = sum over t of v[t] times weights [n, R], rounded to bfloat16 where they are. `values` is room for
  // [D rounded up to 16, kKeys].
  static NXD_AMX void weigh(
      const char* const* v, int64_t n, int64_t D, BFloat16* values, float* weights, float* out, int64_t R) {
    const int64_t filled = round_up(n, 32);
    std::fill(weights + n * R, weights + filled * R, 0.0f);
    auto* pairs = reinterpret_cast<BFloat16*>(weights);  // [filled / 2, R, 2], always behind what is still to be read
    for (int64_t t = 0; t < filled; t += 2) {
      __m512i both[kRows / 16];
      for (int64_t r = 0; r < R; r += 16) {
        both[r / 16] = interleave(
            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + t * R + r)),
            (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + (t + 1) * R + r)));
      }
      for (int64_t r = 0; r < R; r += 16) _mm512_storeu_si512(pairs + t * R + 2 * r, both[r / 16]);
    }
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

  // a0 b0 a1 b1 ..
  static NXD_AMX NXD_INLINE __m512i interleave(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  }
};

} // namespace

const AttentionKernel& attention_avx512_bf16() { return Kernel<Avx512, Bf16Pairs>::table; }
const AttentionKernel& attention_amx_bf16() { return Kernel<Avx512, Bf16Tiles>::table; }

} // namespace nxd
#endif
