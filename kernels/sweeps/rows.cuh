// The rows sweep: one team of threads owns all elements of a row, so that reductions over the row
// (softmax, layer norm, ...), several in sequence, resolve inside the kernel: one read, one write.
//
// A row is kRow consecutive elements of a sample; a sample has kRowsPerSample of them. Work is cut
// into phases: phase p evaluates the arguments of its reductions; when the team has merged them,
// resolve<p> computes what is one value a row; `finish` computes and stores the results.
//
//   rows_in_registers   a team (a sub-warp, or a block) holds the row's live values in registers
//   rows_looped         rows too long for that: each phase reads its operands again (softmax needs
//                       one pass for (max, Σexp) at once, and one to finish); several blocks share
//                       a long one, which is then still in L2 when it is read again
//
// The body (generated):
//   static constexpr i64 kRow, kRowsPerSample;  static constexpr int kPhases;
//   static constexpr bool kNeedsIndex;                  some reduction is an ArgMax
//   using Value = float;  static Together<...> monoid(Index<P>);   declared only
//   struct Operands, Row;                              Row: values that are one a row
//   template <int V> struct Element;                   values that live across reductions
//   static void row(const Operands&, i64 b, i64 e, Row&);        before any reduction
//   template <int P, int V> static void phase(const Operands&, const Row&, i64 b, i64 e,
//                                             Element<V>&, Value (&x)[kCount][V]);
//   template <int P> static void resolve(const Operands&, const State&, i64 b, i64 e,
//                                        Row&);
//   template <int V> static void finish(const Operands&, const Row&, i64 b, i64 e, Element<V>&);
//   static void finish_row(const Operands&, const Row&, i64 b, i64 e);   stores of one a row
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/cluster.cuh"
#include "sweeps/fold.cuh"

namespace ingot {

template <class Body, int P>
using PhaseMonoid = decltype(Body::monoid(Index<P>{}));

// The row held by a team: vector k of a thread is elements (k·Team + rank)·V ... + V of the row.
template <class Body, int V, int Team>
struct RegisterRow {
  static constexpr int kVectors = static_cast<int>((Body::kRow / V + Team - 1) / Team);
  static constexpr bool kFull = Body::kRow % (static_cast<i64>(V) * Team) == 0;
  typename Body::template Element<V> element[kVectors];

  INGOT_D static i64 offset(int k, int rank) { return (static_cast<i64>(k) * Team + rank) * V; }
  INGOT_D static bool inside(int k, int rank) { return kFull || offset(k, rank) < Body::kRow; }

  template <int P>
  INGOT_D typename PhaseMonoid<Body, P>::State lift(const typename Body::Operands& operands,
                                                    const typename Body::Row& row, i64 b, i64 e,
                                                    int rank) {
    using Monoid = PhaseMonoid<Body, P>;
    using Value = typename Body::Value;
    constexpr int kCount = Monoid::kCount;
    // All values first: behind a branch each would be waited for before the next is loaded. A
    // vector past the end is the row's last one again.
    Value x[kVectors][kCount][V];
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const i64 at = inside(k, rank) ? offset(k, rank) : Body::kRow - V;
      Body::template phase<P, V>(operands, row, b, e + at, element[k], x[k]);
    }
    // Only the last vector of a thread can lie past the end.
    constexpr int kSure = kFull ? kVectors : kVectors - 1;
    typename Monoid::State state = Monoid::identity();
    if constexpr (Body::kNeedsIndex) {  // ArgMax wants consecutive positions
      INGOT_UNROLL
      for (int k = 0; k < kSure; ++k) {
        state = Monoid::merge(state, Monoid::lift(x[k], offset(k, rank), 1));
      }
    } else if constexpr (kSure > 0) {
      Value sure[kCount][kSure * V];
      INGOT_UNROLL
      for (int n = 0; n < kCount; ++n) {
        INGOT_UNROLL
        for (int i = 0; i < kSure * V; ++i) sure[n][i] = x[i / V][n][i % V];
      }
      state = Monoid::lift(sure, 0, 1);
    }
    if constexpr (!kFull) {
      constexpr int kLast = kVectors - 1;
      if (inside(kLast, rank)) {
        state = Monoid::merge(state, Monoid::lift(x[kLast], offset(kLast, rank), 1));
      }
    }
    return state;
  }
};

// Grid: ceil(rows / Teams) blocks of Team·Teams threads; Teams is 1 where a team is a whole block.
template <class Body, int V, int Team, int Teams>
struct RowsInRegisters {
  static_assert(Team <= 32 || Teams == 1, "teams of several warps meet at the block's barrier");
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, RegisterRow<Body, V, Team>& held,
                                     Row& row, i64 b, i64 e, int rank) {
    if constexpr (P < Body::kPhases) {
      using Monoid = PhaseMonoid<Body, P>;
      __shared__ TeamStorage<Monoid, Team> storage;
      const auto lifted = held.template lift<P>(operands, row, b, e, rank);
      const auto state = merge_team<Monoid, Team>(lifted, storage);
      Body::template resolve<P>(operands, state, b, e, row);
      resolve_phases<P + 1>(operands, held, row, b, e, rank);
    }
  }

  INGOT_D static void run(const Operands& operands, i64 rows) {
    const int rank = static_cast<int>(threadIdx.x % Team);
    const i64 index = static_cast<i64>(blockIdx.x) * Teams + threadIdx.x / Team;
    const bool active = index < rows;
    // Idle teams of the last block follow the last row, since shuffles need whole warps.
    const i64 mine = active ? index : rows - 1;
    const i64 b = mine / Body::kRowsPerSample;
    const i64 e = mine % Body::kRowsPerSample * Body::kRow;

    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    RegisterRow<Body, V, Team> held;
    Body::row(operands, b, e, row);
    resolve_phases<0>(operands, held, row, b, e, rank);
    if (!active) return;
    INGOT_UNROLL
    for (int k = 0; k < held.kVectors; ++k) {
      if (held.inside(k, rank)) {
        Body::template finish<V>(operands, row, b, e + held.offset(k, rank), held.element[k]);
      }
    }
    if (rank == 0) Body::finish_row(operands, row, b, e);
  }
};
template <class Body, int V, int Team, int Teams>
INGOT_D void rows_in_registers(const typename Body::Operands& operands, i64 rows) {
  RowsInRegisters<Body, V, Team, Teams>::run(operands, rows);
}

