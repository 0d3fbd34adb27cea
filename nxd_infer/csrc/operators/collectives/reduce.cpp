#include "collectives/reduce.h"

#include "machine/scalar.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nxd {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlock = 1024;  // accumulators stay in L1

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
// Unsigned, because its wrap-around is defined; the bits equal those of the signed sum.
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
