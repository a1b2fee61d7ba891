// The columns sweep: statistics over the batch for every kept element, in two kernels.
//
//   columns_sweep        partials[split][column]: states of the samples of one split (an array for
//                        each of the statistics, one after the other); where there are so many
//                        columns that no samples are split, the tail at once: there is no merge
//   merge_sweep          merges a column's partials in order, then runs the tail (mean, variance,
//                        running statistics, folded scale and shift, ...) once per column
//
// The same merge finishes the partial states that a product's epilogue emits. There are no atomics:
// splits and their order depend on the sizes alone, so equal input gives equal bits.
//
// Two layouts of the reduction, by which axes are reduced besides the batch:
//   leading (none, rows, or rows and groups): a column is a position in the kept trailing axes, a
//     "sample" is (b, leading index); threads lie along columns and walk down samples;
//   inner (anything else): a block owns one column; threads lie along the reduced positions. Where
//     there are few columns, a "sample" is one of kLeading equal pieces of a batch entry's.
//
// The body (generated):
//   static constexpr i64 kColumns, kLeading, kInner;  static constexpr bool kBackwards;
//   static constexpr bool kFeatureOfColumn;   whether Feature is the same for all of a column
//   using Value = float;  using Statistics = Together<Moments<Value>, ...>;
//   struct Operands;  template <int V> struct Feature, Element;
//   static i64 flat(i64 column, i64 inner);            element within the sample (inner layout)
//   template <int V> static void feature(const Operands&, i64 e, Feature<V>&);
//   template <int V> static void load(const Operands&, i64 b, i64 e, Element<V>&);
//   template <int V> static void values(const Operands&, const Feature<V>&, Element<V>&, i64 b,
//                                       i64 e, Value (&x)[kCount][V]);   may also store
//   static void tail(const Operands&, const Statistics::State&, i64 e);  e: the column
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"

namespace ingot {

// What one thread sees of `Chunk` samples: all loads first, then the values.
template <class Body, int V, int Chunk>
struct ColumnChunk {
  using Statistics = typename Body::Statistics;
  using State = typename Statistics::State;
  using Value = typename Body::Value;
  using Feature = typename Body::template Feature<V>;
  static constexpr int kCount = Statistics::kCount;

  // Folds samples first, first + step, ... (`count` of them, at most Chunk) into states[V].
  INGOT_D static void fold(const typename Body::Operands& operands, const Feature& shared,
                           i64 first, i64 step, i64 count, i64 column, State (&states)[V]) {
    typename Body::template Element<V> element[Chunk];
    Value x[Chunk][kCount][V];
    INGOT_UNROLL
    for (int k = 0; k < Chunk; ++k) {
      // Past the end the first sample again: behind a branch a load that converts would be waited
      // for before the next one starts.
      const i64 s = first + (k < count ? k : 0) * step;
      Body::template load<V>(operands, s / Body::kLeading, offset(s, column), element[k]);
    }
    INGOT_UNROLL
    for (int k = 0; k < Chunk; ++k) {
      const i64 s = first + k * step;
      const i64 e = offset(s, column);
      if (k >= count) continue;
      if constexpr (Body::kLeading == 1 || Body::kFeatureOfColumn) {
        Body::template values<V>(operands, shared, element[k], s / Body::kLeading, e, x[k]);
      } else {
        Feature own;
        Body::template feature<V>(operands, e, own);
        Body::template values<V>(operands, own, element[k], s / Body::kLeading, e, x[k]);
      }
    }
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (count >= Chunk) {
        Value lane[kCount][Chunk];
        INGOT_UNROLL
        for (int n = 0; n < kCount; ++n) {
          INGOT_UNROLL
          for (int k = 0; k < Chunk; ++k) lane[n][k] = x[k][n][i];
        }
        states[i] = Statistics::merge(states[i], Statistics::lift(lane, first, step));
      } else {
        INGOT_UNROLL
        for (int k = 0; k < Chunk; ++k) {
          Value lane[kCount][1];
          INGOT_UNROLL
          for (int n = 0; n < kCount; ++n) lane[n][0] = x[k][n][i];
          if (k < count) {
            states[i] = Statistics::merge(states[i], Statistics::lift(lane, first + k * step, 1));
          }
        }
      }
    }
  }

  INGOT_D static i64 offset(i64 s, i64 column) {
    if constexpr (Body::kLeading == 1) return column;
    return (s % Body::kLeading) * Body::kColumns + column;
  }
};

