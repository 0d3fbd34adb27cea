#include "fused/loops.h"

#include "machine/scalar.h"

#include <cmath>
#include <unordered_map>

// A product that is added must be rounded first, as by two operators.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace nxd {
namespace {

// The relative error is below 2e-7; NaN stays; 0 below -87.3.
NXD_INLINE float exponential(float x) {
  const float high = x > 88.7f ? 88.7f : x;
  const float inside = high < -87.3f ? -87.3f : high;
  const float shifted = inside * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  // The low bits of `shifted` are n, which is at most 128: half of the power at a time.
  const uint32_t whole = bits_of(shifted) - 0x4b400000u;
  const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(whole) >> 1);
  y = y * float_of((half << 23) + 0x3f800000u) * float_of(((whole - half) << 23) + 0x3f800000u);
  y = x > 88.7228f ? INFINITY : y;
  return x < -87.3f ? 0.0f : y;
}

NXD_INLINE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

NXD_INLINE float hyperbolic_tangent(float x) {
  const float size = std::fabs(x), z = x * x;
  float small = -5.70498872745e-3f;
  small = small * z + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  const float large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  return size < 0.625f ? small : std::copysign(large, x);
}

// A rational function, within 4e-7.
NXD_INLINE float error_function(float x) {
  const float low = x > 4.0f ? 4.0f : x;
  const float inside = low < -4.0f ? -4.0f : low, z = inside * inside;
  float p = -2.72614225801306e-10f;
  p = p * z + 2.77068142495902e-08f;
  p = p * z - 2.10102402082508e-06f;
  p = p * z - 5.69250639462346e-05f;
  p = p * z - 7.34990630326855e-04f;
  p = p * z - 2.95459980854025e-03f;
  p = p * z - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * z - 2.13374055278905e-04f;
  q = q * z - 1.68282697438203e-03f;
  q = q * z - 7.37332916720468e-03f;
  q = q * z - 1.42647390514189e-02f;
  return std::fabs(x) > 3.92f ? std::copysign(1.0f, x) : inside * p / q;
}

NXD_INLINE float gelu_by_tanh(float x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * (x * x * x))));
}

template <typename R, typename P, typename Q, bool kFirstSingle, bool kSecondSingle, typename F>
NXD_INLINE void each(const Rows& to, const Rows& first, const Rows& second, int64_t rows, int64_t n, const F& f) {
  for (int64_t r = 0; r < rows; r++) {
    R* y = static_cast<R*>(to.at) + r * to.step;
    const P* a = static_cast<const P*>(first.at) + r * first.step;
    const Q* b = static_cast<const Q*>(second.at) + r * second.step;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) y[i] = narrow<R>(f(widen(a[kFirstSingle ? 0 : i]), widen(b[kSecondSingle ? 0 : i])));
  }
}

template <typename R, typename F>
NXD_INLINE void each_to(const Rows& to, const Rows& x, const Rows& y, int64_t rows, int64_t n, const F& f) {
  using Half = BFloat16;
  if (x.single && y.half) return each<R, float, Half, true, false>(to, x, y, rows, n, f);
  if (x.single) return each<R, float, float, true, false>(to, x, y, rows, n, f);
  if (y.single && x.half) return each<R, Half, float, false, true>(to, x, y, rows, n, f);
  if (y.single) return each<R, float, float, false, true>(to, x, y, rows, n, f);
  if (x.half && y.half) return each<R, Half, Half, false, false>(to, x, y, rows, n, f);
  if (x.half) return each<R, Half, float, false, false>(to, x, y, rows, n, f);
  if (y.half) return each<R, float, Half, false, false>(to, x, y, rows, n, f);
  each<R, float, float, false, false>(to, x, y, rows, n, f);
}

#define NXD_BINARY(name, value)                                                                     \
  NXD_CLONES void name(const Rows& to, const Rows& x, const Rows& y, int64_t rows, int64_t n) {     \
    const auto f = [](float p, float q) __attribute__((always_inline)) { return value; };           \
    to.half ? each_to<BFloat16>(to, x, y, rows, n, f) : each_to<float>(to, x, y, rows, n, f);       \
  }

template <typename R, typename F>
NXD_INLINE void each_of(const Rows& to, const Rows& x, int64_t rows, int64_t n, const F& f) {
  if (x.half) return each<R, BFloat16, BFloat16, false, false>(to, x, x, rows, n, f);
  each<R, float, float, false, false>(to, x, x, rows, n, f);
}

