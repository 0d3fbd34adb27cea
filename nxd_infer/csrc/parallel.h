// Work shared by torch's own threads: as many as torch.set_num_threads says, no pool of ours beside them.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

namespace nxd {

// Calls body(begin, end) on pieces of [begin, end), none smaller than `grain` but the last; in the caller when one
// piece is enough.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (end <= begin) {
    return;
  }
  if (end - begin <= grain) {
    body(begin, end);
    return;
  }
  auto call = [](int64_t from, int64_t to, void* context) { (*static_cast<const Body*>(context))(from, to); };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, call, const_cast<Body*>(&body)));
}

inline int64_t thread_count() {
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

} // namespace nxd
