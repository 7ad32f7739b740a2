// A decoder's layers for a few rows, as in a decode step, where reading the weights and the KV is the whole cost: all layers
// in one parallel region, so that nothing else is left to pay for. Built by kernels/cpu.py, called through ctypes.
//
// Weights are float32, bfloat16, or stay in ggml's block formats. A block is 32 neighbouring weights of a row:
//   Q8_0, 34 bytes: float16 scale, 32 x int8;             w = scale * q
//   Q4_0, 18 bytes: float16 scale, 16 bytes;              w = scale * (q - 8)
//   Q4_1, 20 bytes: float16 scale, float16 min, 16 bytes; w = scale * q + min
// The 16 bytes hold values 0..15 in their low halves and 16..31 in their high halves. Format: the ggml project.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <omp.h>
#include <sched.h>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define FOREWORD_AVX2 1
#endif

namespace {

enum Kind { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30 };  // numbered as in GGUF files
enum Code { OK = 0, UNKNOWN_KIND = 1, OUT_OF_MEMORY = 2 };
constexpr int BLOCK = 32;
constexpr int MAX_ROWS = 8;  // of x at once: their sums fill the registers

float half_to_float(const uint8_t* p) {
  _Float16 h;
  std::memcpy(&h, p, sizeof h);
  return static_cast<float>(h);
}

template <int KIND>
constexpr int block_bytes() {
  return KIND == F32 ? 128 : KIND == BF16 ? 64 : KIND == Q8_0 ? 34 : KIND == Q4_0 ? 18 : 20;
}

// Round to nearest, ties to even; NaN stays NaN.
uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef FOREWORD_AVX2

__m256 widen_u8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)); }
__m256 widen_s8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)); }

// The 32 weights of a block, in four vectors.
template <int KIND>
inline void unpack(const uint8_t* b, __m256 w[4]) {
  if constexpr (KIND == F32) {
    for (int i = 0; i < 4; i++) w[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(b) + 8 * i);
    return;
  }
  if constexpr (KIND == BF16) {
    for (int i = 0; i < 4; i++) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * i));
      w[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
    }
    return;
  }
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

// NR rows of unpacked weights against MR rows of x: each load serves several products, so the FMA units are the limit.
template <int NR, int MR>
inline void tile(const float* w, const float* x, int64_t k, float* y, int64_t ldy) {
  __m256 acc[NR][MR];
  for (int i = 0; i < NR; i++)
    for (int r = 0; r < MR; r++) acc[i][r] = _mm256_setzero_ps();
  for (int64_t at = 0; at < k; at += 8) {
    __m256 v[NR];
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) v[i] = _mm256_loadu_ps(w + i * k + at);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const __m256 u = _mm256_loadu_ps(x + r * k + at);
#pragma GCC unroll 8
      for (int i = 0; i < NR; i++) acc[i][r] = _mm256_fmadd_ps(v[i], u, acc[i][r]);
    }
  }
  for (int i = 0; i < NR; i++)
    for (int r = 0; r < MR; r++) y[r * ldy + i] = sum(acc[i][r]);
}

#else

