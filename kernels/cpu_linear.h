// Products with a weight matrix, for one row or for hundreds.
//
// Weights in blocks of 32 along a row (formats: the ggml project) are multiplied in whole numbers: the rows of x get eight
// bits with a scale for each 32 (as in ggml), so that one instruction multiplies 32 pairs where float32 multiplies eight.
//   Q8_0: w = scale * q, q int8;   Q4_0: w = scale * (q - 8);   Q4_1: w = scale * q + min, q 0..15
// They are kept in panels of 16 rows, so that a vector holds four neighbours of eight rows: for each block of a panel
//   16 float16 scales, for Q4_1 16 float16 minima, then the quants in vectors of [8 rows][4 neighbours], for j = 0, 1...
//   rows 0..7 of neighbours 4j..4j+3, then rows 8..15. With 4 bits, the low halves hold neighbours 0..15, the high 16..31.
// This takes as many bytes as the file's order. Dense rows (float32, bfloat16) stay as they are and meet x in float32.
//
// Where eight bits lose too much, what they leave over gets eight more, and is multiplied as a second x.
//
// The result of a row of x does not depend on the rows beside it: each sum has one order, whatever the tile.
#pragma once

#include "cpu_common.h"

namespace {

constexpr int BLOCK = 32;
constexpr int PANEL = 16;
constexpr int TILE = 4;  // rows of x whose sums fit the registers

struct Matrix {
  int64_t kind;
  const uint8_t* data;
  int64_t n, k;  // rows, columns
  int64_t is_fine;  // x gets sixteen bits instead of eight, for twice the work
};

// Eight bits of rows of x.
struct Eight {
  int8_t* q;      // [m, k]
  float* scales;  // [m, k / 32]
  float* totals;  // [m, k / 32]: scale times the sum of q
  Eight from(int64_t r, int64_t k) const { return {q + r * k, scales + r * (k / BLOCK), totals + r * (k / BLOCK)}; }
};

// Rows of x, as floats and with eight bits; what those leave over, where a matrix is fine.
struct Rows {
  const float* x;  // [m, k]
  Eight first, rest;
  Rows from(int64_t r, int64_t k) const { return {x + r * k, first.from(r, k), rest.from(r, k)}; }
};

inline bool is_dense(int64_t kind) { return kind == F32 || kind == BF16; }

// Bits for row r of x, as the matrix wants them.
inline void quantize_row(const Rows& rows, int64_t r, const Matrix& w) {
  const Rows row = rows.from(r, w.k);
  for (int64_t b = 0; b < w.k / BLOCK; b++) {
    const float* x = row.x + b * BLOCK;
    const auto store = [&](const Eight& to, const float* from) {
      int8_t* q = to.q + b * BLOCK;
      to.scales[b] = to_int8(from, BLOCK, q);
      int32_t total = 0;
      for (int i = 0; i < BLOCK; i++) total += q[i];
      to.totals[b] = to.scales[b] * total;
    };
    store(row.first, x);
    if (!w.is_fine) continue;
    float left[BLOCK];
    for (int i = 0; i < BLOCK; i += 8)
      store8(left + i, fma8(load8(row.first.q + b * BLOCK + i), splat(-row.first.scales[b]), load8(x + i)));
    store(row.rest, left);
  }
}

constexpr bool has_minima(int kind) { return kind == Q4_1; }
constexpr int scale_bytes(int kind) { return has_minima(kind) ? 4 * PANEL : 2 * PANEL; }
constexpr int quant_bytes(int kind) { return (kind == Q8_0 ? BLOCK : BLOCK / 2) * PANEL; }
constexpr int panel_bytes(int kind) { return scale_bytes(kind) + quant_bytes(kind); }
constexpr int file_bytes(int kind) { return panel_bytes(kind) / PANEL; }

// A panel with a byte for each weight and float scales, for use by many rows.
struct Unpacked {
  uint8_t* quants;  // [k / 32][8][16 * 4]
  float* scales;    // [k / 32][16 scales, 16 minima]
};
constexpr int UNPACKED_QUANTS = BLOCK * PANEL, UNPACKED_SCALES = 2 * PANEL;  // for a block of the panel

#ifdef FOREWORD_AVX2

inline __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256i bytes32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Scales and minima of eight rows of a panel's block; Q4_0 has a minimum of -8 scales.
template <int KIND>
inline void scales8(const uint8_t* block, int half, __m256* scale, __m256* least) {
  *scale = halves(block + 16 * half);
  if constexpr (KIND == Q4_1) *least = halves(block + 2 * PANEL + 16 * half);
  if constexpr (KIND == Q4_0) *least = _mm256_mul_ps(*scale, _mm256_set1_ps(-8.0f));
}

template <int KIND>
void unpack(const uint8_t* panel, int64_t blocks, const Unpacked& out) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int64_t b = 0; b < blocks; b++, panel += panel_bytes(KIND)) {
    for (int half = 0; half < 2; half++) {
      __m256 scale, least = _mm256_setzero_ps();
      scales8<KIND>(panel, half, &scale, &least);
      _mm256_storeu_ps(out.scales + b * UNPACKED_SCALES + 8 * half, scale);
      _mm256_storeu_ps(out.scales + b * UNPACKED_SCALES + PANEL + 8 * half, least);
    }
    const uint8_t* from = panel + scale_bytes(KIND);
    uint8_t* to = out.quants + b * UNPACKED_QUANTS;
    if constexpr (KIND == Q8_0) {
      std::memcpy(to, from, UNPACKED_QUANTS);
    } else {
      for (int i = 0; i < UNPACKED_QUANTS / 2; i += 32) {
        const __m256i v = bytes32(from + i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_and_si256(v, mask));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + UNPACKED_QUANTS / 2 + i),
                            _mm256_and_si256(_mm256_srli_epi16(v, 4), mask));
      }
    }
  }
}

