// One row of the sampler: nxd_infer/ops/sampling.py is the specification.
#pragma once

#include <cstdint>
#include <vector>

namespace nxd {

// Memory that a thread keeps between rows.
struct SampleScratch {
  std::vector<float> maxima, raw_maxima, ranked, cost, weight, adjusted;
  std::vector<int64_t> blocks, histogram;
  std::vector<uint32_t> inside;
};

struct SampleSettings {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  int64_t seed, position;
};

struct SampleResult {
  int64_t* token;
  float* logprob;
  int64_t* top_ids;
  float* top_logprobs;
};

// `logits` may be `raw`.
void sample_row(
    const float* logits, const float* raw, int64_t vocabulary, const SampleSettings& settings, int64_t top,
    SampleScratch& scratch, const SampleResult& result);

} // namespace nxd
