#include "generation/sample_row.h"

#include "machine/scalar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

// Bit-equal with any instructions: products and sums are rounded separately, and the only sum of fractions adds in an
// order that does not depend on the width of a vector.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace nxd {
namespace {

constexpr int64_t kBlock = 64;  // logits per block; the largest of a block tells whether the block matters
constexpr int64_t kLanes = 16;  // that are folded or added separately
constexpr float kLargestFinite = 3.40282347e38f;
constexpr float kGreedyBelow = 1e-5f;
constexpr float kLogprobFloor = -9999.0f;
// Gumbel noise of 32 bits lies within [-3.131, 22.874]: a token whose cost exceeds the difference cannot be drawn
// because the best token has cost 0 and is always kept. Its mass for top-p is 0 as well.
constexpr float kReach = 26.01f;

int64_t block_count(int64_t vocabulary) { return (vocabulary + kBlock - 1) / kBlock; }

// A NaN logit counts as minus infinity, plus infinity as the largest finite number.
NXD_INLINE float cleaned(float x) {
  x = x == x ? x : -INFINITY;
  return x < kLargestFinite ? x : kLargestFinite;
}

// exp(x) for x <= 0; 0 at -87 and below, and for NaN; the relative error is below 1.2e-7. The steps and constants are
// those of exp_negative in sampling.py, with one rounding each.
NXD_INLINE float exp_negative(float x) {
  const float inside = x > -87.0f ? x : -87.0f;
  const float shifted = inside * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  // The low bits of `shifted` are n: moved into the exponent, they make 2^n.
  y *= float_of((bits_of(shifted) << 23) + 0x3f800000u);
  return x > -87.0f ? y : 0.0f;
}

NXD_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return x ^ (x >> 15);
}

// --- loops over a row, or a block of it ---

// The block, or a copy in `tail` padded with absent tokens.
NXD_INLINE const float* whole_block(const float* logits, int64_t count, float* tail) {
  if (count >= kBlock) return logits;
  for (int64_t i = 0; i < kBlock; i++) tail[i] = i < count ? logits[i] : -INFINITY;
  return tail;
}

// The largest logit of each block.
NXD_CLONES void block_maxima(const float* logits, int64_t vocabulary, float* out) {
  float tail[kBlock];
  for (int64_t b = 0; b * kBlock < vocabulary; b++) {
    const float* x = whole_block(logits + b * kBlock, vocabulary - b * kBlock, tail);
    float best[kLanes];
    for (int64_t j = 0; j < kLanes; j++) {
      float most = -INFINITY;
#pragma GCC unroll 4
      for (int64_t i = j; i < kBlock; i += kLanes) most = x[i] > most ? x[i] : most;  // never NaN
      best[j] = most;
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t j = 0; j < width; j++) best[j] = best[j] > best[j + width] ? best[j] : best[j + width];
    }
    out[b] = cleaned(best[0]);
  }
}

// sum(exp(logit - largest)) for a finite `largest`.
NXD_CLONES double sum_exp(const float* logits, int64_t vocabulary, float largest) {
  constexpr int64_t kStretch = 16 * kBlock;  // summed in float32, the stretches in float64
  float tail[kBlock];
  double total = 0;
  for (int64_t begin = 0; begin < vocabulary; begin += kStretch) {
    const int64_t end = std::min(begin + kStretch, vocabulary);
    float sums[kLanes] = {};
    for (int64_t at = begin; at < end; at += kBlock) {
      const float* x = whole_block(logits + at, vocabulary - at, tail);
      for (int64_t j = 0; j < kLanes; j++) {
        float sum = sums[j];
#pragma GCC unroll 4
        for (int64_t i = j; i < kBlock; i += kLanes) {
          const float d = x[i] - largest;
          sum += exp_negative(0.0f < d ? 0.0f : d);  // plus infinity is above the largest finite number
        }
        sums[j] = sum;
      }
    }
    for (const float sum : sums) total += sum;
  }
  return total;
}