// Sums of products of 32 weights with 32 numbers of x, for eight rows of weights, collected over a block. Four bits times
// eight: sums of all 16 pairs of a lane stay under 2^15. Eight bits: the signs go to one side, since the instruction
// wants unsigned times signed.
template <int KIND>
inline void collect(__m256i& total, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (KIND == Q8_0) total = _mm256_dpbusd_epi32(total, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  else total = _mm256_dpbusd_epi32(total, w, x);
#else
  if constexpr (KIND == Q8_0) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  } else {
    total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w, x));
  }
#endif
  asm("" : "+x"(total));  // one sum after the other: as a tree, which GCC prefers, they do not fit the registers
}

template <int KIND>
inline __m256 collected(__m256i total) {
#if !(defined(__AVX512VNNI__) && defined(__AVX512VL__))
  if constexpr (KIND != Q8_0) total = _mm256_madd_epi16(total, _mm256_set1_epi16(1));
#endif
  return _mm256_cvtepi32_ps(total);
}

// y [R, 16] (+)= R rows of x with a panel: packed at `w`, or unpacked where IS_UNPACKED.
template <int KIND, bool IS_UNPACKED, int R, bool ADD>
inline void panel_times(const uint8_t* w, const Unpacked& unpacked, const Eight& x, int64_t k, float* y) {
  const int64_t blocks = k / BLOCK;
  const __m256i mask = _mm256_set1_epi8(15);
  __m256 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; b++) {
    __m256i total[R][2];
    for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
    const auto x4 = [&](int r, int i) {
      int32_t four;
      std::memcpy(&four, x.q + r * k + b * BLOCK + i, sizeof four);
      return _mm256_set1_epi32(four);
    };
    const uint8_t* quants = IS_UNPACKED ? unpacked.quants + b * UNPACKED_QUANTS : w + scale_bytes(KIND);
    if constexpr (IS_UNPACKED || KIND == Q8_0) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const __m256i first = bytes32(quants + 64 * j), second = bytes32(quants + 64 * j + 32);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const __m256i four = x4(r, 4 * j);
          collect<KIND>(total[r][0], first, four);
          collect<KIND>(total[r][1], second, four);
        }
      }
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m256i v[2] = {bytes32(quants + 64 * j), bytes32(quants + 64 * j + 32)};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const __m256i low = _mm256_and_si256(v[half], mask);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(v[half], 4), mask);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            collect<KIND>(total[r][half], low, x4(r, 4 * j));
            collect<KIND>(total[r][half], high, x4(r, 16 + 4 * j));
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m256 scale, least;
      if constexpr (IS_UNPACKED) {
        scale = _mm256_loadu_ps(unpacked.scales + b * UNPACKED_SCALES + 8 * half);
        if constexpr (KIND != Q8_0) least = _mm256_loadu_ps(unpacked.scales + b * UNPACKED_SCALES + PANEL + 8 * half);
      } else {
        scales8<KIND>(w, half, &scale, &least);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x.scales[r * blocks + b]));
        acc[r][half] = _mm256_fmadd_ps(collected<KIND>(total[r][half]), by, acc[r][half]);
        if constexpr (KIND != Q8_0)
          acc[r][half] = _mm256_fmadd_ps(least, _mm256_set1_ps(x.totals[r * blocks + b]), acc[r][half]);
      }
    }
    if constexpr (!IS_UNPACKED) w += panel_bytes(KIND);
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) {
      float* out = y + r * PANEL + 8 * half;
      _mm256_storeu_ps(out, ADD ? _mm256_add_ps(_mm256_loadu_ps(out), acc[r][half]) : acc[r][half]);
    }
}

