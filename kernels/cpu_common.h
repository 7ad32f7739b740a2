// What the C++ kernels share: formats, eight floats at a time, threads that wait for each other.
#pragma once

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
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define FOREWORD_AVX2 1
#endif

namespace {

enum Kind { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30, I8 = 24 };  // numbered as in GGUF files
enum Code { OK = 0, UNKNOWN_KIND = 1, OUT_OF_MEMORY = 2 };

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

inline v8 load8(const float* p) {
  v8 out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

inline v8 load8(const uint16_t* p) {  // bfloat16
  typedef uint16_t v8h __attribute__((vector_size(16)));
  v8h half;
  std::memcpy(&half, p, sizeof half);
  return reinterpret_cast<v8>(__builtin_convertvector(half, v8i) << 16);
}

inline v8 load8(const int8_t* p) {
  typedef int8_t v8b __attribute__((vector_size(8)));
  v8b bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, v8i), v8);
}

inline v8 splat(float f) { return v8{f, f, f, f, f, f, f, f}; }

// a * b + c, in one rounding where the processor can. Said, and not left to the compiler: GCC makes one instruction of it
// in one loop and two in another, and the results differ.
inline v8 fma8(v8 a, v8 b, v8 c) {
#ifdef FOREWORD_AVX2
  const auto m = [](v8 v) { return reinterpret_cast<__m256>(v); };
  return reinterpret_cast<v8>(_mm256_fmadd_ps(m(a), m(b), m(c)));
#else
  return a * b + c;
#endif
}

// Keeps a value in a register: else GCC loads it again at each use, and the loads are what limits then.
inline v8 hold(v8 v) {
#ifdef FOREWORD_AVX2
  asm("" : "+x"(v));
#endif
  return v;
}

inline void store8(float* p, v8 v) { std::memcpy(p, &v, sizeof v); }

// The sums of four vectors. One tree of additions for everyone who needs the sum of a vector, so that a result does not
// depend on how many were computed beside it.
inline v4 sums(v8 a, v8 b, v8 c, v8 d) {
#ifdef FOREWORD_AVX2
  const auto m = [](v8 v) { return reinterpret_cast<__m256>(v); };
  const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(m(a), m(b)), _mm256_hadd_ps(m(c), m(d)));
  return reinterpret_cast<v4>(_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
#else
  const auto s = [](v8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); };
  return v4{s(a), s(b), s(c), s(d)};
#endif
}

inline float sum(v8 v) { return sums(v, v, v, v)[0]; }

// e^x for x <= 0, to about 2 units in the last place (Cephes' polynomial); NaN stays NaN.
inline v8 exp8(v8 x) {
  const v8 least = splat(-87.0f), magic = splat(12582912.0f);
  x = x < least ? least : x;
  const v8 shifted = fma8(x, splat(1.44269504f), magic), n = shifted - magic;
  const v8 r = fma8(n, splat(2.12194440e-4f), fma8(n, splat(-0.693359375f), x));
  v8 p = fma8(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
  p = fma8(p, r, splat(8.3334519073e-3f));
  p = fma8(p, r, splat(4.1665795894e-2f));
  p = fma8(p, r, splat(1.6666665459e-1f));
  p = fma8(p, r, splat(5.0000001201e-1f));
  p = fma8(p, r * r, r + 1.0f);
  // shifted's low bits hold n: into the exponent they go.
  return p * reinterpret_cast<v8>((reinterpret_cast<v8i>(shifted) << 23) + 0x3f800000);
}

inline float half_to_float(const uint8_t* p) {
  _Float16 h;
  std::memcpy(&h, p, sizeof h);
  return static_cast<float>(h);
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The greatest magnitude of n numbers, n a multiple of 8. By their bits: a NaN is greater than all and is found.
inline float greatest_magnitude(const float* x, int64_t n) {
  v8i most = {};
  for (int64_t i = 0; i < n; i += 8) {
    const v8i bits = reinterpret_cast<v8i>(load8(x + i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t one = 0;
  for (int i = 0; i < 8; i++) one = std::max(one, most[i]);
  float out;
  std::memcpy(&out, &one, sizeof out);
  return out;
}

// Eight bits for n numbers, -127..127: x is about scale * q. Returns the scale; a NaN or an infinity makes it one.
inline float to_int8(const float* x, int64_t n, int8_t* q) {
  const float most = greatest_magnitude(x, n), inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  const v8 magic = splat(12582912.0f);  // adding it rounds to whole numbers, ties to even
  for (int64_t i = 0; i < n; i += 8) {
    const v8i whole = reinterpret_cast<v8i>(fma8(load8(x + i), splat(inverse), magic)) - 0x4b400000;
    for (int j = 0; j < 8; j++) q[i + j] = static_cast<int8_t>(whole[j]);
  }
  return most / 127.0f;
}

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

// One thread of a parallel region.
struct Member {
  int id, num_threads;
  Barrier& barrier;
  int64_t first(int64_t n) const { return n * id / num_threads; }
  int64_t last(int64_t n) const { return n * (id + 1) / num_threads; }
  void wait() const { barrier.wait(num_threads); }
};

}  // namespace
