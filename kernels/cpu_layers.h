// All layers of a decoder for the new tokens of a step, in one parallel region: in a decode step reading the weights and
// the KV is then the whole cost, and in a prefill step nothing is written between two operations that need not be.
#pragma once

#include "cpu_attention.h"
#include "cpu_linear.h"

namespace {

struct Layer {
  const float* input_norm;
  Matrix qkv;
  const float* qkv_bias;  // may be null
  Matrix o;
  const float* post_norm;
  Matrix gate_up;  // gate's rows, then up's
  Matrix down;
  Pool pool;
};

struct Model {
  int64_t hidden, inter, num_layers;
  Shape shape;
  float eps, scale;
  const float* final_norm;
  const Layer* layers;
};

struct Step {
  int64_t num_rows, num_seqs, num_picks;
  float* x;                  // [rows, hidden], used up
  const float *cos, *sin;    // [rows, head_dim / 2]
  const int64_t* slots;      // [rows] where each row's KV goes
  const int64_t* picks;      // rows whose last hidden states are wanted
  float* out;                // [picks, hidden], behind the final norm
  Sequences seqs;
};

// Buffers that live as long as the model: they grow to what the largest step needs.
struct Workspace {
  std::vector<float> qkv, attn, act, normed, partial, scales, rooms, scale_rooms;
  std::vector<int8_t> q;
  std::vector<uint8_t> quant_rooms;
  std::vector<Item> items;
  std::vector<int64_t> cut;  // items that are the first range of several
};

template <class T>
T* room_for(std::vector<T>& v, int64_t size) {
  if (static_cast<int64_t>(v.size()) < size) v.resize(size);
  return v.data();
}

constexpr int64_t ROWS_AT_ONCE = 128;  // of x beside a panel: they stay in the second-level cache

// Buffers of one thread.
struct Room {
  float *products, *more;  // [ROWS_AT_ONCE, PANEL]
  Unpacked unpacked;
  AttentionRoom attention;
};

// One thread's share of y[rows, n] (+)= x[rows, k] w^T.
template <bool ADD>
void share_of_linear(const Matrix& w, const Rows& x, float* y, int64_t rows, const float* bias, const Room& room,
                     const Member& me) {
  const int64_t panels = num_panels(w.n);
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS_AT_ONCE) {
    const int64_t m = std::min(ROWS_AT_ONCE, rows - r0);
    for (int64_t p = me.first(panels); p < me.last(panels); p++) {
      const int64_t first = p * PANEL, count = std::min<int64_t>(PANEL, w.n - first);
      panel_of(w, p, x.from(r0, w.k), m, room.unpacked, room.products);
      for (int64_t r = 0; r < m; r++) {
        float* out = y + (r0 + r) * w.n + first;
        for (int64_t i = 0; i < count; i++)
          out[i] = (ADD ? out[i] : 0.0f) + (room.products[r * PANEL + i] + (bias ? bias[first + i] : 0.0f));
      }
    }
  }
}