#else

template <int KIND>
void unpack(const uint8_t* panel, int64_t blocks, const Unpacked& out) {
  for (int64_t b = 0; b < blocks; b++, panel += panel_bytes(KIND)) {
    float* scales = out.scales + b * UNPACKED_SCALES;
    for (int c = 0; c < PANEL; c++) {
      scales[c] = half_to_float(panel + 2 * c);
      scales[PANEL + c] = KIND == Q4_1 ? half_to_float(panel + 2 * PANEL + 2 * c) : KIND == Q4_0 ? -8.0f * scales[c] : 0;
    }
    const uint8_t* from = panel + scale_bytes(KIND);
    uint8_t* to = out.quants + b * UNPACKED_QUANTS;
    for (int i = 0; i < quant_bytes(KIND); i++) {
      to[i] = KIND == Q8_0 ? from[i] : from[i] & 15;
      if (KIND != Q8_0) to[UNPACKED_QUANTS / 2 + i] = from[i] >> 4;
    }
  }
}

template <int KIND, bool IS_UNPACKED, int R, bool ADD>
inline void panel_times(const uint8_t*, const Unpacked& unpacked, const Eight& x, int64_t k, float* y) {
  static_assert(IS_UNPACKED);
  const int64_t blocks = k / BLOCK;
  for (int r = 0; r < R; r++) {
    float acc[PANEL] = {};
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* quants = unpacked.quants + b * UNPACKED_QUANTS;
      const float* scales = unpacked.scales + b * UNPACKED_SCALES;
      int32_t total[PANEL] = {};
      for (int j = 0; j < 8; j++)
        for (int c = 0; c < PANEL; c++)
          for (int i = 0; i < 4; i++) {
            const uint8_t w = quants[64 * j + 4 * c + i];
            total[c] += (KIND == Q8_0 ? static_cast<int8_t>(w) : w) * x.q[r * k + b * BLOCK + 4 * j + i];
          }
      for (int c = 0; c < PANEL; c++) {
        acc[c] += total[c] * (scales[c] * x.scales[r * blocks + b]);
        if (KIND != Q8_0) acc[c] += scales[PANEL + c] * x.totals[r * blocks + b];
      }
    }
    for (int c = 0; c < PANEL; c++) y[r * PANEL + c] = (ADD ? y[r * PANEL + c] : 0.0f) + acc[c];
  }
}

#endif

// One weight of a panel, for looking up and unpacking rows.
template <int KIND>
inline float weight_at(const uint8_t* block, int row, int i) {
  const float scale = half_to_float(block + 2 * row);
  const uint8_t* quants = block + scale_bytes(KIND);
  const auto at = [&](int t) { return quants[64 * (t / 4) + 4 * row + t % 4]; };
  if constexpr (KIND == Q8_0) return scale * static_cast<int8_t>(at(i));
  const int q = i < 16 ? at(i) & 15 : at(i - 16) >> 4;
  if constexpr (KIND == Q4_0) return scale * (q - 8);
  return scale * q + half_to_float(block + 2 * PANEL + 2 * row);
}

// NR rows of dense weights with MR rows of x, y[r * PANEL + i].
template <class T, int NR, int MR>
inline void dense_tile(const T* w, const float* x, int64_t k, float* y) {
  v8 acc[NR][MR] = {};
  for (int64_t at = 0; at < k; at += 8) {
    v8 u[MR];  // 12 sums, these three and a weight's: 16 registers
#pragma GCC unroll 3
    for (int r = 0; r < MR; r++) u[r] = hold(load8(x + r * k + at));
#pragma GCC unroll 4
    for (int i = 0; i < NR; i++) {
      const v8 v = hold(load8(w + i * k + at));
#pragma GCC unroll 3
      for (int r = 0; r < MR; r++) acc[i][r] = fma8(v, u[r], acc[i][r]);
    }
  }
  for (int r = 0; r < MR; r++) {
    if constexpr (NR == 4) {
      const v4 four = sums(acc[0][r], acc[1][r], acc[2][r], acc[3][r]);
      std::memcpy(y + r * PANEL, &four, sizeof four);
    } else {
      for (int i = 0; i < NR; i++) y[r * PANEL + i] = sum(acc[i][r]);
    }
  }
}

