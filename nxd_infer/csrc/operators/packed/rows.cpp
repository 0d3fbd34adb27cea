// The choice of the kernel for packed weights on this machine, and the kernels for plain vectors.
#include "machine/cpu.h"
#include "packed/packed.h"

#include <cstring>
#include <utility>

#if NXD_X86
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of what its own header leaves undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace nxd {
namespace {

#define NXD_LEVEL portable
#define NXD_TARGET
#define NXD_LANES 4
#define NXD_ROWS 1
#include "packed/rows.h"

#if NXD_X86
#define NXD_LEVEL avx2
#define NXD_TARGET NXD_AVX2
#define NXD_LANES 8
#define NXD_ROWS 3
#include "packed/rows.h"

#define NXD_LEVEL avx512
#define NXD_TARGET NXD_AVX512
#define NXD_LANES 16
#define NXD_ROWS 12
#include "packed/rows.h"

#define NXD_LEVEL avx512_bf16
#define NXD_TARGET NXD_AVX512_BF16
#define NXD_LANES 16
#define NXD_ROWS 14
#define NXD_PAIRS
#include "packed/rows.h"
#endif

void nothing() {}

template <typename T>
Kernel<T> plain(typename Kernel<T>::Multiply multiply, int64_t width) {
  return Kernel<T>{multiply, group_of<T>(), true, false, width, nothing, nothing};
}

template <typename T>
Kernel<T> widest() {
#if NXD_X86
  if (cpu() >= Cpu::avx512) return plain<T>(avx512::multiply<float, T>, avx512::kMost);
  if (cpu() >= Cpu::avx2) return plain<T>(avx2::multiply<float, T>, avx2::kMost);
#endif
  return plain<T>(portable::multiply<float, T>, portable::kMost);
}

} // namespace

const Kernel<float>& float_kernel() {
  static const Kernel<float> chosen = widest<float>();
  return chosen;
}

const Kernel<BFloat16>& bfloat16_kernel() {
#if NXD_X86
  if (cpu() >= Cpu::amx_bf16) return tile_kernel();
  if (cpu() >= Cpu::avx512_bf16) {
    static const Kernel<BFloat16> pairs{
        avx512_bf16::multiply<BFloat16, BFloat16>, 2, false, false, avx512_bf16::kMost, nothing, nothing};
    return pairs;
  }
#endif
  static const Kernel<BFloat16> chosen = widest<BFloat16>();
  return chosen;
}

template <>
const Kernel<int8_t>& int8_kernel<float>() {
  static const Kernel<int8_t> chosen = widest<int8_t>();
  return chosen;
}

template <>
const Kernel<int8_t>& int8_kernel<BFloat16>() {
#if NXD_X86
  if (cpu() >= Cpu::amx_bf16) {
    static const Kernel<int8_t> none{nullptr, 2, false, false, 0, nothing, nothing};
    return none;
  }
  if (cpu() >= Cpu::avx512_bf16) {
    static const Kernel<int8_t> pairs{
        avx512_bf16::multiply<BFloat16, int8_t>, 2, false, false, avx512_bf16::kMost, nothing, nothing};
    return pairs;
  }
#endif
  return int8_kernel<float>();
}

} // namespace nxd
