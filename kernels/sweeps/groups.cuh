// The rows sweep in its general form: reductions over different parts of a sample, mixed and in
// sequence (group norm followed by softmax, pooling followed by a sum, reductions over rows).
//
// A block owns a sample. Reduction r has kGroups groups of kCount elements; a team, from one lane
// to a warp (the block, where there is one group), evaluates and folds a group's arguments, reading
// operands again, and the results stay in shared memory for everything after. It trades reads (of
// L1 and L2 mostly) for generality; sweeps whose reductions all span one row use rows.cuh.
//
// The body (generated):
//   static constexpr int kReductions, kOutputs;
//   static constexpr i64 kOutputElements[];            elements of a sample of each output
//   struct Operands, Results;                          Results: arrays in shared memory
//   static GroupReduction<Monoid, Value, kGroups, kCount> reduction(Index<R>);   declared only
//   template <int R> static Value value(const Operands&, const Results&, i64 b, u32 group, u32 j);
//   template <int R, class State> static void resolve(const State&, u32 group, Results&);
//   template <int S> static void store(const Operands&, const Results&, i64 b, u32 e);
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"

namespace ingot {

// kLift: consecutive elements that a lane lifts into one state, which costs less than merging
// states. kTeam: lanes of a group, a power of two.
template <class M, class V, i64 Groups, i64 Count>
struct GroupReduction {
  using Monoid = M;
  using Value = V;
  static constexpr u32 kGroups = Groups, kCount = Count;
  static constexpr int kLift = Count % 4 == 0 ? 4 : Count % 2 == 0 ? 2 : 1;

  INGOT_D static constexpr int lanes(int most) {
    int lanes = 1;
    while (lanes < most && static_cast<i64>(lanes) * kLift < Count) lanes *= 2;
    return lanes;
  }
  // As few as keep the block busy: a merge of two lanes' states costs as much as some elements.
  template <int Threads>
  INGOT_D static constexpr int wanted() {
    int lanes = 4;
    while (lanes < 32 && lanes * Groups < Threads) lanes *= 2;
    return lanes;
  }
  template <int Threads>
  static constexpr int kTeam = Groups == 1 ? Threads : lanes(wanted<Threads>());
};

// Grid: one block of Threads threads a sample.
template <class Body, int Threads>
struct GroupsSweep {
  using Operands = typename Body::Operands;
  using Results = typename Body::Results;

  template <int R>
  INGOT_D static void reduce(const Operands& operands, Results& results, i64 b) {
    if constexpr (R < Body::kReductions) {
      using Reduction = decltype(Body::reduction(Index<R>{}));
      using Monoid = Together<typename Reduction::Monoid>;
      constexpr int kLift = Reduction::kLift, kTeam = Reduction::template kTeam<Threads>;
      constexpr u32 kTeams = Threads / kTeam;
      __shared__ TeamStorage<Monoid, kTeam> storage;
      const u32 rank = threadIdx.x % kTeam;
      // Teams without a group follow the last one, since shuffles need whole warps.
#pragma unroll 4
      for (u32 first = 0; first < Reduction::kGroups; first += kTeams) {
        const u32 mine = first + threadIdx.x / kTeam;
        const u32 group = mine < Reduction::kGroups ? mine : Reduction::kGroups - 1;
        auto state = Monoid::identity();
#pragma unroll 1
        for (u32 j = rank * kLift; j < Reduction::kCount; j += kTeam * kLift) {
          typename Reduction::Value x[1][kLift];
          INGOT_UNROLL
          for (int i = 0; i < kLift; ++i) {
            x[0][i] = Body::template value<R>(operands, results, b, group, j + i);
          }
          state = Monoid::merge(state, Monoid::lift(x, j, 1));
        }
        state = merge_team<Monoid, kTeam>(state, storage);
        if (rank == 0 && mine == group) Body::template resolve<R>(state.first, group, results);
      }
      __syncthreads();
      reduce<R + 1>(operands, results, b);
    }
  }

  template <int S>
  INGOT_D static void store(const Operands& operands, const Results& results, i64 b) {
    if constexpr (S < Body::kOutputs) {
      constexpr u32 kElements = Body::kOutputElements[S];
      for (u32 e = threadIdx.x; e < kElements; e += Threads) {
        Body::template store<S>(operands, results, b, e);
      }
      store<S + 1>(operands, results, b);
    }
  }

  INGOT_D static void run(const Operands& operands) {
    __shared__ Results results;
    let_next_kernel_start();
    wait_for_previous_kernel();
    reduce<0>(operands, results, blockIdx.x);
    store<0>(operands, results, blockIdx.x);
  }
};
template <class Body, int Threads>
INGOT_D void groups_sweep(const typename Body::Operands& operands, i64) {
  GroupsSweep<Body, Threads>::run(operands);
}

}  // namespace ingot