float bf16_to_float(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

template <int NR, int MR>
inline void tile(const float* w, const float* x, int64_t k, float* y, int64_t ldy) {
  for (int i = 0; i < NR; i++)
    for (int r = 0; r < MR; r++) {
      float s = 0;
#pragma omp simd reduction(+ : s)
      for (int64_t at = 0; at < k; at++) s += w[i * k + at] * x[r * k + at];
      y[r * ldy + i] = s;
    }
}

template <int KIND>
void unpack_to(const uint8_t* b, float* out) {
  if constexpr (KIND == F32) {
    std::memcpy(out, b, sizeof(float) * BLOCK);
    return;
  }
  if constexpr (KIND == BF16) {
    for (int i = 0; i < BLOCK; i++) {
      uint16_t v;
      std::memcpy(&v, b + 2 * i, sizeof v);
      out[i] = bf16_to_float(v);
    }
    return;
  }
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

constexpr int WIDE = 3;        // weight rows of a tile
constexpr int HIGH = 4;        // x rows of a tile
constexpr int FEW = 8;         // up to this many rows, unpacking in registers is faster than a tile

// Products of the weight rows first..first+count-1, count at most WIDE, with all rows of x: y[r * ldy + i].
// room: WIDE * k floats.
template <int KIND>
void strip(const uint8_t* w, int64_t count, const float* x, int64_t k, float* y, int64_t ldy, int64_t m, float* room) {
  const int64_t row_bytes = k / BLOCK * block_bytes<KIND>();
  if (m <= FEW || count < WIDE) {
    for (int64_t i = 0; i < count; i++) rows_times<KIND>(w + i * row_bytes, x, k, y + i, ldy, m);
    return;
  }
  for (int64_t b = 0; b < WIDE * (k / BLOCK); b++) unpack_to<KIND>(w + b * block_bytes<KIND>(), room + b * BLOCK);
  int64_t r = 0;
  for (; r + HIGH <= m; r += HIGH) tile<WIDE, HIGH>(room, x + r * k, k, y + r * ldy, ldy);
  for (; r < m; r++) tile<WIDE, 1>(room, x + r * k, k, y + r * ldy, ldy);
}

template <int KIND>
void linear(const uint8_t* w, const float* x, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  const int64_t row_bytes = k / BLOCK * block_bytes<KIND>();
  // Memory is asked for out here: an exception must not leave a parallel region.
  std::vector<float> room(threads * WIDE * k);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < (n + WIDE - 1) / WIDE; i++)
    strip<KIND>(w + i * WIDE * row_bytes, std::min<int64_t>(WIDE, n - i * WIDE), x, k, y + i * WIDE, n, m,
                room.data() + omp_get_thread_num() * WIDE * k);
}

template <int KIND>
void dequantize(const uint8_t* w, float* out, int64_t blocks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < blocks; i++) unpack_to<KIND>(w + i * block_bytes<KIND>(), out + i * BLOCK);
}

// ---- the layers ----

struct Matrix {
  int64_t kind;
  const uint8_t* data;
  int64_t n, k;  // rows, columns
};

struct Layer {
  const float* input_norm;
  Matrix qkv;
  const float* qkv_bias;  // may be null
  Matrix o;
  const float* post_norm;
  Matrix gate_up;  // gate's rows, then up's
  Matrix down;
  void* k_pool;  // [blocks, 16, kv_heads, head_dim]
  void* v_pool;
};

struct Model {
  int64_t hidden, inter, q_heads, kv_heads, head_dim, num_layers, kv_is_bf16;
  float eps, scale;
  const Layer* layers;
};

struct Step {
  int64_t num_rows;
  float* x;                   // [rows, hidden], in and out
  const float *cos, *sin;     // [rows, head_dim / 2]
  const int64_t* slots;       // [rows] where each row's KV goes
  const int32_t* positions;   // [rows]
  const int64_t* first_block; // [rows] where the row's block table begins in the three below
  const int64_t* num_blocks;  // [rows]
  const int32_t *block_ids, *block_starts, *block_valids;
};

constexpr int SLOTS = 16;            // of a block
constexpr int CHUNK = 16;            // blocks of keys that one thread takes at once
constexpr int MAX_GROUP = 8;         // query heads of a key-value head
constexpr int MAX_HEAD_DIM = 256;

// Where threads wait for each other: they spin for some microseconds, as long as a share of a layer takes, then offer the
// core to whoever wants it. OpenMP's own barrier either spins on, which is slow as soon as another program takes a core,
// or sleeps at once, which costs more than a small layer itself.
class Barrier {
 public:
  void wait(int num_threads) {
    const int before = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int i = 0; turn_.load(std::memory_order_acquire) == before; i++) {
      if (i >= SPINS) sched_yield();
#ifdef FOREWORD_AVX2
      else _mm_pause();
#endif
    }
  }

 private:
  static constexpr int SPINS = 1000;
  std::atomic<int> arrived_{0}, turn_{0};
};

