// The C++ kernels for the CPU, built by kernels/cpu.py and called through ctypes. All functions return a Code, but the two
// that make and free a workspace.

#include "cpu_layers.h"

namespace {

// y [m, n] = x [m, k] w^T.
void linear(const Matrix& w, const float* x, float* y, int64_t m, int threads) {
  const int64_t blocks = w.k / BLOCK, panels = num_panels(w.n);
  // Memory is asked for out here: an exception must not leave a parallel region.
  std::vector<int8_t> q(is_dense(w.kind) ? 0 : 2 * m * w.k);
  std::vector<float> scales(4 * m * blocks), products(threads * m * PANEL);
  std::vector<uint8_t> quants(threads * blocks * UNPACKED_QUANTS);
  std::vector<float> unpacked(threads * blocks * UNPACKED_SCALES);
  const Rows rows = {x,
                     {q.data(), scales.data(), scales.data() + m * blocks},
                     {q.data() + m * w.k, scales.data() + 2 * m * blocks, scales.data() + 3 * m * blocks}};
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num();
    if (!is_dense(w.kind)) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < m; r++) quantize_row(rows, r, w);
    }
    float* own = products.data() + me * m * PANEL;
    const Unpacked room = {quants.data() + me * blocks * UNPACKED_QUANTS, unpacked.data() + me * blocks * UNPACKED_SCALES};
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
      const int64_t count = std::min<int64_t>(PANEL, w.n - p * PANEL);
      panel_of(w, p, rows, m, room, own);
      for (int64_t r = 0; r < m; r++) std::memcpy(y + r * w.n + p * PANEL, own + r * PANEL, sizeof(float) * count);
    }
  }
}

// Calls f with the block format as a compile-time number.
template <class F>
int with_kind(int kind, F f) {
  switch (kind) {
    case Q8_0: f(std::integral_constant<int, Q8_0>()); return OK;
    case Q4_0: f(std::integral_constant<int, Q4_0>()); return OK;
    case Q4_1: f(std::integral_constant<int, Q4_1>()); return OK;
  }
  return UNKNOWN_KIND;
}

template <class F>
int guarded(F f) {
  try {
    f();
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return OK;
}

}  // namespace

extern "C" {

void* foreword_workspace() { return new (std::nothrow) Workspace; }
void foreword_free_workspace(void* space) { delete static_cast<Workspace*>(space); }

// All layers and the final norm: hidden states of the rows picked; KV of the rows written. Heads of at most 256, groups of
// at most 8.
int foreword_layers(const Model* model, const Step* step, void* space, int threads) {
  Workspace& room = *static_cast<Workspace*>(space);
  return guarded([&] {
    switch (model->shape.kv_kind) {
      case BF16: return run_layers<uint16_t>(*model, *step, room, threads);
      case I8: return run_layers<int8_t>(*model, *step, room, threads);
      default: return run_layers<float>(*model, *step, room, threads);
    }
  });
}

// y [m, n] = x [m, k] times the transpose of w; float32, rows without gaps; k a multiple of 32. w as in cpu_linear.h.
int foreword_linear(int kind, const uint8_t* w, const float* x, float* y, int64_t m, int64_t n, int64_t k, int is_fine,
                    int threads) {
  if (!is_dense(kind) && kind != Q8_0 && kind != Q4_0 && kind != Q4_1) return UNKNOWN_KIND;
  return guarded([&] { linear({kind, w, n, k, is_fine}, x, y, m, threads); });
}

// out: a matrix [n, k] in a file's blocks, in panels; room for n rounded up to 16.
int foreword_pack(int kind, const uint8_t* w, uint8_t* out, int64_t n, int64_t k, int threads) {
  return with_kind(kind, [&](auto which) { pack<decltype(which)::value>(w, out, n, k, threads); });
}

// out [count, k] = some rows of a matrix in panels.
int foreword_rows(int kind, const uint8_t* w, const int64_t* ids, float* out, int64_t count, int64_t k, int threads) {
  return with_kind(kind, [&](auto which) { look_up<decltype(which)::value>(w, ids, out, count, k, threads); });
}
}