// Leading layout. Grid: ceil(kColumns / (V·Lanes)) · splits blocks of Lanes·Rows threads.
// samples: B·kLeading, cut into splits of `split_samples`. kBackwards: the last split begins, so
// that what the sweep before read last is still in L2. finish(splits, split, column, state).
template <class Body, int V, int Lanes, int Rows, int Chunk, class Finish>
INGOT_D void columns_sweep_and(const typename Body::Operands& operands, i64 samples,
                               i64 split_samples, Finish finish) {
  using Statistics = typename Body::Statistics;
  using State = typename Statistics::State;
  constexpr i64 kVectors = Body::kColumns / V;
  constexpr u32 kTiles = static_cast<u32>((kVectors + Lanes - 1) / Lanes);
  __shared__ State shared_states[Rows][Lanes];

  const int lane = static_cast<int>(threadIdx.x % Lanes);
  const int row = static_cast<int>(threadIdx.x / Lanes);
  const i64 vector = static_cast<i64>(blockIdx.x % kTiles) * Lanes + lane;
  const i64 from_here = blockIdx.x / kTiles;
  const i64 split = Body::kBackwards ? gridDim.x / kTiles - 1 - from_here : from_here;
  const i64 column = vector * V;
  const i64 begin = split * split_samples;
  const i64 end = begin + split_samples < samples ? begin + split_samples : samples;

  let_next_kernel_start();
  wait_for_previous_kernel();

  State states[V];
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) states[i] = Statistics::identity();
  if (vector < kVectors) {
    typename Body::template Feature<V> feature;
    if constexpr (Body::kLeading == 1 || Body::kFeatureOfColumn) {
      Body::template feature<V>(operands, column, feature);
    }
    for (i64 s = begin + row; s < end; s += Rows * Chunk) {
      ColumnChunk<Body, V, Chunk>::fold(operands, feature, s, Rows, (end - s + Rows - 1) / Rows,
                                        column, states);
    }
  }
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) {
    __syncthreads();
    shared_states[row][lane] = states[i];
    for (int half = Rows / 2; half > 0; half /= 2) {
      __syncthreads();
      if (row < half) {
        shared_states[row][lane] =
            Statistics::merge(shared_states[row][lane], shared_states[row + half][lane]);
      }
    }
    if (row == 0 && vector < kVectors) {
      finish(gridDim.x / kTiles, split, column + i, shared_states[0][lane]);
    }
  }
}

// partials: states[splits][kColumns].
template <class Body, int V, int Lanes, int Rows, int Chunk>
INGOT_D void columns_sweep(const typename Body::Operands& operands, i64 samples, i64 split_samples,
                           void* partials) {
  using Statistics = typename Body::Statistics;
  columns_sweep_and<Body, V, Lanes, Rows, Chunk>(
      operands, samples, split_samples,
      [=](i64 splits, i64 split, i64 column, const typename Statistics::State& state) {
        Statistics::write(partials, splits * Body::kColumns, split * Body::kColumns + column,
                          state);
      });
}

// One split.
template <class Body, int V, int Lanes, int Rows, int Chunk>
INGOT_D void columns_whole_sweep(const typename Body::Operands& operands, i64 samples) {
  columns_sweep_and<Body, V, Lanes, Rows, Chunk>(
      operands, samples, samples,
      [&](i64, i64, i64 column, const typename Body::Statistics::State& state) {
        Body::tail(operands, state, column);
      });
}

// A vector of a column that a thread of the inner layout reads, and those that it reads next. b:
// the sample.
template <class Body, int V, int Threads>
struct InnerPlace {
  static constexpr i64 kVectors = Body::kInner / V;
  i64 b, vector;

  INGOT_D static InnerPlace first(i64 begin) {
    const u32 own = threadIdx.x;
    return {begin + own / static_cast<u32>(kVectors), own % static_cast<u32>(kVectors)};
  }
  INGOT_D InnerPlace next() const {
    const i64 beyond = vector + Threads % kVectors - kVectors;
    return {b + Threads / kVectors + (beyond >= 0), beyond >= 0 ? beyond : beyond + kVectors};
  }
  INGOT_D i64 index() const { return (b * kVectors + vector) * V; }
  // b is never negative: without its sign the divisions are shorter.
  INGOT_D i64 entry() const { return static_cast<i64>(static_cast<u64>(b) / Body::kLeading); }
  INGOT_D i64 piece() const { return static_cast<i64>(static_cast<u64>(b) % Body::kLeading); }
  // An element of the batch entry. Of fewer than 2^32 a division takes a third of the instructions.
  INGOT_D i64 element(i64 column) const {
    const i64 e = Body::flat(column, piece() * Body::kInner + vector * V);
    constexpr i64 kElements = Body::kColumns * Body::kInner * Body::kLeading;
    return kElements >> 32 == 0 ? static_cast<i64>(static_cast<u32>(e)) : e;
  }
};

// What one thread sees of `Chunk` vectors of a column: all loads first, then the values.
template <class Body, int V, int Threads, int Chunk>
struct InnerChunk {
  using Statistics = typename Body::Statistics;
  using Feature = typename Body::template Feature<V>;
  using Place = InnerPlace<Body, V, Threads>;
  static constexpr int kCount = Statistics::kCount;

