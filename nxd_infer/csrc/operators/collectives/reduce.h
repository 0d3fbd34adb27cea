// Element-wise reductions over the ranks' pieces, in rank order, so that every rank gets bit-equal results.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace nxd {

enum class Reduction : int64_t { sum, max, min };

// Throws for a dtype without this reduction.
void check_reducible(torch::headeronly::ScalarType dtype, Reduction reduction);

// out[i] = reduction over r of sources[r][i]. bfloat16 and float16 are summed in float32. NaN wins max and min.
void reduce(
    torch::headeronly::ScalarType dtype, Reduction reduction, const char* const* sources, int degree, char* out,
    int64_t n);

} // namespace nxd
