// The rows sweep in its general form: reductions over different parts of a sample, mixed and in
// sequence (group norm followed by softmax, pooling followed by a sum, reductions over rows).
//
// A block owns a sample. Reduction r has kGroups groups of kCount elements; a warp (or the block,
// where there is one group) evaluates and folds a group's arguments, reading operands again, and
// the results stay in shared memory for everything after. It trades reads (of L1 and L2 mostly) for
// generality; sweeps whose reductions all span one row use rows.cuh.
//
// The body (generated):
//   static constexpr int kReductions, kOutputs;
//   static constexpr i64 kOutputElements[];            elements of a sample of each output
//   struct Operands, Results;                          Results: arrays in shared memory
//   static GroupReduction<Monoid, Value, kGroups, kCount> reduction(Index<R>);   declared only
//   template <int R> static Value value(const Operands&, const Results&, i64 b, i64 group, i64 j);
//   template <int R, class State> static void resolve(const State&, i64 group, Results&);
//   template <int S> static void store(const Operands&, const Results&, i64 b, i64 e);
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"

namespace ingot {

template <class M, class V, i64 Groups, i64 Count>
struct GroupReduction {
  using Monoid = M;
  using Value = V;
  static constexpr i64 kGroups = Groups, kCount = Count;
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
      constexpr int kTeam = Reduction::kGroups == 1 ? Threads : 32;
      __shared__ TeamStorage<Monoid, kTeam> storage;
      const int rank = static_cast<int>(threadIdx.x % kTeam);
      for (i64 group = threadIdx.x / kTeam; group < Reduction::kGroups; group += Threads / kTeam) {
        auto state = Monoid::identity();
        for (i64 j = rank; j < Reduction::kCount; j += kTeam) {
          const typename Reduction::Value x[1][1] = {
              {Body::template value<R>(operands, results, b, group, j)}};
          state = Monoid::merge(state, Monoid::lift(x, j, 1));
        }
        state = merge_team<Monoid, kTeam>(state, storage);
        if (rank == 0) Body::template resolve<R>(state.first, group, results);
      }
      __syncthreads();
      reduce<R + 1>(operands, results, b);
    }
  }

  template <int S>
  INGOT_D static void store(const Operands& operands, const Results& results, i64 b) {
    if constexpr (S < Body::kOutputs) {
      constexpr i64 kElements = Body::kOutputElements[S];
      for (i64 e = threadIdx.x; e < kElements; e += Threads) {
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
