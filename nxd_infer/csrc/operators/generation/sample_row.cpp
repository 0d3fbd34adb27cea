#include "generation/sample_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace nxd {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kLogprobFloor = -9999.0f;
// Gumbel noise of 32 bits lies within [-3.131, 22.874]: a token whose cost exceeds the difference cannot be drawn
// because the best token has cost 0 and is always kept. Its mass for top-p is 0 as well.
constexpr float kReach = 26.01f;

float cleaned(float x) {
  if (std::isnan(x)) {
    return -INFINITY;
  }
  return std::min(x, kLargestFinite);
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return x ^ (x >> 15);
}

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
  const SampleLoops& loops = sample_loops();
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
    loops.costs(
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
  const SampleLoops& loops = sample_loops();
  const float *cost = scratch.cost.data(), *weight = scratch.weight.data();
  uint32_t bits[kBlock];
  const float nothing[kBlock] = {};
  loops.contends(nothing, 0, best / kBlock * kBlock, key, bits);
  double highest = score(0.0f, bits[best % kBlock]);
  // The noise is -log(e) with e = -log1p(-u) >= u, so a token beats `highest` only where u < exp(-cost - highest).
  auto reach = [&] { return static_cast<float>(std::exp(-highest) * 0x1p31 * 1.0001); };
  for (size_t j = 0; j < scratch.blocks.size(); j++) {
    const int64_t first = scratch.blocks[j] * kBlock;
    const float limit_u = reach();
    if (!loops.contends(weight + j * kBlock, limit_u, first, key, bits)) {
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
  const double total = none ? 0.0 : largest + std::log(sample_loops().sum_exp(raw, vocabulary, largest));
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
  const SampleLoops& loops = sample_loops();
  const int64_t blocks = block_count(vocabulary);
  scratch.raw_maxima.resize(blocks);
  loops.maxima(raw, vocabulary, scratch.raw_maxima.data());
  const float* maxima = scratch.raw_maxima.data();
  if (logits != raw) {
    scratch.maxima.resize(blocks);
    loops.maxima(logits, vocabulary, scratch.maxima.data());
    maxima = scratch.maxima.data();
  }
  const int64_t token = choose(logits, vocabulary, maxima, settings, scratch);
  report(raw, vocabulary, scratch.raw_maxima.data(), token, top, scratch, result);
}

} // namespace nxd
