// The columns sweep (columns.cuh) that also packs one of its values as a product that sums over the
// samples reads it (product/pack_columns.cuh): the value is on chip, so that nothing reads it
// again, and where nothing else reads it, it is not stored at all. Exponents and halves are those
// of a packing pass of its own.
//
// A lane owns a column, a block or cluster a strip of 32: as in a packing pass, lines of 32 samples
// are dealt among warps, but computed where they would be loaded. Partial states are one a column
// and block of a cluster; merge_sweep finishes them.
//
// The body's values() hands the value out: values(const Operands&, const Feature<V>&, Element<V>&,
// i64 b, i64 e, Value (&x)[kCount][V], float (&packed)[V]); it is stored at place(const Operands&,
// i64 b, i64 e). An experiment: no plan asks for it (docs/kernel-log.md).
#pragma once

#include "product/split.cuh"
#include "sweeps/columns.cuh"

namespace ingot {
namespace columns {

// The second half of pack_columns.cuh's pack_kept(): packs lines first + i · step, the first of
// them in v, the others in shared memory as fp32, 128 bytes of it for each k.
template <class Form, int kRegisters, int kShared>
INGOT_D void pack_held(const Strip& strip, u32 memory, const float* v, float scale) {
  constexpr int kSlabs = Form::kSlabs, kLine = 32 * kSlabs;
  const u32 own = memory + strip.lane * 4;
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    const i32 line = strip.first + (kRegisters + i) * strip.step;
    if (line >= strip.lines) break;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float w[32];
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        w[e] = ptx::load_shared(own + (i * kLine + slab * 32 + e) * 128);
      }
      __syncwarp();  // packed lines take the first slab's place
      Form::pack(w, scale, slab, memory + i * kLine * 128, strip.lane);
    }
    flush<Form>(strip, memory + i * kLine * 128, line);
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const i32 line = strip.first + i * strip.step;
    if (line >= strip.lines) break;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      Form::pack(v + i * kLine + slab * 32, scale, slab, memory, strip.lane);
    }
    flush<Form>(strip, memory, line);
  }
}

}  // namespace columns

// What a lane sees of its column: in batches, all loads of one first.
template <class Body, bool kStored>
struct PackedColumn {
  static_assert(Body::kLeading == 1 && Body::kInner == 1, "a sample is a row");
  using Statistics = typename Body::Statistics;
  using Value = typename Body::Value;
  static constexpr int kCount = Statistics::kCount, kBatch = 8;

  const typename Body::Operands& operands;
  i64 column;  // of lanes past the last one, that again
  i32 samples;
  bool valid;  // the lane is none of these
  typename Body::template Feature<1> shared;
  typename Statistics::State state;

  // Samples first, first + 1, ...: zero past the end.
  INGOT_D void values(i32 first, float (&v)[kBatch]) {
    typename Body::template Element<1> element[kBatch];
    Value x[kCount][kBatch];
    const i32 last = samples - 1, count = samples - first;
    INGOT_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const i32 b = first + i < last ? first + i : last;
      Body::template load<1>(operands, b, column, element[i]);
    }
    INGOT_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const i32 b = first + i;
      Value own[kCount][1];
      float packed[1];
      Body::template values<1>(operands, shared, element[i], b, column, own, packed);
      INGOT_UNROLL
      for (int n = 0; n < kCount; ++n) x[n][i] = own[n][0];
      v[i] = i < count ? packed[0] : 0.f;
      if (kStored && valid && i < count) __stcs(Body::place(operands, b, column), packed[0]);
    }
    if (count >= kBatch) {
      state = Statistics::merge(state, Statistics::lift(x, first, 1));
      return;
    }
    INGOT_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      Value own[kCount][1];
      INGOT_UNROLL
      for (int n = 0; n < kCount; ++n) own[n][0] = x[n][i];
      if (i < count) state = Statistics::merge(state, Statistics::lift(own, first + i, 1));
    }
  }
};

