#include "generation/adjust.h"

#include "machine/scalar.h"

#include <algorithm>
#include <cmath>

// A product and a difference are rounded separately, as in PyTorch.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace nxd {
namespace {

// A NaN setting counts as set, and propagates through the formulas.
bool wished(const float* setting, float off) { return setting != nullptr && !(*setting == off); }

bool allows_all(const int32_t* words, int64_t vocabulary) {
  const int64_t whole = vocabulary / 32, rest = vocabulary % 32;
  int32_t all = -1;
  for (int64_t i = 0; i < whole; i++) {
    all &= words[i];
  }
  const uint32_t last = rest == 0 ? 0 : ~static_cast<uint32_t>(words[whole]) << (32 - rest);
  return all == -1 && last == 0;
}

// counts and seen may be null.
NXD_CLONES void repeat_penalty(float* x, int64_t n, const int32_t* counts, const bool* seen, float factor) {
  for (int64_t i = 0; i < n; i++) {
    const bool known = (seen != nullptr && seen[i]) || (counts != nullptr && counts[i] > 0);
    const float changed = x[i] > 0 ? x[i] / factor : x[i] * factor;
    x[i] = known ? changed : x[i];
  }
}

NXD_CLONES void presence_penalty(float* x, int64_t n, const int32_t* counts, float presence) {
  for (int64_t i = 0; i < n; i++) {
    x[i] -= presence * (counts[i] > 0 ? 1.0f : 0.0f);
  }
}

NXD_CLONES void frequency_penalty(float* x, int64_t n, const int32_t* counts, float frequency) {
  for (int64_t i = 0; i < n; i++) {
    x[i] -= frequency * static_cast<float>(counts[i]);
  }
}

NXD_CLONES void mask(float* x, int64_t n, const int32_t* words) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const auto word = static_cast<uint32_t>(words[begin / 32]);
    const int64_t count = std::min<int64_t>(32, n - begin);
    for (int64_t i = 0; i < count; i++) {
      x[begin + i] = (word >> i) & 1 ? x[begin + i] : -INFINITY;
    }
  }
}

} // namespace

const float* adjust_row(
    const float* raw, int64_t vocabulary, const Adjustment& adjustment, std::vector<float>& memory) {
  const bool repeated = wished(adjustment.repetition, 1.0f);
  const bool present = adjustment.counts != nullptr && wished(adjustment.presence, 0.0f);
  const bool frequent = adjustment.counts != nullptr && wished(adjustment.frequency, 0.0f);
  const bool biased = std::any_of(
      adjustment.bias_values, adjustment.bias_values + adjustment.biases, [](float v) { return !(v == 0.0f); });
  const bool masked = adjustment.allowed != nullptr && !allows_all(adjustment.allowed, vocabulary);
  if (!(repeated || present || frequent || biased || masked)) {
    return raw;
  }
  memory.assign(raw, raw + vocabulary);
  float* x = memory.data();
  if (repeated) {
    repeat_penalty(x, vocabulary, adjustment.counts, adjustment.seen, *adjustment.repetition);
  }
  if (present) {
    presence_penalty(x, vocabulary, adjustment.counts, *adjustment.presence);
  }
  if (frequent) {
    frequency_penalty(x, vocabulary, adjustment.counts, *adjustment.frequency);
  }
  if (biased) {
    for (int64_t i = 0; i < adjustment.biases; i++) {
      if (adjustment.bias_ids[i] >= 0 && adjustment.bias_ids[i] < vocabulary) {
        x[adjustment.bias_ids[i]] += adjustment.bias_values[i];
      }
    }
  }
  if (masked) {
    mask(x, vocabulary, adjustment.allowed);
  }
  return x;
}

} // namespace nxd
