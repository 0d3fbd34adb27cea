#include "machine/cpu.h"
#if NXD_X86
#define NXD_TARGET NXD_AVX512
#include "attention/kernel.h"

namespace nxd {

const AttentionKernel& attention_avx512() { return Kernel<Avx512, void>::table; }

} // namespace nxd
#endif
