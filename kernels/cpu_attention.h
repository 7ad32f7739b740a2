// Attention over a paged pool, for one query or hundreds.
//
// Keys are taken in ranges of eight blocks of the block table, from its beginning. A range gives each query an
// unnormalised output, a sum and a maximum, and ranges are merged in order (Milakov and Gimelshein 2018; Dao et al. 2022).
// Many queries go through their ranges one after the other; of a few queries, ranges are computed side by side and merged
// after. Both do the same arithmetic in the same order for each query, so the company it is in changes nothing.
#pragma once

#include "cpu_common.h"

namespace {

constexpr int SLOTS = 16;             // of a block
constexpr int RANGE = 8;              // blocks
constexpr int KEYS = RANGE * SLOTS;   // of a range, at most
constexpr int QUERIES = 16;           // of a tile
constexpr int MAX_GROUP = 8;          // query heads of a key-value head
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_ROWS = QUERIES * MAX_GROUP;

struct Shape {
  int64_t q_heads, kv_heads, head_dim, kv_kind;
  int64_t group() const { return q_heads / kv_heads; }
  int64_t heads() const { return q_heads + 2 * kv_heads; }
};

// One layer's pool.
struct Pool {
  void *k, *v;              // [blocks, 16, kv_heads, head_dim] of float32, bfloat16 or int8
  float *k_scales, *v_scales;  // [blocks, 16, kv_heads], for int8
};

// The sequences of a step.
struct Sequences {
  const int64_t* first_row;   // of a sequence's new tokens among the step's rows
  const int64_t* num_new;
  const int64_t* start;       // position of the first new token
  const int64_t* first_block; // where its block table begins in the columns below
  const int64_t* num_blocks;
  const int32_t *ids, *starts, *valids;
  const int32_t* turns;       // row of the tables by which the block's keys are to be turned, or -1
  const float *turn_cos, *turn_sin;  // [turns, head_dim / 2]
};

// Some queries of a sequence with some ranges, for one key-value head.
struct Item {
  int64_t seq, kv_head, first, count;  // queries, among the sequence's new tokens
  int64_t first_range, last_range;
  int64_t partial;  // where the result of its one range goes, or -1: the item does all ranges
};

// Buffers of one thread.
struct AttentionRoom {
  float *keys, *values;     // [KEYS, head_dim], where they cannot be read in place
  float *scores;            // [MAX_ROWS, KEYS]
  float *out, *acc;         // [MAX_ROWS, head_dim + 2]: output, sum, maximum
  static int64_t size(int64_t d) { return 2 * KEYS * d + MAX_ROWS * KEYS + 2 * MAX_ROWS * (d + 2); }
  AttentionRoom(float* at, int64_t d) {
    keys = at;
    values = keys + KEYS * d;
    scores = values + KEYS * d;
    out = scores + MAX_ROWS * KEYS;
    acc = out + MAX_ROWS * (d + 2);
  }
};

// What one range holds for a tile.
struct Range {
  const float *keys[KEYS], *values[KEYS];
  int n = 0;
  int limits[QUERIES];  // how many of the keys each query may see
};

template <class KV>
inline void read_head(const KV* from, float scale, float* to, int64_t d) {
  for (int64_t i = 0; i < d; i += 8) store8(to + i, sizeof(KV) == 1 ? load8(from + i) * scale : load8(from + i));
}

// Turn a key by a delta: rotary over half-split pairs.
inline void turn(float* key, const float* c, const float* s, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = key[i], b = key[half + i];
    key[i] = a * c[i] - b * s[i];
    key[half + i] = b * c[i] + a * s[i];
  }
}

template <class KV>
void gather(const Shape& shape, const Pool& pool, const Sequences& s, const Item& item, int64_t range, AttentionRoom& room,
            Range& out) {
  const int64_t d = shape.head_dim, base = s.first_block[item.seq];
  const int64_t last_block = std::min(s.num_blocks[item.seq], (range + 1) * RANGE);
  const int64_t first_position = s.start[item.seq] + item.first, last_position = first_position + item.count - 1;
  out.n = 0;
  std::fill(out.limits, out.limits + item.count, 0);
  for (int64_t b = range * RANGE; b < last_block; b++) {
    const int64_t start = s.starts[base + b];
    const int64_t used = std::min<int64_t>(s.valids[base + b], last_position - start + 1);
    const int32_t turned = s.turns[base + b];
    for (int64_t j = 0; j < used; j++, out.n++) {
      const int64_t at = (static_cast<int64_t>(s.ids[base + b]) * SLOTS + j) * shape.kv_heads + item.kv_head;
      const KV *k = static_cast<const KV*>(pool.k) + at * d, *v = static_cast<const KV*>(pool.v) + at * d;
      const bool in_place = std::is_same_v<KV, float>;
      if (in_place) out.values[out.n] = reinterpret_cast<const float*>(v);
      else read_head(v, pool.v_scales ? pool.v_scales[at] : 1.0f, room.values + out.n * d, d);
      if (in_place && turned < 0) {
        out.keys[out.n] = reinterpret_cast<const float*>(k);
        continue;
      }
      read_head(k, pool.k_scales ? pool.k_scales[at] : 1.0f, room.keys + out.n * d, d);
      if (turned >= 0) turn(room.keys + out.n * d, s.turn_cos + turned * (d / 2), s.turn_sin + turned * (d / 2), d / 2);
      out.keys[out.n] = room.keys + out.n * d;
    }
    for (int64_t i = 0; i < item.count; i++)
      out.limits[i] += std::max<int64_t>(0, std::min<int64_t>(used, first_position + i - start + 1));
  }
  if (!std::is_same_v<KV, float>)
    for (int i = 0; i < out.n; i++) out.values[i] = room.values + i * d;
}

