// Which instruction sets this machine has, asked once. Kernels choose by it at run time: the library is built without
// -march, so one file serves every x86-64 (and other) machine.
#pragma once

namespace nxd {

// Each level includes those before it. avx512 means F, BW, DQ and VL; avx512_bf16 adds the bfloat16 dot product;
// amx_bf16 adds the tiles, with the kernel's permission to use them.
enum class Cpu { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx_bf16 = 4 };

// The best level of this machine, or a lower one that the variable NXD_INFER_CPU_LEVEL names (portable, avx2,
// avx512, avx512_bf16, amx_bf16), which is how tests reach every kernel. Read at the first call.
Cpu cpu();

// Whether kernels ask for all that they read soon, as most processors need, or for little: Zen 4 reads ahead well by
// itself, and worse where somebody asks. The variable NXD_INFER_CPU_ASKS (0, 1) decides instead where it is set.
// Same results; attention heeds it where few rows of bfloat16 are multiplied in pairs.
bool asks();

// Between two looks at what another thread or process is to write.
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
