#define NXD_TARGET
#include "attention/kernel.h"

namespace nxd {

const AttentionKernel& attention_portable_f64() { return Kernel<Portable<double>, void>::table; }
const AttentionKernel& attention_portable() { return Kernel<Portable<float>, void>::table; }

} // namespace nxd