// Scores of R queries with four keys. V is head_dim / 8 where it is known at compile time, else 0.
template <int V, int R>
inline void score_tile(const float* const* q, const float* const* keys, int64_t d, float* scores) {
  v8 acc[R][4] = {};
  const int64_t vectors = V ? V : d / 8;
  for (int64_t i = 0; i < vectors; i++) {
    v8 u[R];  // 12 sums, these three and a key: 16 registers
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) u[r] = hold(load8(q[r] + 8 * i));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const v8 k = hold(load8(keys[j] + 8 * i));
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) acc[r][j] = fma8(u[r], k, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++) {
    const v4 four = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    std::memcpy(scores + r * KEYS, &four, sizeof four);
  }
}

// Sums of n values weighted by R queries' probabilities, N vectors of them.
template <int N, int R>
inline void value_tile(const float* p, const float* const* values, int n, int64_t at, float* out, int64_t ldo) {
  v8 acc[R][N] = {};
  for (int j = 0; j < n; j++) {
    v8 u[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) u[r] = hold(splat(p[r * KEYS + j]));
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const v8 v = hold(load8(values[j] + at + 8 * i));
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) acc[r][i] = fma8(u[r], v, acc[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < N; i++) store8(out + r * ldo + at + 8 * i, acc[r][i]);
}

// out [rows, d + 2] from probabilities. N vectors of all values at a time: they fit the first-level cache.
template <int N>
inline void value_columns(const float* p, const float* const* values, int n, int64_t rows, int64_t at, float* out,
                          int64_t ldo) {
  int64_t r = 0;
  for (; r + 3 <= rows; r += 3) value_tile<N, 3>(p + r * KEYS, values, n, at, out + r * ldo, ldo);
  for (; r < rows; r++) value_tile<N, 1>(p + r * KEYS, values, n, at, out + r * ldo, ldo);
}

// Scores to probabilities in place; the sum and the maximum go behind the output.
inline void soften(float* scores, int limit, int n, float* total_and_greatest) {
  const int padded = (limit + 7) / 8 * 8;
  for (int i = limit; i < padded; i++) scores[i] = -INFINITY;
  v8 most = splat(-INFINITY), total = {};
  for (int i = 0; i < padded; i += 8) {
    const v8 s = load8(scores + i);
    most = s > most ? s : most;
  }
  float greatest = most[0];
  for (int i = 1; i < 8; i++) greatest = std::max(greatest, most[i]);
  for (int i = 0; i < padded; i += 8) store8(scores + i, exp8(load8(scores + i) - greatest));
  for (int i = limit; i < std::max(n, padded); i++) scores[i] = 0;
  for (int i = 0; i < padded; i += 8) total += load8(scores + i);
  total_and_greatest[0] = sum(total);
  total_and_greatest[1] = greatest;  // minus infinity if all scores were NaN: the sum is NaN then, and stays so
}

constexpr int AHEAD = 24;  // keys

// out [rows, d + 2] of a tile with one range; a query that sees none of it gets a sum of 0.
template <int V>
void attend_range(const Range& range, const float* const* q, int64_t count, int64_t group, int64_t d, float* scores,
                  float* out) {
  const int64_t rows = count * group;
  const bool is_few = rows <= MAX_GROUP;  // then the memory is the limit, and is asked early for what comes
  for (int at = 0; at < range.n; at += 4) {
    const float* keys[4];
    for (int j = at; is_few && j < std::min(at + 4, range.n); j++)
      for (int64_t i = 0; i < d; i += 16) {
        __builtin_prefetch(range.keys[std::min(j + AHEAD, range.n - 1)] + i);
        __builtin_prefetch(range.values[j] + i);
      }
    for (int j = 0; j < 4; j++) keys[j] = range.keys[std::min(at + j, range.n - 1)];
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) score_tile<V, 3>(q + r, keys, d, scores + r * KEYS + at);
    for (; r < rows; r++) score_tile<V, 1>(q + r, keys, d, scores + r * KEYS + at);
  }
  for (int64_t r = 0; r < rows; r++)
    soften(scores + r * KEYS, range.limits[r / group], range.n, out + r * (d + 2) + d);
  int64_t at = 0;
  for (; at + 32 <= d; at += 32) value_columns<4>(scores, range.values, range.n, rows, at, out, d + 2);
  for (; at < d; at += 8) value_columns<1>(scores, range.values, range.n, rows, at, out, d + 2);
}

