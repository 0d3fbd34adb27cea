// Scalar types of the kernels, and the attribute that compiles a function for several instruction sets.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

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

NXD_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
NXD_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
NXD_INLINE T widen(T x) {
  return x;
}
NXD_INLINE float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
NXD_INLINE float widen(c10::Half x) { return static_cast<float>(x); }

template <typename T, typename A>
NXD_INLINE T narrow(A x) {
  return static_cast<T>(x);
}
template <>
NXD_INLINE BFloat16 narrow<BFloat16, float>(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return BFloat16{static_cast<uint16_t>(nan ? 0x7fc0 : rounded)};
}

} // namespace nxd
