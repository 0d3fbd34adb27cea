// Registration of operators: NXD_LIBRARY for schemas, NXD_IMPL for kernels. The namespace is nxd_<content hash>, set by
// the build, so that different libraries can live in one process.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/enum_tag.h>

#define NXD_LIBRARY_(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define NXD_LIBRARY(m) NXD_LIBRARY_(NXD_NAMESPACE, m)
#define NXD_IMPL_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define NXD_IMPL(key, m) NXD_IMPL_(NXD_NAMESPACE, key, m)

// A C function that compiled graphs call without torch's dispatcher: NXD_SHIM(name)(arguments) { .. return 0; }. Its
// symbol is nxd_<content hash>_<name>; its parameters are the operator's schema in C (`shims` in nxd_infer/native.py).
// Errors are exceptions, which the caller in the compiled graph converts.
#define NXD_JOIN_(ns, name) ns##_##name
#define NXD_JOIN(ns, name) NXD_JOIN_(ns, name)
#define NXD_SHIM(name) \
  extern "C" __attribute__((visibility("default"))) AOTITorchError NXD_JOIN(NXD_NAMESPACE, name)

namespace nxd {

// Defines an operator whose calls must not be constant-folded, merged or reordered: a collective, or anything that
// depends on the rank. Inductor's passes check the tag.
inline void define_effect(torch::stable::detail::StableLibrary& library, const char* schema) {
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0
  library.def(schema, {at::Tag::nondeterministic_seeded});
#else
  library.def(schema);
#endif
}

} // namespace nxd