// One thread of the region.
struct Member {
  int id, num_threads;
  Barrier& barrier;
  int64_t first(int64_t n) const { return n * id / num_threads; }
  int64_t last(int64_t n) const { return n * (id + 1) / num_threads; }
  void wait() const { barrier.wait(num_threads); }
};

// Calls f with the matrix's kind as a compile-time number.
template <class F>
void with_kind(int64_t kind, F f) {
  switch (kind) {
    case F32: return f(std::integral_constant<int, F32>());
    case BF16: return f(std::integral_constant<int, BF16>());
    case Q8_0: return f(std::integral_constant<int, Q8_0>());
    case Q4_0: return f(std::integral_constant<int, Q4_0>());
    case Q4_1: return f(std::integral_constant<int, Q4_1>());
  }
}

inline const uint8_t* row_of(const Matrix& m, int64_t i, int bytes) { return m.data + i * (m.k / BLOCK) * bytes; }

// Buffers of one thread.
struct Room {
  float *weights, *products, *more_products;  // [WIDE, longest k], [rows, WIDE] twice
};

// One thread's share of y[rows, n] (+)= x[rows, k] w^T.
template <bool ADD>
void share_of_linear(const Matrix& w, const float* x, float* y, int64_t rows, const float* bias, const Room& room,
                     const Member& me) {
  with_kind(w.kind, [&](auto kind) {
    constexpr int K = decltype(kind)::value;
    float* products = room.products;
    const int64_t strips = (w.n + WIDE - 1) / WIDE;
    for (int64_t strip_at = me.first(strips); strip_at < me.last(strips); strip_at++) {
      const int64_t first = strip_at * WIDE, count = std::min<int64_t>(WIDE, w.n - first);
      strip<K>(row_of(w, first, block_bytes<K>()), count, x, w.k, products, WIDE, rows, room.weights);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++) {
          float& out = y[r * w.n + first + i];
          out = (ADD ? out : 0.0f) + products[r * WIDE + i] + (bias ? bias[first + i] : 0.0f);
        }
    }
  });
  me.wait();
}

// act[rows, inter] = silu(gate) * up, a strip of both matrices at a time.
void share_of_gate_up(const Matrix& w, const float* x, float* act, int64_t rows, const Room& room, const Member& me) {
  with_kind(w.kind, [&](auto kind) {
    constexpr int K = decltype(kind)::value;
    const int64_t inter = w.n / 2;
    float *gate = room.products, *up = room.more_products;
    const int64_t strips = (inter + WIDE - 1) / WIDE;
    for (int64_t strip_at = me.first(strips); strip_at < me.last(strips); strip_at++) {
      const int64_t first = strip_at * WIDE, count = std::min<int64_t>(WIDE, inter - first);
      strip<K>(row_of(w, first, block_bytes<K>()), count, x, w.k, gate, WIDE, rows, room.weights);
      strip<K>(row_of(w, inter + first, block_bytes<K>()), count, x, w.k, up, WIDE, rows, room.weights);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++) {
          const float g = gate[r * WIDE + i];
          act[r * inter + first + i] = g / (1.0f + std::exp(-g)) * up[r * WIDE + i];
        }
    }
  });
  me.wait();
}

void share_of_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t n, float eps,
                   const Member& me) {
  for (int64_t r = me.first(rows); r < me.last(rows); r++) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += x[r * n + i] * x[r * n + i];
    const float scale = 1.0f / std::sqrt(total / n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[r * n + i] = x[r * n + i] * scale * weight[i];
  }
  me.wait();
}

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

