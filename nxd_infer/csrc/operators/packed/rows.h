// The kernel for plain vectors: included once per instruction set, with NXD_LEVEL (a namespace), NXD_TARGET (the
// attribute), NXD_LANES and NXD_ROWS (rows whose sums fit into registers).
// NXD_PAIRS: uses dot products of pairs of bfloat16, without widening x.
// No include guard, on purpose: vectors are lowered for the target of their function before inlining, so a shared
// template would use the smallest instruction set.

namespace NXD_LEVEL {

typedef float Vector __attribute__((vector_size(4 * NXD_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * NXD_LANES)));

constexpr int kParts = static_cast<int>(kLane) / NXD_LANES;
constexpr int64_t kSoon = 8192;  // prefetch distance in bytes: the best of 2, 4, 8, 16 and 32 KiB at 4 to 32 rows
constexpr int64_t kCalm = 2;     // most rows at which the hardware prefetcher keeps up, if it is good (asks() in cpu.h)

// NXD_LANES columns of one k, in float32.
NXD_TARGET NXD_INLINE Vector widened(const float* w) {
  Vector weights;
  std::memcpy(&weights, w, sizeof(Vector));
  return weights;
}

NXD_TARGET NXD_INLINE Vector widened(const int8_t* w) {
#if NXD_LANES == 16
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))));
#elif NXD_LANES == 8
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w))));
#else
  return Vector{static_cast<float>(w[0]), static_cast<float>(w[1]), static_cast<float>(w[2]), static_cast<float>(w[3])};
#endif
}

// One step of k: sums[row] += x[row] * w. A row's value is used for all columns before the next one is loaded;
// otherwise the compiler keeps all values and has no registers left for the sums.
template <int kRows, int kSums, typename T>
NXD_TARGET NXD_INLINE void add_step(const float* x, int64_t, const T* w, Vector (*sums)[kSums]) {
  Vector weights[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) weights[i] = widened(w + i * NXD_LANES);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) {
    const float value = x[row];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) sums[row][i] += value * weights[i];
  }
}

template <int kRows, int kSums>
NXD_TARGET NXD_INLINE void add_step(const float* x, int64_t width, const BFloat16* w, Vector (*sums)[kSums]) {
  Bits pairs[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) std::memcpy(&pairs[i], w + i * 2 * NXD_LANES, sizeof(Bits));
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

#ifdef NXD_PAIRS
// NXD_LANES columns of two values of k, as pairs of bfloat16. In eight bits, the second value is `stride` behind the
// first; as float32, both are in the upper bits.
NXD_TARGET NXD_INLINE __m512bh paired(const BFloat16* w, int i, int) {
  return (__m512bh)_mm512_loadu_si512(w + i * 2 * NXD_LANES);
}

NXD_TARGET NXD_INLINE __m512bh paired(const int8_t* w, int i, int stride) {
  const Vector first = widened(w + i * NXD_LANES), second = widened(w + i * NXD_LANES + stride);
  return (__m512bh)(((Bits)first >> 16) | (Bits)second);
}

template <int kRows, int kSums, typename T>
NXD_TARGET NXD_INLINE void add_step(const BFloat16* x, int64_t, const T* w, Vector (*sums)[kSums]) {
  __m512bh weights[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i++) weights[i] = paired(w, i, kSums * NXD_LANES);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) {
    int pair;
    std::memcpy(&pair, x + 2 * row, 4);
    const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) sums[row][i] = (Vector)_mm512_dpbf16_ps((__m512)sums[row][i], value, weights[i]);
  }
}
#endif

// Values of k in one step.
template <typename X, typename T>
constexpr int64_t step_of() {
  return group_of<X>() > group_of<T>() ? group_of<X>() : group_of<T>();
}

// What a group of rows prefetches while it multiplies. When there is much to compute, hardware prefetchers do not look
// far enough ahead, and data arrives late. If they do (asks() in cpu.h), one or two rows prefetch nothing, one larger
// group prefetches at a shorter distance, several groups prefetch the next block.
//   once     what it reads soon and nobody reads again in this step: bypasses the outer caches, where it would evict
//            everything else (7 to 9 % more tokens at one row)
//   nearer   the same at half the distance
//   soon     what it reads soon, as one of several groups
//   further  the same, and half a block from `next` on, sequentially: of scattered lines half as many arrive in time
//   next     only that half, into L2 (16 rows on Zen 4: 11.6 GB/s of weights per core -> 13.7)
enum class Ask { nothing, once, nearer, soon, further, next };

