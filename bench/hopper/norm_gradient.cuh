// A linear layer's dY before a scale and a batch norm, for columns_packed.cu: the bodies that code
// generation would write, and the whole of it by one kernel.
#pragma once

#include "columns_packed.cuh"

namespace bench {

using namespace ingot;

// What code generation writes of such a backward pass.
template <i64 kColumns_>
struct Gradient {
  static constexpr i64 kColumns = kColumns_, kLeading = 1, kInner = 1;
  static constexpr bool kBackwards = false, kFeatureOfColumn = true;
  using Value = float;
  using Statistics = Together<Sum<float>, Sum<float>>;
  struct Operands {
    float *given, *y;                                      // [samples, columns]
    float *scale, *weight, *mean, *rstd, *first, *second;  // [columns]: the means are the last two
    float *made, *sum_of_scale, *sum;
  };
  template <int V>
  struct Feature {
    float scale[V], factor[V], mean[V], rstd[V], first[V], second[V];
  };
  template <int V>
  struct Element {
    float given[V], y[V];
  };
  template <int V>
  INGOT_D static void feature(const Operands& operands, i64 e, Feature<V>& shared) {
    float weight[V];
    ingot::load(operands.scale + e, shared.scale);
    ingot::load(operands.weight + e, weight);
    ingot::load(operands.mean + e, shared.mean);
    ingot::load(operands.rstd + e, shared.rstd);
    ingot::load(operands.first + e, shared.first);
    ingot::load(operands.second + e, shared.second);
    for (int i = 0; i < V; ++i) shared.factor[i] = shared.rstd[i] * weight[i];
  }
  template <int V>
  INGOT_D static void load(const Operands& operands, i64 b, i64 e, Element<V>& held) {
    ingot::load(operands.given + b * kColumns + e, held.given);
    ingot::load(operands.y + b * kColumns + e, held.y);
  }
  template <int V>
  INGOT_D static float normal(const Feature<V>& shared, const Element<V>& held, int i) {
    return (held.y[i] * shared.scale[i] - shared.mean[i]) * shared.rstd[i];
  }
  template <int V>
  INGOT_D static void values(const Operands&, const Feature<V>& shared, Element<V>& held, i64, i64,
                             Value (&x)[2][V], float (&packed)[V]) {
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) {
      const float centred = held.given[i] - shared.first[i];
      const float projected = normal(shared, held, i) * shared.second[i];
      const float behind = shared.factor[i] * (centred - projected);
      x[0][i] = behind * held.y[i];
      x[1][i] = packed[i] = behind * shared.scale[i];
    }
  }
  INGOT_D static float* place(const Operands& operands, i64 b, i64 e) {
    return operands.made + b * kColumns + e;
  }
  INGOT_D static void tail(const Operands& operands, const typename Statistics::State& state,
                           i64 e) {
    operands.sum_of_scale[e] = Sum<float>::value(state.first);
    operands.sum[e] = Sum<float>::value(state.others.first);
  }
};

// The same where every element is stored.
template <i64 kColumns>
struct StoredGradient : Gradient<kColumns> {
  using Base = Gradient<kColumns>;
  template <int V>
  INGOT_D static void values(const typename Base::Operands& operands,
                             const typename Base::template Feature<V>& shared,
                             typename Base::template Element<V>& held, i64 b, i64 e,
                             float (&x)[2][V]) {
    float made[V];
    Base::template values<V>(operands, shared, held, b, e, x, made);
    ingot::store(operands.made + b * kColumns + e, made);
  }
};

// The sweep before: the means of the gradient, and of it times the normalised values.
template <i64 kColumns_>
struct Means : Gradient<kColumns_> {
  using Base = Gradient<kColumns_>;
  using Statistics = Together<Average<float>, Average<float>>;
  template <int V>
  INGOT_D static void values(const typename Base::Operands&,
                             const typename Base::template Feature<V>& shared,
                             typename Base::template Element<V>& held, i64, i64, float (&x)[2][V]) {
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) {
      x[0][i] = held.given[i];
      x[1][i] = held.given[i] * Base::normal(shared, held, i);
    }
  }
  INGOT_D static void tail(const typename Base::Operands& operands,
                           const typename Statistics::State& state, i64 e) {
    operands.first[e] = Average<float>::mean(state.first);
    operands.second[e] = Average<float>::mean(state.others.first);
  }
};

// Sums over a strip's warps and blocks; the blocks' meeting must be open.
template <int kWarps>
INGOT_D float strip_sum(float sum, columns::Meeting<kWarps>& meeting, u32 blocks) {
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  meeting.warps[warp][lane] = sum;
  __syncthreads();
  sum = 0.f;
  for (int i = 0; i < kWarps; ++i) sum += meeting.warps[i][lane];
  if (blocks == 1) return sum;
  const u32 barrier = ptx::shared_address(&meeting.barrier);
  for (u32 block = warp; block < blocks; block += kWarps) {
    const u32 place = ptx::shared_address(&meeting.blocks[columns::block_of_strip()][lane]);
    ptx::store_shared_remote(place, barrier, block, sum);
  }
  ptx::mbarrier_wait(barrier, 0);
  sum = 0.f;
  for (u32 block = 0; block < blocks; ++block) sum += meeting.blocks[block][lane];
  return sum;
}

