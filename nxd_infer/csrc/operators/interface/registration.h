// Registration of operators: NXD_LIBRARY for schemas, NXD_IMPL for kernels. The namespace is nxd_<content hash>, set by
// the build, so that different libraries can live in one process.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/enum_tag.h>

#define NXD_LIBRARY_(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define NXD_LIBRARY(m) NXD_LIBRARY_(NXD_NAMESPACE, m)
#define NXD_IMPL_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define NXD_IMPL(key, m) NXD_IMPL_(NXD_NAMESPACE, key, m)

namespace nxd {

// Defines an operator whose calls must not be constant-folded, merged or reordered: a collective, or anything that
// depends on the rank.
inline void define_effect(torch::stable::detail::StableLibrary& library, const char* schema) {
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0
  library.def(schema, {at::Tag::nondeterministic_seeded});
#else
  library.def(schema);
#endif
}

} // namespace nxd