// For one block of `count` logits: cost = (largest - logit) / scale, and exp(-cost); past `count`, infinity and 0.
NXD_CLONES void block_costs(
    const float* logits, int64_t count, float largest, float scale, float* __restrict cost, float* __restrict weight) {
  float tail[kBlock];
  const float* x = whole_block(logits, count, tail);
  for (int64_t i = 0; i < kBlock; i++) {
    cost[i] = (largest - cleaned(x[i])) / scale + 0.0f;  // no negative zero
    weight[i] = exp_negative(-cost[i]);
  }
}

// The inputs of a row's random numbers, besides the token id.
struct RandomKey {
  uint32_t first, second;
};

// The random bits of the tokens first_id .. first_id + kBlock - 1; whether any has bits / 2 <= weight * reach.
NXD_CLONES bool contends(
    const float* __restrict weight, float reach, int64_t first_id, RandomKey key, uint32_t* __restrict bits) {
  int32_t any = 0;
  for (int32_t i = 0; i < kBlock; i++) {
    uint32_t x = mix((static_cast<uint32_t>(first_id) + 1 + i) * 0x1e3779b9u) ^ key.first;
    x = (x ^ (x >> 16)) * 0x7feb352du + key.second;
    x = (x ^ (x >> 15)) * 0x2c1b3c6du;
    x = (x ^ (x >> 12)) * 0x297a2d39u;
    x = x ^ (x >> 15);
    bits[i] = x;
    any |= static_cast<float>(static_cast<int32_t>(x >> 1)) <= weight[i] * reach;
  }
  return any != 0;
}

// --- a row ---

RandomKey random_key(int64_t seed, int64_t position) {
  const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  const uint32_t key = mix(mix(low) ^ (high + 0x1e3779b9u));
  const uint32_t first = mix(key + static_cast<uint32_t>(position) * 0x1e3779b9u);
  return RandomKey{first, mix(first ^ high ^ 0x297a2d39u)};
}

// The k-th largest of the block maxima: at least k tokens are as large. Minus infinity if there are fewer blocks.
float kth_largest(const float* maxima, int64_t blocks, int64_t k, std::vector<float>& ranked) {
  if (k > blocks) {
    return -INFINITY;
  }
  ranked.assign(maxima, maxima + blocks);
  std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<float>());
  return ranked[k - 1];
}

// The smallest cost t with sum(weight(i) where cost[i] <= t) >= target(sum of all weights), weights being whole
// numbers; infinity if there is none. Costs are non-negative, so they sort like their bits: a radix search, whose
// first histogram takes all costs and the others those that share the digits found.
template <typename Weight, typename Target>
float threshold(const float* cost, int64_t count, const Weight& weight, const Target& target, SampleScratch& scratch) {
  constexpr int kBins = 2048, kWays = 4;  // neighbours count separately: they often hit the same bin, and would stall
  auto& histogram = scratch.histogram;
  histogram.assign(kBins * kWays, 0);
  for (int64_t i = 0; i < count; i += kWays) {  // a multiple of kBlock
    for (int64_t way = 0; way < kWays; way++) {
      histogram[way * kBins + (bits_of(cost[i + way]) >> 20)] += weight(i + way);
    }
  }
  int64_t total = 0;
  for (int bin = 0; bin < kBins; bin++) {
    for (int way = 1; way < kWays; way++) {
      histogram[bin] += histogram[way * kBins + bin];
    }
    total += histogram[bin];
  }
  int64_t rest = target(total);
  if (rest > total) {
    return INFINITY;
  }
  auto bin_of_rest = [&] {  // and what is left of `rest` for that bin
    uint32_t bin = 0;
    for (; histogram[bin] < rest; bin++) {
      rest -= histogram[bin];
    }
    return bin;
  };
  uint32_t found = bin_of_rest();
  auto& inside = scratch.inside;
  if (inside.size() < static_cast<size_t>(count) + 1) {
    inside.resize(count + 1);
  }
  int64_t held = 0;
  for (int64_t i = 0; i < count; i++) {  // without a branch, which would be unpredictable
    inside[held] = static_cast<uint32_t>(i);
    held += bits_of(cost[i]) >> 20 == found;
  }
  for (int low : {10, 0}) {
    histogram.assign(1024, 0);
    for (int64_t j = 0; j < held; j++) {
      const uint32_t key = bits_of(cost[inside[j]]);
      if (key >> (low + 10) == found) {
        histogram[(key >> low) & 1023] += weight(inside[j]);
      }
    }
    found = (found << 10) | bin_of_rest();
  }
  return float_of(found);
}

