#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include <torch/headeronly/util/Half.h>

// One body, compiled for several instruction sets; the loader picks the best one the CPU has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define NXD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NXD_CLONES __attribute__((target_clones("avx2", "default")))  // GCC 11 has no dispatcher for the levels
#else
#define NXD_CLONES
#endif
#define NXD_INLINE inline __attribute__((always_inline))

namespace nxd {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlock = 1024;  // accumulators stay in the first-level cache

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
NXD_INLINE T widen(T x) {
  return x;
}
NXD_INLINE float widen(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
NXD_INLINE float widen(c10::Half x) { return static_cast<float>(x); }

template <typename T, typename A>
NXD_INLINE T narrow(A x) {
  return static_cast<T>(x);
}
template <>
NXD_INLINE BFloat16 narrow<BFloat16, float>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return BFloat16{static_cast<uint16_t>(nan ? 0x7fc0 : rounded)};
}

template <typename T, typename A>
NXD_INLINE void sum_body(const char* const* sources, int degree, char* out, int64_t n) {
  A acc[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i);
    const T* first = reinterpret_cast<const T*>(sources[0]) + i;
    for (int64_t j = 0; j < m; j++) {
      acc[j] = widen(first[j]);
    }
    for (int r = 1; r < degree; r++) {
      const T* x = reinterpret_cast<const T*>(sources[r]) + i;
      for (int64_t j = 0; j < m; j++) {
        acc[j] += widen(x[j]);
      }
    }
    T* y = reinterpret_cast<T*>(out) + i;
    for (int64_t j = 0; j < m; j++) {
      y[j] = narrow<T>(acc[j]);
    }
  }
}

template <typename T, bool kMax>
NXD_INLINE void extreme_body(const char* const* sources, int degree, char* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    T best = reinterpret_cast<const T*>(sources[0])[i];
    for (int r = 1; r < degree; r++) {
      const T x = reinterpret_cast<const T*>(sources[r])[i];
      const auto a = widen(x), b = widen(best);
      const bool better = kMax ? a > b : a < b;
      best = (better || a != a) && b == b ? x : best;  // a NaN, once seen, stays
    }
    reinterpret_cast<T*>(out)[i] = best;
  }
}

#define NXD_SUM(name, T, A)                                                                           \
  NXD_CLONES void sum_##name(const char* const* sources, int degree, char* out, int64_t n) {          \
    sum_body<T, A>(sources, degree, out, n);                                                          \
  }
NXD_SUM(f32, float, float)
NXD_SUM(f64, double, double)
NXD_SUM(bf16, BFloat16, float)
NXD_SUM(f16, c10::Half, float)
// Unsigned, because wrapping is defined there; the bits are those of the signed sum.
NXD_SUM(i64, uint64_t, uint64_t)
NXD_SUM(i32, uint32_t, uint32_t)
NXD_SUM(i16, uint16_t, uint16_t)
NXD_SUM(i8, uint8_t, uint8_t)

using Kernel = void (*)(const char* const*, int, char*, int64_t);

template <typename T>
Kernel extreme(Reduction reduction) {
  return reduction == Reduction::max ? &extreme_body<T, true> : &extreme_body<T, false>;
}

Kernel find(ScalarType dtype, Reduction reduction) {
  const bool sum = reduction == Reduction::sum;
  switch (dtype) {
    case ScalarType::Float:
      return sum ? &sum_f32 : extreme<float>(reduction);
    case ScalarType::Double:
      return sum ? &sum_f64 : extreme<double>(reduction);
    case ScalarType::BFloat16:
      return sum ? &sum_bf16 : extreme<BFloat16>(reduction);
    case ScalarType::Half:
      return sum ? &sum_f16 : extreme<c10::Half>(reduction);
    case ScalarType::Long:
      return sum ? &sum_i64 : extreme<int64_t>(reduction);
    case ScalarType::Int:
      return sum ? &sum_i32 : extreme<int32_t>(reduction);
    case ScalarType::Short:
      return sum ? &sum_i16 : extreme<int16_t>(reduction);
    case ScalarType::Char:
      return sum ? &sum_i8 : extreme<int8_t>(reduction);
    case ScalarType::Byte:
      return sum ? &sum_i8 : extreme<uint8_t>(reduction);
    case ScalarType::Bool:
      return sum ? nullptr : extreme<uint8_t>(reduction);
    default:
      return nullptr;
  }
}

} // namespace

void check_reducible(ScalarType dtype, Reduction reduction) {
  if (find(dtype, reduction) == nullptr) {
    if (dtype == ScalarType::Bool) {
      throw std::runtime_error("nxd: booleans have no sum; use 'max' (any) or 'min' (all), or convert");
    }
    throw std::runtime_error("nxd: dtype number " + std::to_string(static_cast<int>(dtype)) + " cannot be reduced");
  }
}

void reduce(ScalarType dtype, Reduction reduction, const char* const* sources, int degree, char* out, int64_t n) {
  find(dtype, reduction)(sources, degree, out, n);
}

} // namespace nxd