// Grid: Blocks blocks of Threads threads a row.
template <class Body, int V, int Threads, int Blocks>
struct RowsLooped {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  using Element = typename Body::template Element<V>;
  template <int P>
  using Monoid = PhaseMonoid<Body, P>;
  static constexpr int kBlocks = kHasClusters ? Blocks : 1;
  static constexpr i64 kStep = static_cast<i64>(kBlocks) * Threads * V;
  // Vectors in flight; ArgMax wants consecutive positions.
  static constexpr int kAhead = Body::kNeedsIndex ? 1 : 4;

  // Evaluates phases 0 ... P for one vector; the last one's values are returned in x.
  template <int P>
  INGOT_D static void replay(const Operands& operands, const Row& row, i64 b, i64 e,
                             Element& element, Value (&x)[Monoid<P>::kCount][V]) {
    if constexpr (P > 0) {
      Value ignored[Monoid<P - 1>::kCount][V];
      replay<P - 1>(operands, row, b, e, element, ignored);
    }
    Body::template phase<P, V>(operands, row, b, e, element, x);
  }

  // The state of N vectors, of which the first is at i.
  template <int P, int N>
  INGOT_D static typename Monoid<P>::State lift(const Operands& operands, const Row& row, i64 b,
                                                i64 e, i64 i) {
    Value x[Monoid<P>::kCount][N * V];
    INGOT_UNROLL
    for (int k = 0; k < N; ++k) {
      Element element;
      Value one[Monoid<P>::kCount][V];
      replay<P>(operands, row, b, e + i + k * kStep, element, one);
      INGOT_UNROLL
      for (int n = 0; n < Monoid<P>::kCount; ++n) {
        INGOT_UNROLL
        for (int j = 0; j < V; ++j) x[n][k * V + j] = one[n][j];
      }
    }
    return Monoid<P>::lift(x, i, 1);
  }

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, Row& row, i64 b, i64 e, i64 first) {
    if constexpr (P < Body::kPhases) {
      using M = Monoid<P>;
      __shared__ TeamStorage<M, Threads> storage;
      auto state = M::identity();
      i64 i = first;
      for (; i + (kAhead - 1) * kStep < Body::kRow; i += kAhead * kStep) {
        state = M::merge(state, lift<P, kAhead>(operands, row, b, e, i));
      }
      for (; i < Body::kRow; i += kStep) {
        state = M::merge(state, lift<P, 1>(operands, row, b, e, i));
      }
      state = merge_team<M, Threads>(state, storage);
      if constexpr (kBlocks > 1) {
        __shared__ typename M::State mine;
        state = merge_cluster<M, kBlocks>(state, mine);
      }
      Body::template resolve<P>(operands, state, b, e, row);
      resolve_phases<P + 1>(operands, row, b, e, first);
    }
  }

  // N vectors of results: all of their operands are read before the first is written.
  template <int N>
  INGOT_D static void finish(const Operands& operands, const Row& row, i64 b, i64 e) {
    Element element[N];
    if constexpr (Body::kPhases > 0) {
      INGOT_UNROLL
      for (int k = 0; k < N; ++k) {
        Value ignored[Monoid<Body::kPhases - 1>::kCount][V];
        replay<Body::kPhases - 1>(operands, row, b, e + k * kStep, element[k], ignored);
      }
    }
    INGOT_UNROLL
    for (int k = 0; k < N; ++k) {
      Body::template finish<V>(operands, row, b, e + k * kStep, element[k]);
    }
  }

  INGOT_D static void run(const Operands& operands) {
    const i64 index = blockIdx.x / Blocks;
    const int part = static_cast<int>(blockIdx.x % Blocks);
    if (part >= kBlocks) return;
    const i64 b = index / Body::kRowsPerSample;
    const i64 e = index % Body::kRowsPerSample * Body::kRow;
    const i64 first = (static_cast<i64>(part) * Threads + threadIdx.x) * V;

    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    Body::row(operands, b, e, row);
    resolve_phases<0>(operands, row, b, e, first);
    if constexpr (kBlocks > 1) ptx::cluster_sync();  // all have read this block's states
    constexpr int kTogether = 2;
    i64 i = first;
    for (; i + (kTogether - 1) * kStep < Body::kRow; i += kTogether * kStep) {
      finish<kTogether>(operands, row, b, e + i);
    }
    for (; i < Body::kRow; i += kStep) finish<1>(operands, row, b, e + i);
    if (threadIdx.x == 0 && part == 0) Body::finish_row(operands, row, b, e);
  }
};
template <class Body, int V, int Threads, int Blocks>
INGOT_D void rows_looped(const typename Body::Operands& operands, i64) {
  RowsLooped<Body, V, Threads, Blocks>::run(operands);
}

}  // namespace ingot