// Both tensors stay on chip from the first sums to the packed lines, so that each is read once: two
// lines a warp, one of them in registers. Grid and memory as of columns_packed.cuh's with lines for
// both; partials are of Gradient's sums.
template <class Body, int kWarps>
INGOT_D void whole_gradient(const typename Body::Operands& operands, i64 samples, void* partials,
                            void* packed, i32* exponent) {
  using Form = columns::FragmentForm<1>;
  using Statistics = typename Body::Statistics;
  constexpr i32 kColumns = static_cast<i32>(Body::kColumns);
  extern __shared__ __align__(128) unsigned char column_memory[];
  __shared__ columns::Meeting<kWarps> meeting, sums[2];
  __shared__ typename Statistics::State states[kWarps][32];
  const u32 blocks = columns::blocks_of_strip(), block = columns::block_of_strip();
  if (blocks > 1 && threadIdx.x == 0) {
    for (auto& own : sums) {
      ptx::mbarrier_init(ptx::shared_address(&own.barrier), 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_expect_bytes(ptx::shared_address(&own.barrier), blocks * 128);
    }
  }
  columns::open_meeting(meeting, blocks);
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i32 first_column = static_cast<i32>(blockIdx.x / blocks) * 32,
            own_column = first_column + lane;
  const i32 k = static_cast<i32>(samples), lines = Form::lines(k);
  const bool valid = own_column < kColumns;
  const i32 column = valid ? own_column : kColumns - 1;
  columns::Strip strip = {operands.given + column,
                          kColumns,
                          k,
                          kColumns - first_column,
                          lines,
                          static_cast<u32*>(packed) + static_cast<i64>(first_column) * lines * 32,
                          exponent + own_column,
                          lane,
                          static_cast<i32>(block) * kWarps + warp,
                          static_cast<i32>(blocks) * kWarps,
                          valid};
  columns::Strip other = strip;
  other.source = operands.y + column;
  const u32 memory = ptx::shared_address(column_memory) + warp * 8192, own = memory + lane * 4;
  const i32 first = strip.first * 32, second = (strip.first + strip.step) * 32;

  let_next_kernel_start();
  wait_for_previous_kernel();

  typename Body::template Feature<1> shared;
  Body::template feature<1>(operands, column, shared);
  float given[32], y[32];
  columns::copy<32>(strip, second, own);
  columns::copy<32>(other, second, own + 4096);
  columns::load<32>(strip, first, given);
  columns::load<32>(other, first, y);
  // What is past the end is a gradient of 0.
  float sum = 0.f, product = 0.f;
  const auto add = [&](float a, float b) {
    typename Body::template Element<1> held = {{a}, {b}};
    sum += a;
    product += a * Body::normal(shared, held, 0);
  };
  INGOT_UNROLL
  for (int e = 0; e < 32; ++e) add(given[e], y[e]);
  __syncwarp();
  ptx::copy_wait_all();
#pragma unroll 8
  for (int e = 0; e < 32; ++e) {
    add(ptx::load_shared(own + e * 128), ptx::load_shared(own + 4096 + e * 128));
  }
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    ptx::cluster_wait();
    ptx::cluster_arrive();  // for strip_maximum()
  }
#endif
  shared.first[0] = strip_sum(sum, sums[0], blocks) / float(k);
  shared.second[0] = strip_sum(product, sums[1], blocks) / float(k);
  if (block == 0 && warp == 0 && valid) {
    operands.first[column] = shared.first[0];
    operands.second[column] = shared.second[0];
  }

  typename Statistics::State state = Statistics::identity();
  float amax = 0.f;
  const auto make = [&](i32 b, float a, float c) {
    typename Body::template Element<1> held = {{a}, {c}};
    float x[2][1], made[1];
    Body::template values<1>(operands, shared, held, b, column, x, made);
    if (b >= k) return 0.f;
    state = Statistics::merge(state, Statistics::lift(x, b, 1));
    amax = fmaxf(amax, fabsf(made[0]));
    return made[0];
  };
#pragma unroll 8
  for (int e = 0; e < 32; ++e) {
    const float a = ptx::load_shared(own + e * 128), c = ptx::load_shared(own + 4096 + e * 128);
    ptx::store_shared(own + e * 128, make(second + e, a, c));
  }
  INGOT_UNROLL
  for (int e = 0; e < 32; ++e) given[e] = make(first + e, given[e], y[e]);
  states[warp][lane] = state;
  const float scale = columns::strip_scale<Form>(strip, amax, meeting, blocks);
  if (warp == 0 && valid) {
    for (int i = 1; i < kWarps; ++i) state = Statistics::merge(state, states[i][lane]);
    Statistics::write(partials, static_cast<i64>(blocks) * kColumns,
                      static_cast<i64>(block) * kColumns + column, state);
  }
  columns::pack_held<Form, 1, 1>(strip, memory, given, scale);
}

}  // namespace bench
