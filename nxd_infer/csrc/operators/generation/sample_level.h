// The loops of SampleLoops for one instruction set. Included once per level by sample_loops.cpp, which defines
// NXD_LEVEL (the namespace), NXD_WIDTH (lanes of a vector) and NXD_FN (the attributes of every function): vector types
// are lowered for their function, so a common template would not work. No include guard, on purpose.
//
// Bit-equal at every level: products and sums are rounded separately (no fused multiply-add), and the only sum of
// fractions adds in an order that does not depend on the width of a vector.

namespace nxd {
namespace NXD_LEVEL {

typedef float vf __attribute__((vector_size(NXD_WIDTH * 4)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(NXD_WIDTH * 4)));
typedef uint32_t vu __attribute__((vector_size(NXD_WIDTH * 4)));

NXD_FN vf splat(float x) { return x - vf{}; }

NXD_FN vf load(const float* x) {
  vf v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

NXD_FN void store(void* to, const void* vector) { std::memcpy(to, vector, sizeof(vf)); }

NXD_FN vf cleaned(vf x) {
  x = x == x ? x : splat(-INFINITY);
  return x < splat(kLargestFinite) ? x : splat(kLargestFinite);
}

// exp(x) for x <= 0; 0 at -87 and below, and for NaN; the relative error is below 1.2e-7. The steps and constants are
// those of exp_negative in sampling.py, with one rounding each.
NXD_FN vf exp_negative(vf x) {
  const vi live = x > splat(-87.0f);
  const vf inside = live ? x : splat(-87.0f);
  const vf shifted = inside * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const vf n = shifted - 12582912.0f;
  const vf r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  // The low bits of `shifted` are n: moved into the exponent, they make 2^n.
  const vf power = (vf)(((vu)shifted << 23) + 0x3f800000u);
  return live ? y * power : vf{};
}

NXD_FN vu mix(vu x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return x ^ (x >> 15);
}

// The block, or a copy in `tail` padded with absent tokens.
NXD_FN const float* whole_block(const float* logits, int64_t count, float* tail) {
  if (count >= kBlock) {
    return logits;
  }
  for (int64_t i = 0; i < kBlock; i++) {
    tail[i] = i < count ? logits[i] : -INFINITY;
  }
  return tail;
}

NXD_FN void maxima(const float* logits, int64_t vocabulary, float* out) {
  float tail[kBlock];
  for (int64_t b = 0; b * kBlock < vocabulary; b++) {
    const float* x = whole_block(logits + b * kBlock, vocabulary - b * kBlock, tail);
    vf best = splat(-INFINITY);
    for (int64_t i = 0; i < kBlock; i += NXD_WIDTH) {
      const vf next = load(x + i);
      best = next > best ? next : best;  // never NaN
    }
    quad quads[NXD_WIDTH / 4];
    std::memcpy(quads, &best, sizeof best);
    for (int i = 1; i < NXD_WIDTH / 4; i++) {
      quads[0] = quads[i] > quads[0] ? quads[i] : quads[0];
    }
    const float low = quads[0][0] > quads[0][1] ? quads[0][0] : quads[0][1];
    const float high = quads[0][2] > quads[0][3] ? quads[0][2] : quads[0][3];
    const float largest = low > high ? low : high;
    out[b] = largest < kLargestFinite ? largest : kLargestFinite;
  }
}

NXD_FN double sum_exp(const float* logits, int64_t vocabulary, float largest) {
  constexpr int kParts = 16 / NXD_WIDTH;  // sixteen sums at every width
  constexpr int64_t kStretch = 16 * kBlock;  // summed in float32, the stretches in float64
  float tail[kBlock];
  double total = 0;
  for (int64_t begin = 0; begin < vocabulary; begin += kStretch) {
    const int64_t end = begin + kStretch < vocabulary ? begin + kStretch : vocabulary;
    vf sums[kParts] = {};
    for (int64_t at = begin; at < end; at += kBlock) {
      const float* x = whole_block(logits + at, vocabulary - at, tail);
      for (int64_t i = 0; i < kBlock; i += 16) {
        for (int part = 0; part < kParts; part++) {
          const vf d = load(x + i + part * NXD_WIDTH) - largest;
          sums[part] += exp_negative(vf{} < d ? vf{} : d);  // plus infinity is above the largest finite number
        }
      }
    }
    float lanes[16];
    std::memcpy(lanes, sums, sizeof lanes);
    for (float lane : lanes) {
      total += lane;
    }
  }
  return total;
}

NXD_FN void costs(const float* logits, int64_t count, float largest, float scale, float* cost, float* weight) {
  float tail[kBlock];
  const float* x = whole_block(logits, count, tail);
  for (int64_t i = 0; i < kBlock; i += NXD_WIDTH) {
    const vf c = (largest - cleaned(load(x + i))) / scale;
    const vf w = exp_negative(-c);
    store(cost + i, &c);
    store(weight + i, &w);
  }
}

NXD_FN bool contends(const float* weight, float reach, int64_t first_id, RandomKey key, uint32_t* bits) {
  vu id;
  for (int i = 0; i < NXD_WIDTH; i++) {
    id[i] = static_cast<uint32_t>(first_id) + 1 + static_cast<uint32_t>(i);
  }
  vi found = {};
  for (int64_t i = 0; i < kBlock; i += NXD_WIDTH) {
    vu x = mix(id * 0x1e3779b9u) ^ key.first;
    x = (x ^ (x >> 16)) * 0x7feb352du + key.second;
    x = (x ^ (x >> 15)) * 0x2c1b3c6du;
    x = (x ^ (x >> 12)) * 0x297a2d39u;
    x = x ^ (x >> 15);
    store(bits + i, &x);
    found |= __builtin_convertvector((vi)(x >> 1), vf) <= load(weight + i) * reach;
    id += static_cast<uint32_t>(NXD_WIDTH);
  }
  uint64_t words[NXD_WIDTH / 2], any = 0;
  std::memcpy(words, &found, sizeof words);
  for (uint64_t word : words) {
    any |= word;
  }
  return any != 0;
}

} // namespace NXD_LEVEL
} // namespace nxd

#undef NXD_LEVEL
#undef NXD_WIDTH
#undef NXD_FN