inline v8 load8(const float* p) {
  v8 out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline v8 load8(const uint16_t* p) {
  typedef uint16_t v8h __attribute__((vector_size(16)));
  v8h half;
  std::memcpy(&half, p, sizeof half);
  return reinterpret_cast<v8>(__builtin_convertvector(half, v8i) << 16);
}

inline float sum8(v8 v) {
  float total = 0;
#ifdef FOREWORD_AVX2
  total = sum(reinterpret_cast<__m256>(v));
#else
  for (int i = 0; i < 8; i++) total += v[i];
#endif
  return total;
}

// e^x for x <= 0, to about 2 units in the last place (Cephes' polynomial); NaN stays NaN.
inline v8 exp8(v8 x) {
  const v8 least = v8{} - 87.0f, magic = v8{} + 12582912.0f;
  x = x < least ? least : x;
  const v8 shifted = x * 1.44269504f + magic, n = shifted - magic;
  const v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // shifted's low bits hold n: into the exponent they go.
  return p * reinterpret_cast<v8>((reinterpret_cast<v8i>(shifted) << 23) + 0x3f800000);
}

template <class KV>
inline KV store(float f) {
  if constexpr (sizeof(KV) == 2) return float_to_bf16(f);
  else return f;
}

// Rotary over half-split pairs, in place for queries; keys and values go to the pool.
template <class KV>
void share_of_rotary(const Model& m, const Layer& layer, const Step& s, float* qkv, const Member& me) {
  const int64_t d = m.head_dim, half = d / 2, heads = m.q_heads + 2 * m.kv_heads;
  for (int64_t item = me.first(s.num_rows * heads); item < me.last(s.num_rows * heads); item++) {
    const int64_t r = item / heads, h = item % heads;
    float* v = qkv + (r * heads + h) * d;
    if (h < m.q_heads + m.kv_heads) {
      for (int64_t i = 0; i < half; i++) {
        const float c = s.cos[r * half + i], sn = s.sin[r * half + i], a = v[i], b = v[half + i];
        v[i] = a * c - b * sn;
        v[half + i] = b * c + a * sn;
      }
    }
    if (h < m.q_heads) {
      for (int64_t i = 0; i < d; i++) v[i] *= m.scale;
      continue;
    }
    const bool is_key = h < m.q_heads + m.kv_heads;
    const int64_t kv_head = h - m.q_heads - (is_key ? 0 : m.kv_heads);
    KV* pool = static_cast<KV*>(is_key ? layer.k_pool : layer.v_pool) + (s.slots[r] * m.kv_heads + kv_head) * d;
    for (int64_t i = 0; i < d; i++) pool[i] = store<KV>(v[i]);
  }
  me.wait();
}

// A piece of a row's keys for one key-value head: unnormalised output, sum and maximum of each query head.
struct Piece {
  int64_t row, kv_head, first, last;  // blocks first..last-1 of the row's table
};

// Softmax over the piece's keys (Dao et al. 2022, online over pieces): out [group, head_dim + 2].
// V is head_dim / 8 where it is known at compile time, so that the sums stay in registers; else 0.
template <class KV, int V>
void attend(const Model& m, const Layer& layer, const Step& s, const float* qkv, const Piece& piece, float* out) {
  const int64_t d = V ? 8 * V : m.head_dim, vectors = d / 8;
  const int64_t group = m.q_heads / m.kv_heads, heads = m.q_heads + 2 * m.kv_heads;
  const float* q = qkv + (piece.row * heads + piece.kv_head * group) * d;
  const int64_t base = s.first_block[piece.row], stride = m.kv_heads * d;
  const int32_t position = s.positions[piece.row];
  float scores[MAX_GROUP][CHUNK * SLOTS], greatest[MAX_GROUP];
  const KV* values[CHUNK * SLOTS];
  std::fill(greatest, greatest + group, -INFINITY);
  int n = 0;
  for (int64_t b = piece.first; b < piece.last; b++) {
    const int32_t start = s.block_starts[base + b];
    const int64_t used = std::min<int64_t>(s.block_valids[base + b], position - start + 1);
    const int64_t at = (static_cast<int64_t>(s.block_ids[base + b]) * SLOTS * m.kv_heads + piece.kv_head) * d;
    const KV *k = static_cast<const KV*>(layer.k_pool) + at, *v = static_cast<const KV*>(layer.v_pool) + at;
    for (int64_t j = 0; j < used; j++, n++) {
      values[n] = v + j * stride;
      for (int64_t g = 0; g < group; g++) {
        v8 acc = {}, other = {};
        for (int64_t i = 0; i + 1 < vectors; i += 2) {
          acc += load8(q + g * d + 8 * i) * load8(k + j * stride + 8 * i);
          other += load8(q + g * d + 8 * i + 8) * load8(k + j * stride + 8 * i + 8);
        }
        if (vectors % 2) acc += load8(q + g * d + 8 * vectors - 8) * load8(k + j * stride + 8 * vectors - 8);
        scores[g][n] = sum8(acc + other);
        greatest[g] = std::max(greatest[g], scores[g][n]);
      }
    }
  }
  for (int64_t g = 0; g < group; g++) {
    v8 acc[V ? V : MAX_HEAD_DIM / 8] = {};
    float total = 0;
    for (int i = n; i < (n + 7) / 8 * 8; i++) scores[g][i] = -INFINITY;
    for (int i = 0; i < n; i += 8) {
      const v8 p = exp8(load8(scores[g] + i) - greatest[g]);
      std::memcpy(scores[g] + i, &p, sizeof p);
    }
    for (int i = 0; i < n; i++) {
      const float p = scores[g][i];
      total += p;
#pragma GCC unroll 16
      for (int64_t j = 0; j < vectors; j++) acc[j] += p * load8(values[i] + 8 * j);
    }
    float* o = out + g * (d + 2);
    std::memcpy(o, acc, sizeof(float) * d);
    o[d] = total;
    o[d + 1] = greatest[g];  // still minus infinity if all scores were NaN: the sum is NaN then, and stays so
  }
}

template <class KV>
void attend_any(const Model& m, const Layer& layer, const Step& s, const float* qkv, const Piece& piece, float* out) {
  if (m.head_dim == 64) attend<KV, 8>(m, layer, s, qkv, piece, out);
  else if (m.head_dim == 128) attend<KV, 16>(m, layer, s, qkv, piece, out);
  else attend<KV, 0>(m, layer, s, qkv, piece, out);
}

// Put a row's pieces together: attn [rows, q_heads * head_dim].
void share_of_merge(const Model& m, const std::vector<Piece>& pieces, const std::vector<int64_t>& first_piece,
                    const float* partial, float* attn, int64_t rows, const Member& me) {
  const int64_t d = m.head_dim, group = m.q_heads / m.kv_heads;
  for (int64_t item = me.first(rows * m.q_heads); item < me.last(rows * m.q_heads); item++) {
    const int64_t r = item / m.q_heads, h = item % m.q_heads, kv_head = h / group, g = h % group;
    float greatest = -INFINITY, total = 0, acc[MAX_HEAD_DIM] = {};
    const auto part = [&](int64_t i) { return partial + (i * group + g) * (d + 2); };
    for (int64_t i = first_piece[r]; i < first_piece[r + 1]; i++)
      if (pieces[i].kv_head == kv_head) greatest = std::max(greatest, part(i)[d + 1]);
    for (int64_t i = first_piece[r]; i < first_piece[r + 1]; i++) {
      if (pieces[i].kv_head != kv_head) continue;
      const float* p = part(i);
      const float weight = std::exp(p[d + 1] - greatest);
      total += weight * p[d];
      for (int64_t j = 0; j < d; j++) acc[j] += weight * p[j];
    }
    for (int64_t j = 0; j < d; j++) attn[item * d + j] = acc[j] / total;
  }
  me.wait();
}

template <class KV>
void run_layers(const Model& m, const Step& s, int threads) {
  const int64_t rows = s.num_rows, d = m.head_dim, group = m.q_heads / m.kv_heads;
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece(rows + 1);
  for (int64_t r = 0; r < rows; r++) {
    first_piece[r] = pieces.size();
    int64_t seen = 0;  // blocks that hold a key this row may see
    while (seen < s.num_blocks[r] && s.block_starts[s.first_block[r] + seen] <= s.positions[r]) seen++;
    for (int64_t first = 0; first < seen; first += CHUNK)
      for (int64_t h = 0; h < m.kv_heads; h++) pieces.push_back({r, h, first, std::min(first + CHUNK, seen)});
  }
  first_piece[rows] = pieces.size();
  const int64_t num_pieces = pieces.size();
  std::vector<float> normed(rows * m.hidden), qkv(rows * (m.q_heads + 2 * m.kv_heads) * d);
  std::vector<float> partial(num_pieces * group * (d + 2)), attn(rows * m.q_heads * d), act(rows * m.inter);
  const int64_t longest = std::max({m.hidden, m.inter, m.q_heads * d});
  const int64_t room_size = WIDE * longest + 2 * rows * WIDE;
  std::vector<float> rooms(threads * room_size);
  std::vector<std::atomic<int64_t>> next_piece(m.num_layers);
  Barrier barrier;
  // No exception may leave a parallel region, so nothing is allocated in it.
#pragma omp parallel num_threads(threads)
  {
    const Member me = {omp_get_thread_num(), omp_get_num_threads(), barrier};
    float* own = rooms.data() + me.id * room_size;
    const Room room = {own, own + WIDE * longest, own + WIDE * longest + rows * WIDE};
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      share_of_norm(s.x, layer.input_norm, normed.data(), rows, m.hidden, m.eps, me);
      share_of_linear<false>(layer.qkv, normed.data(), qkv.data(), rows, layer.qkv_bias, room, me);
      share_of_rotary<KV>(m, layer, s, qkv.data(), me);
      for (int64_t i; (i = next_piece[l].fetch_add(1, std::memory_order_relaxed)) < num_pieces;)
        attend_any<KV>(m, layer, s, qkv.data(), pieces[i], partial.data() + i * group * (d + 2));
      me.wait();
      share_of_merge(m, pieces, first_piece, partial.data(), attn.data(), rows, me);
      share_of_linear<true>(layer.o, attn.data(), s.x, rows, nullptr, room, me);
      share_of_norm(s.x, layer.post_norm, normed.data(), rows, m.hidden, m.eps, me);
      share_of_gate_up(layer.gate_up, normed.data(), act.data(), rows, room, me);
      share_of_linear<true>(layer.down, act.data(), s.x, rows, nullptr, room, me);
    }
  }
}

}  // namespace