  INGOT_D static typename Statistics::State lift(const typename Body::Operands& operands,
                                                 const Feature& shared, i64 column,
                                                 const Place (&place)[Chunk]) {
    using Value = typename Body::Value;
    typename Body::template Element<V> element[Chunk];
    Feature own[Chunk];
    Value all[kCount][Chunk * V];
    INGOT_UNROLL
    for (int k = 0; k < Chunk; ++k) {
      const i64 e = place[k].element(column);
      Body::template load<V>(operands, place[k].entry(), e, element[k]);
      if constexpr (!Body::kFeatureOfColumn) Body::template feature<V>(operands, e, own[k]);
    }
    INGOT_UNROLL
    for (int k = 0; k < Chunk; ++k) {
      const i64 e = place[k].element(column);
      Value x[kCount][V];
      if constexpr (Body::kFeatureOfColumn) {
        Body::template values<V>(operands, shared, element[k], place[k].entry(), e, x);
      } else {
        Body::template values<V>(operands, own[k], element[k], place[k].entry(), e, x);
      }
      INGOT_UNROLL
      for (int n = 0; n < kCount; ++n) {
        INGOT_UNROLL
        for (int i = 0; i < V; ++i) all[n][k * V + i] = x[n][i];
      }
    }
    return Statistics::template lift<V>(all, place[0].index(), static_cast<i64>(Threads) * V);
  }
};

// Inner layout. Grid: kColumns · splits blocks of Threads threads; samples are batch entries.
template <class Body, int V, int Threads, int Chunk>
INGOT_D void columns_inner_sweep(const typename Body::Operands& operands, i64 samples,
                                 i64 split_samples, void* partials) {
  using Statistics = typename Body::Statistics;
  using State = typename Statistics::State;
  using Place = InnerPlace<Body, V, Threads>;
  __shared__ TeamStorage<Statistics, Threads> storage;

  const i64 column = blockIdx.x % static_cast<u32>(Body::kColumns);
  const i64 split = blockIdx.x / static_cast<u32>(Body::kColumns);
  const i64 begin = split * split_samples;
  const i64 end = begin + split_samples < samples ? begin + split_samples : samples;

  let_next_kernel_start();
  wait_for_previous_kernel();

  typename Body::template Feature<V> feature;
  if constexpr (Body::kFeatureOfColumn) {
    Body::template feature<V>(operands, Body::flat(column, 0), feature);
  }
  State state = Statistics::identity();
  Place place = Place::first(begin);
  for (;;) {
    Place chunk[Chunk];
    chunk[0] = place;
    INGOT_UNROLL
    for (int k = 1; k < Chunk; ++k) chunk[k] = chunk[k - 1].next();
    if (chunk[Chunk - 1].b >= end) break;
    const State lifted =
        InnerChunk<Body, V, Threads, Chunk>::lift(operands, feature, column, chunk);
    state = Statistics::merge(state, lifted);
    place = chunk[Chunk - 1].next();
  }
  for (; place.b < end; place = place.next()) {
    const Place one[1] = {place};
    state = Statistics::merge(
        state, InnerChunk<Body, V, Threads, 1>::lift(operands, feature, column, one));
  }
  state = merge_team<Statistics, Threads>(state, storage);
  if (threadIdx.x == 0) {
    Statistics::write(partials, gridDim.x, blockIdx.x, state);
  }
}

// Grid: ceil(kColumns / Lanes) blocks of Lanes·Segments threads. A thread merges a contiguous range
// of splits; the ranges merge by halves, neighbours last, and one thread a column runs the tail.
template <class Body, int Lanes, int Segments>
INGOT_D void merge_sweep(const typename Body::Operands& operands, const void* partials,
                         i64 splits) {
  using Statistics = typename Body::Statistics;
  using State = typename Statistics::State;
  __shared__ State shared_states[Segments][Lanes];
  const int lane = static_cast<int>(threadIdx.x % Lanes);
  const int segment = static_cast<int>(threadIdx.x / Lanes);
  const i64 column = static_cast<i64>(blockIdx.x) * Lanes + lane;
  const i64 per_segment = (splits + Segments - 1) / Segments;
  const i64 begin = segment * per_segment;
  const i64 end = begin + per_segment < splits ? begin + per_segment : splits;

  let_next_kernel_start();
  wait_for_previous_kernel();

  State state = Statistics::identity();
  if (column < Body::kColumns) {
#pragma unroll 4
    for (i64 split = begin; split < end; ++split) {
      const State part =
          Statistics::read(partials, splits * Body::kColumns, split * Body::kColumns + column);
      state = Statistics::merge(state, part);
    }
  }
  INGOT_UNROLL
  for (int half = Segments / 2; half > 0; half /= 2) {
    if (segment >= half && segment < 2 * half) shared_states[segment][lane] = state;
    __syncthreads();
    if (segment < half) state = Statistics::merge(state, shared_states[segment + half][lane]);
  }
  if (segment == 0 && column < Body::kColumns) Body::tail(operands, state, column);
}

}  // namespace ingot
