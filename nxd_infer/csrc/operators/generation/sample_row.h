// One row of the sampler: nxd_infer/ops/sampling.py is the specification.
#pragma once

#include <cstdint>
#include <vector>

namespace nxd {

constexpr int64_t kBlock = 64;  // logits per block; the largest of a block tells whether the block matters
constexpr float kLargestFinite = 3.40282347e38f;

inline int64_t block_count(int64_t vocabulary) { return (vocabulary + kBlock - 1) / kBlock; }

// The inputs of a row's random numbers, besides the token id.
struct RandomKey {
  uint32_t first, second;
};

// The loops over a whole row, compiled for each instruction set from one source (sample_level.h), with bit-equal
// results. A NaN logit counts as minus infinity, plus infinity as the largest finite number.
struct SampleLoops {
  // The largest logit of each block.
  void (*maxima)(const float* logits, int64_t vocabulary, float* out);
  // sum(exp(logit - largest)) for a finite `largest`.
  double (*sum_exp)(const float* logits, int64_t vocabulary, float largest);
  // For one block of `count` logits: cost = (largest - logit) / scale, and exp(-cost); past `count`, infinity and 0.
  void (*costs)(const float* logits, int64_t count, float largest, float scale, float* cost, float* weight);
  // The random bits of the tokens first_id .. first_id + kBlock - 1; whether any has bits / 2 <= weight * reach.
  bool (*contends)(const float* weight, float reach, int64_t first_id, RandomKey key, uint32_t* bits);
};

// For the level of cpu.h.
const SampleLoops& sample_loops();

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