extern "C" {

// All return a Code.

// All layers for a few rows: x in and out, KV of the rows written. Heads of at most 256, groups of at most 8.
int foreword_layers(const Model* model, const Step* step, int threads) {
  try {
    if (model->kv_is_bf16) run_layers<uint16_t>(*model, *step, threads);
    else run_layers<float>(*model, *step, threads);
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return OK;
}

// y [m, n] = x [m, k] times the transpose of w [n, k in blocks]; float32, rows without gaps; k a multiple of 32.
int foreword_linear(int kind, const uint8_t* w, const float* x, float* y, int64_t m, int64_t n, int64_t k, int threads) {
  try {
    switch (kind) {
      case Q8_0: linear<Q8_0>(w, x, y, m, n, k, threads); return OK;
      case Q4_0: linear<Q4_0>(w, x, y, m, n, k, threads); return OK;
      case Q4_1: linear<Q4_1>(w, x, y, m, n, k, threads); return OK;
    }
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return UNKNOWN_KIND;
}

// out [blocks * 32] = the weights of a run of blocks.
int foreword_dequantize(int kind, const uint8_t* w, float* out, int64_t blocks, int threads) {
  switch (kind) {
    case Q8_0: dequantize<Q8_0>(w, out, blocks, threads); return OK;
    case Q4_0: dequantize<Q4_0>(w, out, blocks, threads); return OK;
    case Q4_1: dequantize<Q4_1>(w, out, blocks, threads); return OK;
  }
  return UNKNOWN_KIND;
}
}