// All of the panel's values of k for kRows rows and its kLanes * 16 columns.
template <typename X, typename T, int kRows, int kLanes, Ask kAsk>
NXD_TARGET void rows(const X* x, int64_t width, const Panel<T>& panel, const char* next, float* out) {
  constexpr int64_t group = step_of<X, T>(), stride = kLanes * kLane * group, bytes = stride * sizeof(T);
  constexpr bool alone = kAsk == Ask::once || kAsk == Ask::nearer;
  constexpr int64_t ahead = kAsk == Ask::nearer ? kSoon / 2 : kSoon;
  Vector sums[kRows][kLanes * kParts] = {};
  const T* w = panel.body;
  for (int64_t step = 0; step < panel.steps; step++) {
    if (kAsk == Ask::further) __builtin_prefetch(next + step * (bytes / 2), 0, 3);
    if (kAsk == Ask::next) __builtin_prefetch(next + step * (bytes / 2), 0, 2);
    const char* soon = reinterpret_cast<const char*>(w) + ahead;
#pragma GCC unroll 4
    for (int64_t line = 0; kAsk != Ask::nothing && kAsk != Ask::next && line < bytes; line += 64) {
      __builtin_prefetch(soon + line, 0, alone ? 0 : 3);
    }
    add_step<kRows>(x, width, w, sums);
    x += group * width;
    w += stride;
  }
  if (panel.tail != nullptr) add_step<kRows>(x, width, panel.tail, sums);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; row++) std::memcpy(out + row * kColumns, sums[row], sizeof(sums[row]));
}

template <typename X, typename T>
using Rows = void (*)(const X*, int64_t, const Panel<T>&, const char*, float*);

template <typename X, typename T, int kLanes, Ask kAsk, int... kRows>
Rows<X, T> pick(int64_t count, std::integer_sequence<int, kRows...>) {
  static const Rows<X, T> some[] = {rows<X, T, kRows + 1, kLanes, kAsk>...};
  return some[count - 1];
}

// One group of rows reads the weights from memory at full bandwidth. With more groups, the later ones read from a
// cache, and memory would be idle: so the first two each prefetch half of the next block.
template <typename X, typename T>
void multiply(const Left& x, const Panel<T>& panel, float* out) {
  constexpr std::make_integer_sequence<int, NXD_ROWS> counts{};
  const int64_t half = panel.steps * step_of<X, T>() * kColumns * static_cast<int64_t>(sizeof(T)) / 2;
  const char* next = reinterpret_cast<const char*>(panel.body) + 2 * half;
  const X* group = static_cast<const X*>(x.data);
  const bool asking = asks(), alone = x.rows <= x.width;
  for (int64_t row = 0, number = 0; row < x.rows; row += x.width, number++, group += x.stride) {
    const int64_t count = x.rows - row < x.width ? x.rows - row : x.width;
    const bool first = !alone && number < 2;
    const auto run = panel.width < kColumns
        ? (asking ? pick<X, T, 1, Ask::soon>(count, counts) : pick<X, T, 1, Ask::nothing>(count, counts))
        : alone && asking ? pick<X, T, 2, Ask::once>(count, counts)
        : alone && count > kCalm ? pick<X, T, 2, Ask::nearer>(count, counts)
        : first && asking ? pick<X, T, 2, Ask::further>(count, counts)
        : first ? pick<X, T, 2, Ask::next>(count, counts)
        : asking ? pick<X, T, 2, Ask::soon>(count, counts)
                 : pick<X, T, 2, Ask::nothing>(count, counts);
    run(group, x.width, panel, next + number * half, out + row * kColumns);
  }
}

constexpr int64_t kMost = NXD_ROWS;

} // namespace NXD_LEVEL

#undef NXD_LEVEL
#undef NXD_TARGET
#undef NXD_LANES
#undef NXD_ROWS
#undef NXD_PAIRS