// The tokens that can be sampled are in these blocks; their costs and exp(-cost) are stored block by block.
void gather_costs(
    const float* logits, int64_t vocabulary, const float* maxima, float largest, float scale, float least,
    SampleScratch& scratch) {
  const int64_t blocks = block_count(vocabulary);
  scratch.blocks.clear();
  for (int64_t b = 0; b < blocks; b++) {
    if (maxima[b] >= least && (largest - maxima[b]) / scale <= kReach) {
      scratch.blocks.push_back(b);
    }
  }
  const size_t room = scratch.blocks.size() * kBlock;
  if (scratch.cost.size() < room) {
    scratch.cost.resize(room);
    scratch.weight.resize(room);
  }
  for (size_t i = 0; i < scratch.blocks.size(); i++) {
    const int64_t begin = scratch.blocks[i] * kBlock;
    block_costs(
        logits + begin, vocabulary - begin, largest, scale, &scratch.cost[i * kBlock], &scratch.weight[i * kBlock]);
  }
}

// The largest cost that top-k, top-p and min-p all keep, or kReach.
float cost_limit(const SampleSettings& settings, bool by_k, SampleScratch& scratch) {
  const float *cost = scratch.cost.data(), *weight = scratch.weight.data();
  const auto count = static_cast<int64_t>(scratch.blocks.size()) * kBlock;
  float limit = kReach;
  if (by_k) {
    auto one = [](int64_t) { return int64_t{1}; };
    auto wanted = [&](int64_t) { return settings.top_k; };
    limit = std::min(limit, threshold(cost, count, one, wanted, scratch));
  }
  if (settings.top_p < 1.0f) {
    const double share = std::max(settings.top_p, 0.0f);
    auto mass = [&](int64_t i) { return static_cast<int64_t>(cost[i] <= limit ? weight[i] * 0x1p32f : 0.0f); };
    auto wanted = [&](int64_t total) {
      return static_cast<int64_t>(std::ceil(std::max(share * static_cast<double>(total), 1.0)));
    };
    limit = std::min(limit, threshold(cost, count, mass, wanted, scratch));
  }
  if (settings.min_p > 0.0f) {
    const double least = std::min(std::max(settings.min_p, 1e-38f), 1.0f);
    limit = std::min(limit, static_cast<float>(-std::log(least)));
  }
  return limit;
}

double score(float cost, uint32_t bits) {
  const double u = (bits + 0.5) * 0x1p-32;
  return -static_cast<double>(cost) - std::log(-std::log1p(-u));
}

// argmax(score) over the tokens with cost <= limit; the first of equals. `best` is the token of cost 0.
int64_t gumbel_argmax(int64_t best, float limit, RandomKey key, const SampleScratch& scratch) {
  const float *cost = scratch.cost.data(), *weight = scratch.weight.data();
  uint32_t bits[kBlock];
  const float nothing[kBlock] = {};
  contends(nothing, 0, best / kBlock * kBlock, key, bits);
  double highest = score(0.0f, bits[best % kBlock]);
  // The noise is -log(e) with e = -log1p(-u) >= u, so a token beats `highest` only where u < exp(-cost - highest).
  auto reach = [&] { return static_cast<float>(std::exp(-highest) * 0x1p31 * 1.0001); };
  for (size_t j = 0; j < scratch.blocks.size(); j++) {
    const int64_t first = scratch.blocks[j] * kBlock;
    const float limit_u = reach();
    if (!contends(weight + j * kBlock, limit_u, first, key, bits)) {
      continue;
    }
    for (int64_t i = 0; i < kBlock; i++) {
      const float c = cost[j * kBlock + i];
      if (c <= limit && static_cast<float>(bits[i] >> 1) <= weight[j * kBlock + i] * limit_u) {
        const double found = score(c, bits[i]);
        if (found > highest || (found == highest && first + i < best)) {
          highest = found;
          best = first + i;
        }
      }
    }
  }
  return best;
}