// Grid: ceil(kColumns / 32) clusters of blocks of 32 · kWarps threads, with pack_columns_bytes() of
// shared memory; a cluster's warps hold all lines. partials: states[blocks of a cluster][kColumns].
template <class Body, class Form, int kWarps, int kRegisters, int kShared, bool kStored>
INGOT_D void columns_packed(const typename Body::Operands& operands, i64 samples, void* partials,
                            void* packed, i32* exponent) {
  using Statistics = typename Body::Statistics;
  using Column = PackedColumn<Body, kStored>;
  constexpr int kLine = 32 * Form::kSlabs, kBatch = Column::kBatch;
  constexpr int kOwnBytes = pack_columns_bytes(1, Form::kSlabs, kRegisters, kShared);
  extern __shared__ __align__(128) unsigned char column_memory[];
  __shared__ columns::Meeting<kWarps> meeting;
  __shared__ typename Statistics::State states[kWarps][32];
  const u32 blocks = columns::blocks_of_strip(), block = columns::block_of_strip();
  columns::open_meeting(meeting, blocks);
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i32 first_column = static_cast<i32>(blockIdx.x / blocks) * 32;
  constexpr i32 kColumns = static_cast<i32>(Body::kColumns);
  const i32 own_column = first_column + lane, k = static_cast<i32>(samples);
  const bool valid = own_column < kColumns;
  const i32 lines = Form::lines(k);
  const columns::Strip strip = {
      nullptr,
      0,
      k,
      kColumns - first_column,
      lines,
      static_cast<u32*>(packed) + static_cast<i64>(first_column) * lines * 32,
      exponent + own_column,
      lane,
      static_cast<i32>(block) * kWarps + warp,
      static_cast<i32>(blocks) * kWarps,
      valid};
  const u32 memory = ptx::shared_address(column_memory) + warp * kOwnBytes;
  const u32 own = memory + lane * 4;

  let_next_kernel_start();
  wait_for_previous_kernel();

  Column column = {
      operands, valid ? own_column : kColumns - 1, k, valid, {}, Statistics::identity()};
  Body::template feature<1>(operands, column.column, column.shared);
  float v[kRegisters * kLine], amax = 0.f;
  INGOT_UNROLL
  for (int i = 0; i < kShared; ++i) {
    const i32 line = strip.first + (kRegisters + i) * strip.step;
    if (line >= lines) break;
#pragma unroll 1
    for (int e = 0; e < kLine; e += kBatch) {
      float w[kBatch] = {};
      if (line * kLine + e < k) column.values(line * kLine + e, w);
      amax = columns::maximum<kBatch>(amax, w);
      INGOT_UNROLL
      for (int j = 0; j < kBatch; ++j) ptx::store_shared(own + (i * kLine + e + j) * 128, w[j]);
    }
  }
  INGOT_UNROLL
  for (int e = 0; e < kRegisters * kLine; e += kBatch) {
    const i32 first = (strip.first + e / kLine * strip.step) * kLine + e % kLine;
    float w[kBatch] = {};
    if (first < k) column.values(first, w);
    amax = columns::maximum<kBatch>(amax, w);
    INGOT_UNROLL
    for (int j = 0; j < kBatch; ++j) v[e + j] = w[j];
  }
  states[warp][lane] = column.state;
  const float scale =
      columns::strip_scale<Form>(strip, amax, meeting, blocks);  // meets at barriers
  if (warp == 0 && valid) {
    typename Statistics::State state = column.state;
    for (int i = 1; i < kWarps; ++i) state = Statistics::merge(state, states[i][lane]);
    Statistics::write(partials, static_cast<i64>(blocks) * kColumns,
                      static_cast<i64>(block) * kColumns + own_column, state);
  }
  columns::pack_held<Form, kRegisters, kShared>(strip, memory, v, scale);
}

}  // namespace ingot
