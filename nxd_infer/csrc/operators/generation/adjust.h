// Adjusts a row of logits as its request asks: nxd_infer/ops/adjust.py is the specification.
#pragma once

#include <cstdint>
#include <vector>

namespace nxd {

// The adjustments of one row; a pointer is null if the call has none of that kind.
struct Adjustment {
  const int32_t* allowed = nullptr;  // ceil(vocabulary / 32) words
  const int64_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int64_t biases = 0;
  const int32_t* counts = nullptr;  // [vocabulary]
  const bool* seen = nullptr;  // [vocabulary]
  const float* presence = nullptr;
  const float* frequency = nullptr;
  const float* repetition = nullptr;
};

// `raw` itself if the row has no adjustments, else the adjusted logits in `memory`.
const float* adjust_row(
    const float* raw, int64_t vocabulary, const Adjustment& adjustment, std::vector<float>& memory);

} // namespace nxd
