// The kernel that every machine can run, on vectors of NXD_LANES floats: included once for each instruction set, with
// NXD_LEVEL (a namespace), NXD_TARGET (the attribute), NXD_LANES and NXD_ROWS (rows whose sums fit into registers).
// No include guard, on purpose: vectors are lowered for the target of the function they are written in, before anything
// is inlined, so a shared template would use the smallest instruction set.

namespace NXD_LEVEL {

typedef float Vector __attribute__((vector_size(4 * NXD_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * NXD_LANES)));

constexpr int kParts = static_cast<int>(kColumns) / NXD_LANES;
// Blocks at a time: both where a vector is a block, one after the other where registers are short.
constexpr int kBlocks = kParts == 1 ? 2 : 1;
constexpr int kSums = kBlocks * kParts;

// One step of k: sums[row] += x[row] * w. A row's value is used for all columns before the next one is loaded, or the
// compiler keeps all of them and has no registers left for the sums.
template <int kRows>
NXD_TARGET NXD_INLINE void add_step(const float* x, int64_t, const float* const* w, Vector (*sums)[kSums]) {
  Vector weights[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) std::memcpy(&weights[i], w[i / kParts] + i % kParts * NXD_LANES, sizeof(Vector));
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) {
    const float value = x[row];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) sums[row][i] += value * weights[i];
  }
}

template <int kRows>
NXD_TARGET NXD_INLINE void add_step(const float* x, int64_t width, const BFloat16* const* w, Vector (*sums)[kSums]) {
  Bits pairs[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) std::memcpy(&pairs[i], w[i / kParts] + i % kParts * 2 * NXD_LANES, sizeof(Bits));
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) {
    const float first = x[row], second = x[width + row];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) {
      sums[row][i] += first * (Vector)(pairs[i] << 16);
      sums[row][i] += second * (Vector)(pairs[i] & 0xffff0000u);
    }
  }
}

template <typename T, int kRows>
NXD_TARGET void rows(const float* x, int64_t width, const Panel<T>& panel, float* out) {
  constexpr int64_t group = group_of<T>();
  for (int block = 0; block < 2; block += kBlocks) {
    Vector sums[kRows][kSums] = {};
    const T* w[kBlocks];
    for (int b = 0; b < kBlocks; b++) w[b] = panel.body[block + b];
    for (int64_t step = 0; step < panel.steps; step++) {
      if (kRows <= 4) {
        for (int b = 0; b < kBlocks; b++) __builtin_prefetch(reinterpret_cast<const char*>(w[b]) + kAhead);
      }
      add_step<kRows>(x + step * group * width, width, w, sums);
      for (int b = 0; b < kBlocks; b++) w[b] += group * kColumns;
    }
    if (panel.tail[block] != nullptr) {
      add_step<kRows>(x + panel.steps * group * width, width, &panel.tail[block], sums);
    }
    for (int row = 0; row < kRows; row++) {
      std::memcpy(out + row * 2 * kColumns + block * kColumns, sums[row], sizeof(sums[row]));
    }
  }
}

template <typename T>
void multiply(const Left& x, const Panel<T>& panel, float* out) {
  using Rows = void (*)(const float*, int64_t, const Panel<T>&, float*);
  static const Rows some[] = {
      nullptr,
      rows<T, 1>, rows<T, 2>, rows<T, 3>,
#if NXD_ROWS > 3
      rows<T, 4>, rows<T, 5>,
#endif
#if NXD_ROWS > 5
      rows<T, 6>, rows<T, 7>, rows<T, 8>, rows<T, 9>, rows<T, 10>, rows<T, 11>, rows<T, 12>,
#endif
  };
  const float* group = static_cast<const float*>(x.data);
  for (int64_t row = 0; row < x.rows; row += x.width, group += x.stride) {
    some[x.rows - row < x.width ? x.rows - row : x.width](group, x.width, panel, out + row * 2 * kColumns);
  }
}

constexpr int64_t kMost = NXD_ROWS;

} // namespace NXD_LEVEL

#undef NXD_LEVEL
#undef NXD_TARGET
#undef NXD_LANES
#undef NXD_ROWS
