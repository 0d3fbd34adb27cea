// Vectors of floating-point lanes, one type per instruction set, so that a kernel is written once as a template over
// them. Every member is always inlined; a function that calls one carries the attribute of the same level (cpu.h).
//
// A kernel's header is included once per level with NXD_TARGET defined as that attribute: GCC and clang allow no
// attribute that depends on a template's argument.
#pragma once

#include "machine/cpu.h"
#include "machine/scalar.h"

#if NXD_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of what its own header leaves undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace nxd {

// Plain C++, four lanes of float or double. Defines the meaning of the members of all vector types.
template <typename T>
struct Portable {
  using Scalar = T;
  static constexpr int width = 4;      // lanes
  static constexpr int registers = 16; // vectors that a kernel can probably keep in registers
  T lane[width];

  template <typename F>
  static NXD_INLINE Portable each(F f) {
    Portable y;
    for (int i = 0; i < width; i++) y.lane[i] = f(i);
    return y;
  }
  static NXD_INLINE Portable set(T x) {
    return each([&](int) { return x; });
  }
  static NXD_INLINE Portable load(const T* x) {
    return each([&](int i) { return x[i]; });
  }
  static NXD_INLINE Portable load(const BFloat16* x) {
    return each([&](int i) { return static_cast<T>(widen(x[i])); });
  }
  NXD_INLINE void store(T* y) const { std::memcpy(y, lane, sizeof(lane)); }

  static NXD_INLINE Portable add(Portable a, Portable b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static NXD_INLINE Portable sub(Portable a, Portable b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static NXD_INLINE Portable mul(Portable a, Portable b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  // a * b + c
  static NXD_INLINE Portable fma(Portable a, Portable b, Portable c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  // b if either is NaN, like the instruction
  static NXD_INLINE Portable max(Portable a, Portable b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // yes if a < b, else (including NaN) no
  static NXD_INLINE Portable where_less(Portable a, Portable b, Portable yes, Portable no) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]; });
  }
  // Rounds to the nearest integer, |x| < 2^22.
  static NXD_INLINE Portable round(Portable x) {
    const T large = 12582912;
    return each([&](int i) { return (x.lane[i] + large) - large; });
  }
  // x * 2^n for integers n in -126 .. 127; float only
  static NXD_INLINE Portable scale(Portable x, Portable n) {
    return each([&](int i) {
      const T bounded = n.lane[i] > -127 ? n.lane[i] : -127;  // converting an out-of-range value is undefined
      const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(bounded) + 127) << 23;
      float power;
      std::memcpy(&power, &bits, 4);
      return x.lane[i] * static_cast<T>(power);
    });
  }
  // Lane i is the sum of the lanes of x[i].
  static NXD_INLINE Portable sums(const Portable* x) {
    return each([&](int i) { return (x[i].lane[0] + x[i].lane[1]) + (x[i].lane[2] + x[i].lane[3]); });
  }
};

#if NXD_X86

struct Avx2 {
  using Scalar = float;
  static constexpr int width = 8;
  static constexpr int registers = 16;
  __m256 x;

#define NXD_OP NXD_AVX2 NXD_INLINE
  static NXD_OP Avx2 set(float y) { return {_mm256_set1_ps(y)}; }
  static NXD_OP Avx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static NXD_OP Avx2 load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  NXD_OP void store(float* p) const { _mm256_storeu_ps(p, x); }
  static NXD_OP Avx2 add(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.x, b.x)}; }
  static NXD_OP Avx2 sub(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.x, b.x)}; }
  static NXD_OP Avx2 mul(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.x, b.x)}; }
  static NXD_OP Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  static NXD_OP Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.x, b.x)}; }
  static NXD_OP Avx2 where_less(Avx2 a, Avx2 b, Avx2 yes, Avx2 no) {
    return {_mm256_blendv_ps(no.x, yes.x, _mm256_cmp_ps(a.x, b.x, _CMP_LT_OQ))};
  }
  static NXD_OP Avx2 round(Avx2 y) { return {_mm256_round_ps(y.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static NXD_OP Avx2 scale(Avx2 y, Avx2 n) {
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n.x), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(y.x, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)))};
  }
  static NXD_OP Avx2 sums(const Avx2* y) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(y[0].x, y[1].x), _mm256_hadd_ps(y[2].x, y[3].x));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(y[4].x, y[5].x), _mm256_hadd_ps(y[6].x, y[7].x));
    return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31))};
  }
#undef NXD_OP
};

struct Avx512 {
  using Scalar = float;
  static constexpr int width = 16;
  static constexpr int registers = 32;
  __m512 x;

#define NXD_OP NXD_AVX512 NXD_INLINE
  static NXD_OP Avx512 set(float y) { return {_mm512_set1_ps(y)}; }
  static NXD_OP Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static NXD_OP Avx512 load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  NXD_OP void store(float* p) const { _mm512_storeu_ps(p, x); }
  static NXD_OP Avx512 add(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.x, b.x)}; }
  static NXD_OP Avx512 sub(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.x, b.x)}; }
  static NXD_OP Avx512 mul(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.x, b.x)}; }
  static NXD_OP Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
  static NXD_OP Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.x, b.x)}; }
  static NXD_OP Avx512 where_less(Avx512 a, Avx512 b, Avx512 yes, Avx512 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ), no.x, yes.x)};
  }
  static NXD_OP Avx512 round(Avx512 y) {
    return {_mm512_roundscale_ps(y.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static NXD_OP Avx512 scale(Avx512 y, Avx512 n) { return {_mm512_scalef_ps(y.x, n.x)}; }
  static NXD_OP Avx512 sums(const Avx512* y) {
    __m512 two[8], four[4];
    for (int i = 0; i < 8; i++) {  // in each quarter: y0, y1, y0, y1
      const __m512 a = y[2 * i].x, b = y[2 * i + 1].x;
      two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {  // in each quarter: y0, y1, y2, y3
      const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
      four[i] = _mm512_add_ps(
          _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 low = _mm512_add_ps(
        _mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    const __m512 high = _mm512_add_ps(
        _mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd))};
  }
#undef NXD_OP
};

#endif

} // namespace nxd
