// The kernel for weights of four bits (nibbles.h): included once per instruction set, with NXD_LEVEL (a namespace) and
// NXD_TARGET (the attribute); NXD_BYTES: 1 for products of bytes that are added in sixteen bits, 2 for VNNI, 0 for
// neither. No include guard, as in rows.h.

namespace NXD_LEVEL {

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Whole __attribute__((vector_size(32)));
typedef uint16_t Scales __attribute__((vector_size(16)));
typedef uint8_t Zeros __attribute__((vector_size(8)));

// The numbers of eight columns and a cell: of each eight k the low halves, then the high ones.
struct Numbers {
#if NXD_BYTES
  __m256i part[kCell / 4];
#else
  uint8_t part[kCell / 4][4 * kEight];
#endif
};

NXD_TARGET NXD_INLINE void unpack(const uint8_t* bytes, Numbers* to) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++, bytes += 32) {
#if NXD_BYTES
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)), half = _mm256_set1_epi8(15);
    to->part[2 * i] = _mm256_and_si256(both, half);
    to->part[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), half);
#else
    for (int b = 0; b < 32; b++) to->part[2 * i][b] = bytes[b] & 15;
    for (int b = 0; b < 32; b++) to->part[2 * i + 1][b] = bytes[b] >> 4;
#endif
  }
}

// sums[column] = sum over k of u * q. Sixteen products of four bits and eight are below 2^15.
NXD_TARGET NXD_INLINE void dot(const Numbers& numbers, const int8_t* q, Whole* sums) {
#if NXD_BYTES
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < kCell / 4; i++) {
    int four;
    std::memcpy(&four, q + 4 * i, 4);
#if NXD_BYTES == 2
    sum = _mm256_dpbusd_epi32(sum, numbers.part[i], _mm256_set1_epi32(four));
#else
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(numbers.part[i], _mm256_set1_epi32(four)));
#endif
  }
  *sums = (Whole)(NXD_BYTES == 2 ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
#else
  Whole sum = {};
  for (int i = 0; i < kCell / 4; i++) {
    for (int b = 0; b < 4 * kEight; b++) sum[b / 4] += numbers.part[i][b] * q[4 * i + b % 4];
  }
  *sums = sum;
#endif
}

// Adds to the sums of `count` rows. Numbers are unpacked once for all of them.
NXD_TARGET void rows(const Panel<Nibbles>& w, const Cell* cells, int64_t count, bool asking, float* out) {
  const int64_t group = w.form.group(), subs = group / kCell;
  const uint8_t* body = w.body;
  for (int64_t cell = 0; cell < w.cells; cell += subs, body += kColumns * w.form.bytes) {
    const int64_t end = cell + subs < w.cells ? cell + subs : w.cells;
    for (int64_t column = 0; column < kColumns; column += kEight) {
      const uint8_t* scales = body + kColumns * group / 2;
      Scales halves;
      std::memcpy(&halves, scales + 2 * column, sizeof(halves));
      const Eight scale = (Eight)(__builtin_convertvector(halves, Whole) << 16);
      Eight zero = Eight{} + 8.0f;
      if (w.form.zeros()) {
        Zeros sixteenths;
        std::memcpy(&sixteenths, scales + 2 * kColumns + column, sizeof(sixteenths));
        zero = __builtin_convertvector(__builtin_convertvector(sixteenths, Whole), Eight) * 0.0625f;
      }
      const uint8_t* bytes = body + column * group / 2;
      for (int64_t at = cell; at < end; at++, bytes += kCellBytes) {
        for (int64_t line = 0; asking && line < kCellBytes; line += 64) __builtin_prefetch(bytes + kAhead + line, 0, 3);
        Numbers numbers;
        unpack(bytes, &numbers);
        const Cell* x = cells + at * count;
        float* sums = out + column;
        for (int64_t row = 0; row < count; row++, x++, sums += kColumns) {
          Whole sum;
          Eight before;
          dot(numbers, x->q, &sum);
          const Eight whole = __builtin_convertvector(sum, Eight) - zero * x->sum;  // exact: few bits
          std::memcpy(&before, sums, sizeof(before));
          before += whole * (scale * x->scale);
          std::memcpy(sums, &before, sizeof(before));
        }
      }
    }
  }
}

void multiply(const Left& x, const Panel<Nibbles>& w, float* out) {
  std::fill(out, out + x.rows * kColumns, 0.0f);
  const Cell* cells = static_cast<const Cell*>(x.data);
  for (int64_t row = 0; row < x.rows; row += x.width, cells += x.stride) {
    rows(w, cells, std::min(x.width, x.rows - row), row == 0 && asks(), out + row * kColumns);
  }
}

} // namespace NXD_LEVEL

#undef NXD_LEVEL
#undef NXD_TARGET
#undef NXD_BYTES