#define NXD_UNARY(name, value)                                                                  \
  NXD_CLONES void name(const Rows& to, const Rows& from, const Rows&, int64_t rows, int64_t n) { \
    const auto f = [](float x, float) __attribute__((always_inline)) { return value; };         \
    to.half ? each_of<BFloat16>(to, from, rows, n, f) : each_of<float>(to, from, rows, n, f);   \
  }

// The result does not depend on the width of a vector.
template <typename P, typename Take, typename Combine>
NXD_INLINE void fold(
    const Rows& to, const Rows& from, int64_t rows, int64_t n, float start, const Take& take, const Combine& combine) {
  for (int64_t r = 0; r < rows; r++) {
    const P* a = static_cast<const P*>(from.at) + r * from.step;
    float parts[32];
    for (float& part : parts) part = start;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      for (int j = 0; j < 32; j++) parts[j] = combine(parts[j], take(widen(a[i + j])));
    }
    for (int j = 0; i < n; i++, j++) parts[j] = combine(parts[j], take(widen(a[i])));
    for (int width = 16; width > 0; width /= 2) {
      for (int j = 0; j < width; j++) parts[j] = combine(parts[j], parts[j + width]);
    }
    static_cast<float*>(to.at)[r * to.step] = parts[0];
  }
}

#define NXD_REDUCTION(name, start, taken, combined)                                                        \
  NXD_CLONES void name(const Rows& to, const Rows& from, const Rows&, int64_t rows, int64_t n) {           \
    const auto take = [](float value) __attribute__((always_inline)) { return taken; };                    \
    const auto combine = [](float p, float q) __attribute__((always_inline)) { return combined; };         \
    from.half ? fold<BFloat16>(to, from, rows, n, start, take, combine)                                    \
              : fold<float>(to, from, rows, n, start, take, combine);                                      \
  }

NXD_BINARY(add, p + q)
NXD_BINARY(sub, p - q)
NXD_BINARY(mul, p * q)
NXD_BINARY(divide, p / q)

NXD_UNARY(negative, -x)
NXD_UNARY(absolute, std::fabs(x))
NXD_UNARY(square, x * x)
NXD_UNARY(square_root, std::sqrt(x))
NXD_UNARY(reciprocal_root, 1.0f / std::sqrt(x))
NXD_UNARY(reciprocal, 1.0f / x)
NXD_UNARY(exponentials, exponential(x))
NXD_UNARY(sigmoid, logistic(x))
NXD_UNARY(silu, x / (1.0f + exponential(-x)))
NXD_UNARY(tangents, hyperbolic_tangent(x))
NXD_UNARY(gelu, x * 0.5f * (1.0f + error_function(x * 0.70710678118654752f)))
NXD_UNARY(gelu_tanh, gelu_by_tanh(x))
NXD_UNARY(relu, x < 0.0f ? 0.0f : x)
NXD_UNARY(cosines, std::cos(x))
NXD_UNARY(sines, std::sin(x))
NXD_UNARY(copy, x)

NXD_REDUCTION(sum, 0.0f, value, p + q)
NXD_REDUCTION(sum_of_squares, 0.0f, value * value, p + q)
NXD_REDUCTION(largest, -INFINITY, value, (q > p || q != q) ? q : p)

} // namespace

const Function* function_named(const std::string& name) {
  static const std::unordered_map<std::string, Function> table = {
      {"add", {add, Function::binary}},
      {"sub", {sub, Function::binary}},
      {"mul", {mul, Function::binary}},
      {"div", {divide, Function::binary}},
      {"copy", {copy, Function::unary}},
      {"neg", {negative, Function::unary}},
      {"abs", {absolute, Function::unary}},
      {"square", {square, Function::unary}},
      {"sqrt", {square_root, Function::unary}},
      {"rsqrt", {reciprocal_root, Function::unary}},
      {"exp", {exponentials, Function::unary}},
      {"reciprocal", {reciprocal, Function::unary}},
      {"sigmoid", {sigmoid, Function::unary}},
      {"silu", {silu, Function::unary}},
      {"tanh", {tangents, Function::unary}},
      {"gelu", {gelu, Function::unary}},
      {"gelu_tanh", {gelu_tanh, Function::unary}},
      {"relu", {relu, Function::unary}},
      {"cos", {cosines, Function::unary}},
      {"sin", {sines, Function::unary}},
      {"sum", {sum, Function::reduction}},
      {"sum_of_squares", {sum_of_squares, Function::reduction}},
      {"amax", {largest, Function::reduction}},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

} // namespace nxd
