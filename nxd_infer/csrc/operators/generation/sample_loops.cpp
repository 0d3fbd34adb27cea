// SampleLoops for every instruction set, from one source.
#include "machine/cpu.h"
#include "generation/sample_row.h"

#include <cmath>
#include <cstring>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#define NXD_LEVEL portable
#define NXD_WIDTH 4
#define NXD_FN static inline
#include "generation/sample_level.h"

#if NXD_X86
#define NXD_LEVEL avx2
#define NXD_WIDTH 8
#define NXD_FN NXD_AVX2 static inline
#include "generation/sample_level.h"

#define NXD_LEVEL avx512
#define NXD_WIDTH 16
#define NXD_FN NXD_AVX512 static inline
#include "generation/sample_level.h"
#endif

namespace nxd {

const SampleLoops& sample_loops() {
  static const SampleLoops loops = [] {
#if NXD_X86
    if (cpu() >= Cpu::avx512) {
      return SampleLoops{&avx512::maxima, &avx512::sum_exp, &avx512::costs, &avx512::contends};
    }
    if (cpu() >= Cpu::avx2) {
      return SampleLoops{&avx2::maxima, &avx2::sum_exp, &avx2::costs, &avx2::contends};
    }
#endif
    return SampleLoops{&portable::maxima, &portable::sum_exp, &portable::costs, &portable::contends};
  }();
  return loops;
}

} // namespace nxd
