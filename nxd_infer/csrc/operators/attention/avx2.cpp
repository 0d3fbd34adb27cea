#include "machine/cpu.h"
#if NXD_X86
#define NXD_TARGET NXD_AVX2
#include "attention/kernel.h"

namespace nxd {

const AttentionKernel& attention_avx2() { return Kernel<Avx2, void>::table; }

} // namespace nxd
#endif