int64_t choose(
    const float* logits, int64_t vocabulary, const float* maxima, const SampleSettings& settings,
    SampleScratch& scratch) {
  const int64_t blocks = block_count(vocabulary);
  const int64_t first_block = std::max_element(maxima, maxima + blocks) - maxima;
  const float largest = maxima[first_block];
  if (largest == -INFINITY) {
    return 0;
  }
  int64_t best = first_block * kBlock;
  while (cleaned(logits[best]) != largest) {
    best++;
  }
  if (!(settings.temperature >= kGreedyBelow)) {
    return best;
  }
  const float scale = std::min(settings.temperature, 1e30f);
  const bool by_k = settings.top_k > 0 && settings.top_k < vocabulary;
  const float least = by_k ? kth_largest(maxima, blocks, settings.top_k, scratch.ranked) : -INFINITY;
  gather_costs(logits, vocabulary, maxima, largest, scale, least, scratch);
  const float limit = cost_limit(settings, by_k, scratch);
  return gumbel_argmax(best, limit, random_key(settings.seed, settings.position), scratch);
}

// Log probabilities of the token and of the `top` most probable ones, ties by lowest id first.
void report(
    const float* raw, int64_t vocabulary, const float* maxima, int64_t token, int64_t top, SampleScratch& scratch,
    const SampleResult& result) {
  const int64_t blocks = block_count(vocabulary), count = std::min(top, vocabulary);
  const float largest = *std::max_element(maxima, maxima + blocks);
  const bool none = largest == -INFINITY;
  const double total = none ? 0.0 : largest + std::log(sum_exp(raw, vocabulary, largest));
  auto logprob = [&](float x) { return std::max(static_cast<float>(x - total), kLogprobFloor); };
  *result.token = token;
  *result.logprob = logprob(cleaned(raw[token]));

  // `count` blocks with a maximum this large are enough to hold the best; ids ascend, so an equal one comes too late.
  const float least = count > 0 ? kth_largest(maxima, blocks, count, scratch.ranked) : INFINITY;
  float* values = result.top_logprobs;  // as logits first
  int64_t* ids = result.top_ids;
  int64_t held = 0;
  for (int64_t b = 0; b < blocks && count > 0; b++) {
    if (maxima[b] < least || (held == count && maxima[b] <= values[count - 1])) {
      continue;
    }
    const int64_t end = std::min((b + 1) * kBlock, vocabulary);
    for (int64_t id = b * kBlock; id < end; id++) {
      const float x = cleaned(raw[id]);
      if (x < least || (held == count && x <= values[count - 1])) {
        continue;
      }
      int64_t place = held == count ? count - 1 : held++;
      for (; place > 0 && values[place - 1] < x; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = x;
      ids[place] = id;
    }
  }
  for (int64_t i = 0; i < count; i++) {
    values[i] = logprob(values[i]);
  }
  std::fill(values + count, values + top, kLogprobFloor);
  std::fill(ids + count, ids + top, -1);
}

} // namespace

void sample_row(
    const float* logits, const float* raw, int64_t vocabulary, const SampleSettings& settings, int64_t top,
    SampleScratch& scratch, const SampleResult& result) {
  const int64_t blocks = block_count(vocabulary);
  scratch.raw_maxima.resize(blocks);
  block_maxima(raw, vocabulary, scratch.raw_maxima.data());
  const float* maxima = scratch.raw_maxima.data();
  if (logits != raw) {
    scratch.maxima.resize(blocks);
    block_maxima(logits, vocabulary, scratch.maxima.data());
    maxima = scratch.maxima.data();
  }
  const int64_t token = choose(logits, vocabulary, maxima, settings, scratch);
  report(raw, vocabulary, scratch.raw_maxima.data(), token, top, scratch, result);
}

} // namespace nxd
