// Products with weights that stay in ggml's block formats, for the few rows of a decode step, where reading the weights
// is the whole cost. Built by kernels/cpu.py, called through ctypes.
//
// A block is 32 neighbouring weights of a row:
//   Q8_0, 34 bytes: float16 scale, 32 x int8;             w = scale * q
//   Q4_0, 18 bytes: float16 scale, 16 bytes;              w = scale * (q - 8)
//   Q4_1, 20 bytes: float16 scale, float16 min, 16 bytes; w = scale * q + min
// The 16 bytes hold values 0..15 in their low halves and 16..31 in their high halves. Format: the ggml project.

#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define FOREWORD_AVX2 1
#endif

namespace {

enum Kind { Q8_0 = 8, Q4_0 = 2, Q4_1 = 3 };
constexpr int BLOCK = 32;
constexpr int MAX_ROWS = 8;  // of x at once: their sums fill the registers

float half_to_float(const uint8_t* p) {
  _Float16 h;
  std::memcpy(&h, p, sizeof h);
  return static_cast<float>(h);
}

template <int KIND>
constexpr int block_bytes() {
  return KIND == Q8_0 ? 34 : KIND == Q4_0 ? 18 : 20;
}

#ifdef FOREWORD_AVX2

__m256 widen_u8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)); }
__m256 widen_s8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)); }

// The 32 weights of a block, in four vectors.
template <int KIND>
inline void unpack(const uint8_t* b, __m256 w[4]) {
  const __m256 scale = _mm256_set1_ps(half_to_float(b));
  if constexpr (KIND == Q8_0) {
    for (int i = 0; i < 4; i++) {
      const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + 2 + 8 * i));
      w[i] = _mm256_mul_ps(widen_s8(q), scale);
    }
    return;
  }
  const __m256 low = KIND == Q4_1 ? _mm256_set1_ps(half_to_float(b + 2))
                                  : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
  const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + (KIND == Q4_1 ? 4 : 2)));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i lo = _mm_and_si128(q, mask), hi = _mm_and_si128(_mm_srli_epi16(q, 4), mask);
  w[0] = _mm256_fmadd_ps(widen_u8(lo), scale, low);
  w[1] = _mm256_fmadd_ps(widen_u8(_mm_srli_si128(lo, 8)), scale, low);
  w[2] = _mm256_fmadd_ps(widen_u8(hi), scale, low);
  w[3] = _mm256_fmadd_ps(widen_u8(_mm_srli_si128(hi, 8)), scale, low);
}

float sum(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// One row of weights against R rows of x. SPLIT sums a row keep the FMA units busy when R is small.
template <int KIND, int R>
inline void row_times(const uint8_t* w, const float* x, int64_t k, float* y, int64_t ldy) {
  constexpr int SPLIT = R == 1 ? 4 : R <= 4 ? 2 : 1;
  __m256 acc[R][SPLIT];
  for (int r = 0; r < R; r++)
    for (int s = 0; s < SPLIT; s++) acc[r][s] = _mm256_setzero_ps();
  for (int64_t at = 0; at < k; at += BLOCK, w += block_bytes<KIND>()) {
    __m256 v[4];
    unpack<KIND>(w, v);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        acc[r][i % SPLIT] = _mm256_fmadd_ps(v[i], _mm256_loadu_ps(x + r * k + at + 8 * i), acc[r][i % SPLIT]);
  }
  for (int r = 0; r < R; r++) {
    __m256 total = acc[r][0];
    for (int s = 1; s < SPLIT; s++) total = _mm256_add_ps(total, acc[r][s]);
    y[r * ldy] = sum(total);
  }
}

template <int KIND>
void unpack_to(const uint8_t* b, float* out) {
  __m256 w[4];
  unpack<KIND>(b, w);
  for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + 8 * i, w[i]);
}

#else

template <int KIND>
void unpack_to(const uint8_t* b, float* out) {
  const float scale = half_to_float(b);
  if constexpr (KIND == Q8_0) {
    for (int i = 0; i < BLOCK; i++) out[i] = scale * static_cast<int8_t>(b[2 + i]);
    return;
  }
  const float low = KIND == Q4_1 ? half_to_float(b + 2) : -8.0f * scale;
  const uint8_t* q = b + (KIND == Q4_1 ? 4 : 2);
  for (int i = 0; i < 16; i++) {
    out[i] = scale * (q[i] & 15) + low;
    out[16 + i] = scale * (q[i] >> 4) + low;
  }
}

template <int KIND, int R>
inline void row_times(const uint8_t* w, const float* x, int64_t k, float* y, int64_t ldy) {
  float acc[R] = {}, v[BLOCK];
  for (int64_t at = 0; at < k; at += BLOCK, w += block_bytes<KIND>()) {
    unpack_to<KIND>(w, v);
    for (int r = 0; r < R; r++) {
      float s = 0;
#pragma omp simd reduction(+ : s)
      for (int i = 0; i < BLOCK; i++) s += v[i] * x[r * k + at + i];
      acc[r] += s;
    }
  }
  for (int r = 0; r < R; r++) y[r * ldy] = acc[r];
}

#endif

template <int KIND>
void rows_times(const uint8_t* w, const float* x, int64_t k, float* y, int64_t ldy, int64_t m) {
  for (; m >= MAX_ROWS; m -= MAX_ROWS, x += MAX_ROWS * k, y += MAX_ROWS * ldy) row_times<KIND, 8>(w, x, k, y, ldy);
  switch (m) {
    case 1: return row_times<KIND, 1>(w, x, k, y, ldy);
    case 2: return row_times<KIND, 2>(w, x, k, y, ldy);
    case 3: return row_times<KIND, 3>(w, x, k, y, ldy);
    case 4: return row_times<KIND, 4>(w, x, k, y, ldy);
    case 5: return row_times<KIND, 5>(w, x, k, y, ldy);
    case 6: return row_times<KIND, 6>(w, x, k, y, ldy);
    case 7: return row_times<KIND, 7>(w, x, k, y, ldy);
  }
}

template <int KIND>
void linear(const uint8_t* w, const float* x, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  const int64_t row_bytes = k / BLOCK * block_bytes<KIND>();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < n; i++) rows_times<KIND>(w + i * row_bytes, x, k, y + i, n, m);
}

template <int KIND>
void dequantize(const uint8_t* w, float* out, int64_t blocks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < blocks; i++) unpack_to<KIND>(w + i * block_bytes<KIND>(), out + i * BLOCK);
}

}  // namespace

extern "C" {

// y [m, n] = x [m, k] times the transpose of w [n, k in blocks]; float32, rows without gaps; k a multiple of 32.
// Returns 0, or 1 for a kind that is not known.
int foreword_linear(int kind, const uint8_t* w, const float* x, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  switch (kind) {
    case Q8_0: linear<Q8_0>(w, x, y, m, n, k, threads); return 0;
    case Q4_0: linear<Q4_0>(w, x, y, m, n, k, threads); return 0;
    case Q4_1: linear<Q4_1>(w, x, y, m, n, k, threads); return 0;
  }
  return 1;
}

// out [blocks * 32] = the weights of a run of blocks.
int foreword_dequantize(int kind, const uint8_t* w, float* out, int64_t blocks, int threads) {
  switch (kind) {
    case Q8_0: dequantize<Q8_0>(w, out, blocks, threads); return 0;
    case Q4_0: dequantize<Q4_0>(w, out, blocks, threads); return 0;
    case Q4_1: dequantize<Q4_1>(w, out, blocks, threads); return 0;
  }
  return 1;
}
}
