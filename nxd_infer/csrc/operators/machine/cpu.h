// The instruction sets of this machine, detected once. Kernels choose by them at run time: the library is built without
// -march, so one file works on every x86-64 (and other) machine.
#pragma once

namespace nxd {

// Each level includes those before it. avx512 means F, BW, DQ and VL; avx512_bf16 adds the bfloat16 dot product, and that
// of bytes (VNNI), which all processors with it have; amx_bf16 adds the tiles, with the kernel's permission to use them.
enum class Cpu { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx_bf16 = 4 };

// The best level of this machine, or a lower one set by the environment variable NXD_INFER_CPU_LEVEL (portable, avx2, avx512,
// avx512_bf16, amx_bf16), which tests use to reach every kernel. Read at the first call.
Cpu cpu();

// Whether kernels prefetch everything, as most processors need, or little: Zen 4 has a good hardware prefetcher, which
// software prefetches make worse. The environment variable NXD_INFER_CPU_ASKS (0, 1) overrides this. The results are the
// same; attention uses it if few rows of bfloat16 are multiplied in pairs.
bool asks();

// Pauses between two polls of memory that another thread or process will write.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace nxd

#if defined(__x86_64__) && defined(__GNUC__)
#define NXD_X86 1
#define NXD_AVX2 __attribute__((target("avx2,fma,f16c,bmi2")))
#define NXD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")))
#define NXD_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")))
#define NXD_AMX \
  __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")))
#else
#define NXD_X86 0
#endif