template <class T>
void dense_panel(const T* w, int64_t count, const float* x, int64_t k, int64_t m, float* y) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    int64_t r = 0;
    for (; r + 3 <= m; r += 3) dense_tile<T, 4, 3>(w + i * k, x + r * k, k, y + r * PANEL + i);
    for (; r < m; r++) dense_tile<T, 4, 1>(w + i * k, x + r * k, k, y + r * PANEL + i);
  }
  for (; i < count; i++)
    for (int64_t r = 0; r < m; r++) dense_tile<T, 1, 1>(w + i * k, x + r * k, k, y + r * PANEL + i);
}

// y (+)= m rows of x with a panel; ADD: the second time, the panel is still unpacked if it was.
template <int KIND, bool ADD>
void block_panel(const uint8_t* w, const Eight& x, int64_t k, int64_t m, const Unpacked& room, float* y) {
#ifdef FOREWORD_AVX2
  switch (m) {  // so few rows use a weight that it is not worth writing down
    case 1: return panel_times<KIND, false, 1, ADD>(w, room, x, k, y);
    case 2: return panel_times<KIND, false, 2, ADD>(w, room, x, k, y);
    case 3: return panel_times<KIND, false, 3, ADD>(w, room, x, k, y);
    case 4: return panel_times<KIND, false, 4, ADD>(w, room, x, k, y);
  }
#endif
  if (!ADD) unpack<KIND>(w, k / BLOCK, room);
  int64_t r = 0;
  for (; r + TILE <= m; r += TILE) panel_times<KIND, true, TILE, ADD>(w, room, x.from(r, k), k, y + r * PANEL);
  for (; r < m; r++) panel_times<KIND, true, 1, ADD>(w, room, x.from(r, k), k, y + r * PANEL);
}

// y [m, 16] of a panel of the matrix with m rows of x; columns beyond the matrix are left as they are.
void panel_of(const Matrix& w, int64_t panel, const Rows& x, int64_t m, const Unpacked& room, float* y) {
  const int64_t count = std::min<int64_t>(PANEL, w.n - panel * PANEL);
  const auto packed = [&](auto kind) {
    constexpr int K = decltype(kind)::value;
    const uint8_t* at = w.data + panel * (w.k / BLOCK) * panel_bytes(K);
    block_panel<K, false>(at, x.first, w.k, m, room, y);
    if (w.is_fine) block_panel<K, true>(at, x.rest, w.k, m, room, y);
  };
  switch (w.kind) {
    case F32: return dense_panel(reinterpret_cast<const float*>(w.data) + panel * PANEL * w.k, count, x.x, w.k, m, y);
    case BF16: return dense_panel(reinterpret_cast<const uint16_t*>(w.data) + panel * PANEL * w.k, count, x.x, w.k, m, y);
    case Q4_0: return packed(std::integral_constant<int, Q4_0>());
    case Q4_1: return packed(std::integral_constant<int, Q4_1>());
    case Q8_0: return packed(std::integral_constant<int, Q8_0>());
  }
}

inline int64_t num_panels(int64_t n) { return (n + PANEL - 1) / PANEL; }

// From the file's order to panels; rows beyond the matrix become zero.
template <int KIND>
void pack(const uint8_t* w, uint8_t* out, int64_t n, int64_t k, int threads) {
  const int64_t blocks = k / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t p = 0; p < num_panels(n); p++)
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* to = out + (p * blocks + b) * panel_bytes(KIND);
      std::memset(to, 0, panel_bytes(KIND));
      for (int c = 0; c < PANEL && p * PANEL + c < n; c++) {
        const uint8_t* from = w + ((p * PANEL + c) * blocks + b) * file_bytes(KIND);
        std::memcpy(to + 2 * c, from, 2);
        if (has_minima(KIND)) std::memcpy(to + 2 * PANEL + 2 * c, from + 2, 2);
        from += scale_bytes(KIND) / PANEL;
        for (int t = 0; t < quant_bytes(KIND) / PANEL; t++)
          to[scale_bytes(KIND) + 64 * (t / 4) + 4 * c + t % 4] = from[t];
      }
    }
}

// out [count, k]: some rows of a packed matrix, as floats.
template <int KIND>
void look_up(const uint8_t* w, const int64_t* ids, float* out, int64_t count, int64_t k, int threads) {
  const int64_t blocks = k / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < k; i++)
      out[r * k + i] = weight_at<KIND>(w + (ids[r] / PANEL * blocks + i / BLOCK) * panel_bytes(KIND),
                                       static_cast<int>(ids[r] % PANEL), static_cast<int>(i % BLOCK));
}

}  // namespace