inline v8 silu8(v8 g) {
  const v8 e = exp8(reinterpret_cast<v8>(reinterpret_cast<v8i>(g) | static_cast<int32_t>(0x80000000)));  // e^-|g|
  return g * (g < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

// act[rows, inter] = silu(gate) * up. inter is a multiple of a panel.
void share_of_gate_up(const Matrix& w, const Rows& x, float* act, int64_t rows, const Room& room, const Member& me) {
  const int64_t inter = w.n / 2, panels = inter / PANEL;
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS_AT_ONCE) {
    const int64_t m = std::min(ROWS_AT_ONCE, rows - r0);
    for (int64_t p = me.first(panels); p < me.last(panels); p++) {
      panel_of(w, p, x.from(r0, w.k), m, room.unpacked, room.products);
      panel_of(w, panels + p, x.from(r0, w.k), m, room.unpacked, room.more);
      for (int64_t r = 0; r < m; r++)
        for (int64_t i = 0; i < PANEL; i += 8)
          store8(act + (r0 + r) * inter + p * PANEL + i,
                 silu8(load8(room.products + r * PANEL + i)) * load8(room.more + r * PANEL + i));
    }
  }
}

void norm_row(const float* x, const float* weight, float* out, int64_t n, float eps) {
  v8 squares = {};
  for (int64_t i = 0; i < n; i += 8) squares = fma8(load8(x + i), load8(x + i), squares);
  const float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
  for (int64_t i = 0; i < n; i += 8) store8(out + i, load8(x + i) * scale * load8(weight + i));
}

// Rotary over half-split pairs, in place for queries; keys and values go to the pool.
template <class KV>
void share_of_rotary(const Model& m, const Pool& pool, const Step& s, float* qkv, const Member& me) {
  const Shape& shape = m.shape;
  const int64_t d = shape.head_dim, half = d / 2, heads = shape.heads();
  for (int64_t item = me.first(s.num_rows * heads); item < me.last(s.num_rows * heads); item++) {
    const int64_t r = item / heads, h = item % heads;
    float* v = qkv + (r * heads + h) * d;
    if (h < shape.q_heads + shape.kv_heads) turn(v, s.cos + r * half, s.sin + r * half, half);
    if (h < shape.q_heads) {
      for (int64_t i = 0; i < d; i++) v[i] *= m.scale;
      continue;
    }
    const bool is_key = h < shape.q_heads + shape.kv_heads;
    const int64_t at = s.slots[r] * shape.kv_heads + h - shape.q_heads - (is_key ? 0 : shape.kv_heads);
    KV* to = static_cast<KV*>(is_key ? pool.k : pool.v) + at * d;
    if constexpr (std::is_same_v<KV, float>) {
      std::memcpy(to, v, sizeof(float) * d);
    } else if constexpr (std::is_same_v<KV, uint16_t>) {
      for (int64_t i = 0; i < d; i++) to[i] = float_to_bf16(v[i]);
    } else {
      (is_key ? pool.k_scales : pool.v_scales)[at] = to_int8(v, d, to);
    }
  }
}

template <class KV>
void run_layers(const Model& m, const Step& s, Workspace& space, int threads) {
  const Shape& shape = m.shape;
  const int64_t rows = s.num_rows, d = shape.head_dim, attn_width = shape.q_heads * d;
  const int64_t widest = std::max({m.hidden, m.inter, attn_width});
  float* partial = room_for(space.partial, make_items(shape, s.seqs, s.num_seqs, space.items) * (d + 2));
  const std::vector<Item>& items = space.items;
  space.cut.clear();
  for (size_t i = 0; i < items.size(); i++)
    if (items[i].partial >= 0 && items[i].first_range == 0) space.cut.push_back(i);
  float* qkv = room_for(space.qkv, rows * shape.heads() * d);
  float* attn = room_for(space.attn, rows * attn_width);
  float* act = room_for(space.act, rows * m.inter);
  float* normed = room_for(space.normed, rows * m.hidden);
  int8_t* q = room_for(space.q, 2 * rows * widest);
  float* scales = room_for(space.scales, 4 * rows * (widest / BLOCK));
  const auto bits = [&](int64_t i) {
    return Eight{q + i * rows * widest, scales + 2 * i * rows * (widest / BLOCK),
                 scales + (2 * i + 1) * rows * (widest / BLOCK)};
  };
  const auto rows_of = [&](const float* x) { return Rows{x, bits(0), bits(1)}; };
  const int64_t room_size = 2 * ROWS_AT_ONCE * PANEL + AttentionRoom::size(d);
  float* rooms = room_for(space.rooms, threads * room_size);
  uint8_t* quant_rooms = room_for(space.quant_rooms, threads * (widest / BLOCK) * UNPACKED_QUANTS);
  float* scale_rooms = room_for(space.scale_rooms, threads * (widest / BLOCK) * UNPACKED_SCALES);
  std::vector<std::atomic<int64_t>> next_item(m.num_layers);
  Barrier barrier;
  // No exception may leave a parallel region, so nothing is allocated in it.
#pragma omp parallel num_threads(threads)
  {
    const Member me = {omp_get_thread_num(), omp_get_num_threads(), barrier};
    float* own = rooms + me.id * room_size;
    Room room = {own, own + ROWS_AT_ONCE * PANEL,
                 {quant_rooms + me.id * (widest / BLOCK) * UNPACKED_QUANTS,
                  scale_rooms + me.id * (widest / BLOCK) * UNPACKED_SCALES},
                 AttentionRoom(own + 2 * ROWS_AT_ONCE * PANEL, d)};
    const auto norm = [&](const float* weight, const Matrix& next, int64_t num) {
      for (int64_t r = me.first(num); r < me.last(num); r++) {
        norm_row(s.x + r * m.hidden, weight, normed + r * m.hidden, m.hidden, m.eps);
        if (!is_dense(next.kind)) quantize_row(rows_of(normed), r, next);
      }
      me.wait();
    };
    const auto quantize = [&](const float* x, const Matrix& next, int64_t num) {
      if (is_dense(next.kind)) return;
      for (int64_t r = me.first(num); r < me.last(num); r++) quantize_row(rows_of(x), r, next);
      me.wait();
    };
    int64_t num = rows;  // behind the last attention, only the rows that are wanted
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      norm(layer.input_norm, layer.qkv, rows);
      share_of_linear<false>(layer.qkv, rows_of(normed), qkv, rows, layer.qkv_bias, room, me);
      me.wait();
      share_of_rotary<KV>(m, layer.pool, s, qkv, me);
      me.wait();
      for (int64_t i; (i = next_item[l].fetch_add(1, std::memory_order_relaxed)) < static_cast<int64_t>(items.size());)
        attend<KV>(shape, layer.pool, s.seqs, items[i], qkv, partial, attn, room.attention);
      me.wait();
      if (!space.cut.empty()) {
        for (int64_t i = me.first(space.cut.size()); i < me.last(space.cut.size()); i++)
          merge_ranges(shape, s.seqs, &items[space.cut[i]], items.data() + items.size(), partial, attn);
        me.wait();
      }
      if (l == m.num_layers - 1) {
        num = s.num_picks;
        if (me.id == 0)
          for (int64_t i = 0; i < num; i++) {  // attn of the picks over q's part of qkv, which is no longer needed
            std::memcpy(qkv + i * attn_width, attn + s.picks[i] * attn_width, sizeof(float) * attn_width);
            std::memcpy(s.out + i * m.hidden, s.x + s.picks[i] * m.hidden, sizeof(float) * m.hidden);
          }
        me.wait();
        if (me.id == 0) {
          std::memcpy(s.x, s.out, sizeof(float) * num * m.hidden);
          std::memcpy(attn, qkv, sizeof(float) * num * attn_width);
        }
        me.wait();
      }
      quantize(attn, layer.o, num);
      share_of_linear<true>(layer.o, rows_of(attn), s.x, num, nullptr, room, me);
      me.wait();
      norm(layer.post_norm, layer.gate_up, num);
      share_of_gate_up(layer.gate_up, rows_of(normed), act, num, room, me);
      me.wait();
      quantize(act, layer.down, num);
      share_of_linear<true>(layer.down, rows_of(act), s.x, num, nullptr, room, me);
      me.wait();
    }
    for (int64_t r = me.first(num); r < me.last(num); r++)
      norm_row(s.x + r * m.hidden, m.final_norm, s.out + r * m.hidden, m.hidden, m.eps);
  }
}

}  // namespace