// Add a range's result to what was before it; both [d + 2]. Not inlined: one sequence of instructions for everyone.
__attribute__((noinline)) void merge(float* acc, const float* next, int64_t d) {
  const float sum_before = acc[d], sum_next = next[d];
  if (sum_next == 0) return;
  if (sum_before == 0) {
    std::memcpy(acc, next, sizeof(float) * (d + 2));
    return;
  }
  const float greatest = std::max(acc[d + 1], next[d + 1]);
  const float a = std::exp(acc[d + 1] - greatest), b = std::exp(next[d + 1] - greatest);
  for (int64_t i = 0; i < d; i += 8) store8(acc + i, fma8(load8(acc + i), splat(a), load8(next + i) * b));
  acc[d] = sum_before * a + sum_next * b;
  acc[d + 1] = greatest;
}

// A query head's output, from what its ranges gave.
__attribute__((noinline)) void finish(const float* acc, float* out, int64_t d) {
  const float inverse = 1.0f / acc[d];
  for (int64_t i = 0; i < d; i += 8) store8(out + i, load8(acc + i) * inverse);
}

template <class KV>
void attend(const Shape& shape, const Pool& pool, const Sequences& s, const Item& item, const float* qkv, float* partial,
            float* attn, AttentionRoom& room) {
  const int64_t d = shape.head_dim, group = shape.group(), rows = item.count * group;
  const float* q[MAX_ROWS];
  const int64_t first_row = s.first_row[item.seq] + item.first;
  for (int64_t r = 0; r < rows; r++)
    q[r] = qkv + ((first_row + r / group) * shape.heads() + item.kv_head * group + r % group) * d;
  Range range;
  for (int64_t at = item.first_range; at < item.last_range; at++) {
    gather<KV>(shape, pool, s, item, at, room, range);
    float* out = item.partial >= 0 ? partial + item.partial * (d + 2) : at == item.first_range ? room.acc : room.out;
    if (d == 64) attend_range<8>(range, q, item.count, group, d, room.scores, out);
    else if (d == 128) attend_range<16>(range, q, item.count, group, d, room.scores, out);
    else attend_range<0>(range, q, item.count, group, d, room.scores, out);
    if (item.partial < 0 && at > item.first_range)
      for (int64_t r = 0; r < rows; r++) merge(room.acc + r * (d + 2), room.out + r * (d + 2), d);
  }
  if (item.partial >= 0) return;
  for (int64_t r = 0; r < rows; r++)
    finish(room.acc + r * (d + 2), attn + ((first_row + r / group) * shape.q_heads + item.kv_head * group + r % group) * d,
           d);
}

// Items of all sequences, the long ones first, and how many rows of partial results they need. A sequence with at least
// FEW new tokens is cut into tiles, one with fewer into ranges too.
constexpr int64_t FEW = 16;
int64_t make_items(const Shape& shape, const Sequences& s, int64_t num_seqs, std::vector<Item>& items) {
  items.clear();
  int64_t partial = 0;
  const auto num_ranges = [&](int64_t seq, int64_t position) {
    int64_t seen = 0;  // blocks that hold a key which this position may see
    while (seen < s.num_blocks[seq] && s.starts[s.first_block[seq] + seen] <= position) seen++;
    return (seen + RANGE - 1) / RANGE;
  };
  for (int64_t seq = 0; seq < num_seqs; seq++) {
    const int64_t n = s.num_new[seq];
    for (int64_t first = (n - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES) {
      const int64_t count = std::min<int64_t>(QUERIES, n - first);
      const int64_t ranges = num_ranges(seq, s.start[seq] + first + count - 1);
      if (n >= FEW || ranges == 1) {
        for (int64_t h = 0; h < shape.kv_heads; h++) items.push_back({seq, h, first, count, 0, ranges, -1});
        continue;
      }
      for (int64_t at = 0; at < ranges; at++)  // the heads of a range lie side by side in memory
        for (int64_t h = 0; h < shape.kv_heads; h++, partial += count * shape.group())
          items.push_back({seq, h, first, count, at, at + 1, partial});
    }
  }
  return partial;
}

// Put the ranges of an item that was cut into them together; `first` is its first range's item.
void merge_ranges(const Shape& shape, const Sequences& s, const Item* first, const Item* end, float* partial, float* attn) {
  const int64_t d = shape.head_dim, group = shape.group(), rows = first->count * group;
  for (int64_t r = 0; r < rows; r++) {
    float* acc = partial + (first->partial + r) * (d + 2);
    for (const Item* next = first + shape.kv_heads; next < end && next->first_range > 0; next += shape.kv_heads)
      merge(acc, partial + (next->partial + r) * (d + 2), d);
    const int64_t row = s.first_row[first->seq] + first->first + r / group;
    finish(acc, attn + (row * shape.q_heads + first->kv_head * group + r % group) * d, d);
  }
}

}  // namespace
