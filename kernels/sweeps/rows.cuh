// The rows sweep: one team of threads owns all elements of a row, so that reductions over the row
// (softmax, layer norm, ...), several in sequence, resolve inside the kernel: one read, one write.
//
// A row is kRow consecutive elements of a sample; a sample has kRowsPerSample of them. Work is cut
// into phases: phase p evaluates the arguments of its reductions; when the team has merged them,
// resolve<p> computes what is one value a row; `finish` computes and stores the results.
//
//   rows_in_registers   a team (a sub-warp, or some warps of a block) holds the row's live values
//                       in registers
//   rows_looped         rows too long for that: each phase reads its operands again (softmax needs
//                       one pass for (max, Σexp) at once, and one to finish) but for what shared
//                       memory keeps of them; several blocks share a long one
//   odd_rows_looped     the same where no vector divides a row (odd_rows.cuh)
//
// The body (generated):
//   static constexpr i64 kRow, kRowsPerSample;  static constexpr int kPhases;
//   using Value = float;  static Together<...> monoid(Index<P>);   declared only
//   using Place = i64;                                 of an element in its sample; or u32; or an
//                                                      InRow, of rows in registers, or an InPiece
//                                                      (row_pieces.cuh): "i64 e" below
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
#include "sweeps/odd_rows.cuh"
#include "sweeps/shared_row.cuh"

namespace ingot {

template <class Body, int P>
using PhaseMonoid = decltype(Body::monoid(Index<P>{}));

// An element of a sample as its row, and its place there: no coordinate of the row is worked out
// for each of its vectors. (By 64-bit divisions, of single elements, that was most of the work.)
struct InRow {
  u32 row, column;
  INGOT_D InRow operator+(i64 elements) const { return {row, column + static_cast<u32>(elements)}; }
};
template <class Place>
inline constexpr bool kIsInRow = false;
template <>
inline constexpr bool kIsInRow<InRow> = true;

// Where a row of a sample begins, as the body counts elements.
template <class Body>
INGOT_D typename Body::Place begin_of_row(i64 row) {
  if constexpr (kIsInRow<typename Body::Place>) {
    return {static_cast<u32>(row), 0};
  } else {
    return row * Body::kRow;
  }
}

// The row held by a team: vector k of a thread is elements (k·Team + rank)·V ... + V of the row.
template <class Body, int V, int Team>
struct RegisterRow {
  static constexpr int kVectors = static_cast<int>((Body::kRow / V + Team - 1) / Team);
  static constexpr bool kFull = Body::kRow % (static_cast<i64>(V) * Team) == 0;
  typename Body::template Element<V> element[kVectors];

  INGOT_D static i64 offset(int k, int rank) { return (static_cast<i64>(k) * Team + rank) * V; }
  INGOT_D static bool inside(int k, int rank) { return kFull || offset(k, rank) < Body::kRow; }

  // e: where the row begins.
  template <int P, class At>
  INGOT_D typename PhaseMonoid<Body, P>::State lift(const typename Body::Operands& operands,
                                                    const typename Body::Row& row, i64 b, At e,
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
    if constexpr (kSure > 0) {
      Value sure[kCount][kSure * V];
      INGOT_UNROLL
      for (int n = 0; n < kCount; ++n) {
        INGOT_UNROLL
        for (int i = 0; i < kSure * V; ++i) sure[n][i] = x[i / V][n][i % V];
      }
      state = Monoid::template lift<V>(sure, offset(0, rank), static_cast<i64>(Team) * V);
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

// Grid: ceil(rows / Teams) blocks of Team·Teams threads.
template <class Body, int V, int Team, int Teams>
struct RowsInRegisters {
  static_assert(Team <= 32 || Teams < 16, "a block has sixteen barriers, one for all of it");
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Place = typename Body::Place;

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, RegisterRow<Body, V, Team>& held,
                                     Row& row, i64 b, Place e, int rank) {
    if constexpr (P < Body::kPhases) {
      using Monoid = PhaseMonoid<Body, P>;
      __shared__ TeamStorage<Monoid, Team, Teams> storage;
      const auto lifted = held.template lift<P>(operands, row, b, e, rank);
      const auto state = merge_team(lifted, storage);
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
    const Place e = begin_of_row<Body>(mine % Body::kRowsPerSample);

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

// Grid: Blocks blocks of Threads threads a row. Of its part of the row, a block keeps in shared
// memory what the launch has given it room for; the rest is read again, first what was read last.
// Odd: of a row that no vector divides; its single elements are the last threads' of the last
// block, which have the fewest vectors.
template <class Body, int V, int Threads, int Blocks, bool Odd>
struct RowsLooped {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  using Element = typename Body::template Element<V>;
  using Shared = SharedRow<Body, V, Threads>;
  template <int P>
  using Monoid = PhaseMonoid<Body, P>;
  static constexpr int kBlocks = kHasClusters ? Blocks : 1;
  static constexpr i64 kStep = static_cast<i64>(kBlocks) * Threads * V;
  static constexpr int kVectors = static_cast<int>((Body::kRow + kStep - 1) / kStep);
  // Vectors in flight. As many as registers suffice for: of single values, folded by a sum, a
  // maximum or both, more, of vectors of eight fewer.
  static constexpr bool kSmallState = Body::kPhases <= 1 && sizeof(typename Monoid<0>::State) <= 8;
  static constexpr int kAhead = V >= 8 ? 2 : V >= 4 || !kSmallState ? 4 : 8;
  static constexpr int kTogether = 2;  // vectors of results
  static_assert(kTogether == 2, "what is left over is one");

  // A row as a thread sees it: where its first vector is, and how many of them are kept; where the
  // row's whole vectors end; its single element, or -1. rank: of its block among those of the row.
  struct Part {
    i64 b, e, first, end, single;
    int rank, kept;
    INGOT_D i64 at(int vector) const { return first + vector * kStep; }
  };

  // Evaluates phases 0 ... P for one vector; the last one's values are returned in x.
  template <int P, int Width>
  INGOT_D static void replay(const Operands& operands, const Row& row, i64 b, i64 e,
                             typename Body::template Element<Width>& element,
                             Value (&x)[Monoid<P>::kCount][Width]) {
    if constexpr (P > 0) {
      Value ignored[Monoid<P - 1>::kCount][Width];
      replay<P - 1>(operands, row, b, e, element, ignored);
    }
    Body::template phase<P, Width>(operands, row, b, e, element, x);
  }

  // Evaluates phase P for a vector, which is kept or not.
  template <int P, bool Kept>
  INGOT_D static void evaluate(const Operands& operands, const Row& row, const Part& part,
                               int vector, i64 at, Element& element,
                               Value (&x)[Monoid<P>::kCount][V]) {
    if constexpr (Kept && P > 0) {
      element = Shared::get(vector);
      Body::template phase<P, V>(operands, row, part.b, part.e + at, element, x);
    } else {
      replay<P, V>(operands, row, part.b, part.e + at, element, x);
    }
  }

  // The state of kAhead vectors.
  template <int P, bool Kept>
  INGOT_D static typename Monoid<P>::State lift(const Operands& operands, const Row& row,
                                                const Part& part, int vector) {
    Value x[kAhead][Monoid<P>::kCount][V];
    Element element[kAhead];
    INGOT_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      evaluate<P, Kept>(operands, row, part, vector + k, part.at(vector + k), element[k], x[k]);
    }
    if constexpr (Kept) {
      INGOT_UNROLL
      for (int k = 0; k < kAhead; ++k) Shared::put(vector + k, element[k]);
    }
    Value all[Monoid<P>::kCount][kAhead * V];
    INGOT_UNROLL
    for (int n = 0; n < Monoid<P>::kCount; ++n) {
      INGOT_UNROLL
      for (int i = 0; i < kAhead * V; ++i) all[n][i] = x[i / V][n][i % V];
    }
    return Monoid<P>::template lift<V>(all, part.at(vector), kStep);
  }

  // Fewer vectors, from one that is inside on; in the place of others the first is read again.
  template <int P, bool Kept>
  INGOT_D static void fold_rest(const Operands& operands, const Row& row, const Part& part,
                                int vector, typename Monoid<P>::State& state) {
    constexpr int kMost = kAhead - 1;
    Value x[kMost][Monoid<P>::kCount][V];
    Element element[kMost];
    INGOT_UNROLL
    for (int k = 0; k < kMost; ++k) {
      const int read = part.at(vector + k) < part.end ? vector + k : vector;
      evaluate<P, Kept>(operands, row, part, read, part.at(read), element[k], x[k]);
    }
    INGOT_UNROLL
    for (int k = 0; k < kMost; ++k) {
      const i64 at = part.at(vector + k);
      if (at >= part.end) continue;
      if constexpr (Kept) Shared::put(vector + k, element[k]);
      state = Monoid<P>::merge(state, Monoid<P>::lift(x[k], at, 1));
    }
  }

  template <int P>
  INGOT_D static void fold(const Operands& operands, const Row& row, const Part& part,
                           typename Monoid<P>::State& state) {
    int vector = 0;
    for (; part.at(vector + kAhead - 1) < part.end; vector += kAhead) {
      const auto lifted = vector < part.kept ? lift<P, true>(operands, row, part, vector)
                                             : lift<P, false>(operands, row, part, vector);
      state = Monoid<P>::merge(state, lifted);
    }
    if constexpr (kAhead > 1) {
      if (part.at(vector) >= part.end) return;
      if (vector < part.kept) {
        fold_rest<P, true>(operands, row, part, vector, state);
      } else {
        fold_rest<P, false>(operands, row, part, vector, state);
      }
    }
  }

  template <int P>
  INGOT_D static void fold_single(const Operands& operands, const Row& row, const Part& part,
                                  typename Monoid<P>::State& state) {
    if (part.single < 0) return;
    typename Body::template Element<1> element;
    Value x[Monoid<P>::kCount][1];
    replay<P, 1>(operands, row, part.b, part.e + part.single, element, x);
    state = Monoid<P>::merge(state, Monoid<P>::lift(x, part.single, 1));
  }

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, Row& row, const Part& part) {
    if constexpr (P < Body::kPhases) {
      using M = Monoid<P>;
      __shared__ TeamStorage<M, Threads> storage;
      auto state = M::identity();
      fold<P>(operands, row, part, state);
      if constexpr (Odd) fold_single<P>(operands, row, part, state);
      state = merge_team<M, Threads>(state, storage);
      if constexpr (kBlocks > 1) {
        __shared__ typename M::State slots[kBlocks];
        if constexpr (P == 0) ptx::cluster_wait();
        state = merge_cluster<M, kBlocks>(state, part.rank, slots);
      }
      Body::template resolve<P>(operands, state, part.b, part.e, row);
      resolve_phases<P + 1>(operands, row, part);
    }
  }

  // N vectors of results: all of their operands are read before the first is written.
  template <int N, bool Kept>
  INGOT_D static void finish(const Operands& operands, const Row& row, const Part& part,
                             int vector) {
    Element element[N];
    INGOT_UNROLL
    for (int k = 0; k < N; ++k) {
      if constexpr (Kept) {
        element[k] = Shared::get(vector + k);
      } else if constexpr (Body::kPhases > 0) {
        Value ignored[Monoid<Body::kPhases - 1>::kCount][V];
        replay<Body::kPhases - 1, V>(operands, row, part.b, part.e + part.at(vector + k),
                                     element[k], ignored);
      }
    }
    INGOT_UNROLL
    for (int k = 0; k < N; ++k) {
      Body::template finish<V>(operands, row, part.b, part.e + part.at(vector + k), element[k]);
    }
  }

  INGOT_D static void finish_single(const Operands& operands, const Row& row, const Part& part) {
    if (part.single < 0) return;
    typename Body::template Element<1> element;
    if constexpr (Body::kPhases > 0) {
      Value ignored[Monoid<Body::kPhases - 1>::kCount][1];
      replay<Body::kPhases - 1, 1>(operands, row, part.b, part.e + part.single, element, ignored);
    }
    Body::template finish<1>(operands, row, part.b, part.e + part.single, element);
  }

  // What is not kept from its end on, since that was read last; then what is.
  INGOT_D static void finish_all(const Operands& operands, const Row& row, const Part& part) {
    const i64 behind = part.end - part.first;
    const int vectors = behind > 0 ? static_cast<int>((behind + kStep - 1) / kStep) : 0;
    const int kept = part.kept < vectors ? part.kept : vectors;
    int vector = vectors;
    for (; vector - kTogether >= kept; vector -= kTogether) {
      finish<kTogether, false>(operands, row, part, vector - kTogether);
    }
    if (vector > kept) finish<1, false>(operands, row, part, kept);
    for (vector = 0; vector + kTogether <= kept; vector += kTogether) {
      finish<kTogether, true>(operands, row, part, vector);
    }
    if (vector < kept) finish<1, true>(operands, row, part, vector);
    if constexpr (Odd) finish_single(operands, row, part);
  }

  INGOT_D static void place_vectors(Part& part, i64 row) {
    part.first = (static_cast<i64>(part.rank) * Threads + threadIdx.x) * V;
    part.end = Body::kRow;
    if constexpr (Odd) {
      const OddRow<Body::kRow, V> odd(row);
      part.first += odd.head;
      part.end = odd.end;
      const int last = static_cast<int>(Threads - 1 - threadIdx.x);
      const bool single = part.rank == kBlocks - 1 && last < odd.kSingles;
      part.single = single ? odd.single(last) : -1;
    }
  }

  INGOT_D static void run(const Operands& operands) {
    const i64 index = blockIdx.x / Blocks;
    Part part;
    part.rank = static_cast<int>(blockIdx.x % Blocks);
    if (part.rank >= kBlocks) return;
    if constexpr (kBlocks > 1) ptx::cluster_arrive();
    part.b = index / Body::kRowsPerSample;
    part.e = index % Body::kRowsPerSample * Body::kRow;
    place_vectors(part, index);
    // Vectors that are read together are kept together, but at the end of the row.
    const int room = Shared::vectors();
    part.kept = room >= kVectors ? room : room / kAhead * kAhead;

    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    Body::row(operands, part.b, part.e, row);
    resolve_phases<0>(operands, row, part);
    finish_all(operands, row, part);
    if (threadIdx.x == 0 && part.rank == 0) Body::finish_row(operands, row, part.b, part.e);
  }
};
template <class Body, int V, int Threads, int Blocks>
INGOT_D void rows_looped(const typename Body::Operands& operands, i64) {
  RowsLooped<Body, V, Threads, Blocks, false>::run(operands);
}
template <class Body, int V, int Threads, int Blocks>
INGOT_D void odd_rows_looped(const typename Body::Operands& operands, i64) {
  RowsLooped<Body, V, Threads, Blocks, true>::run(operands);
}

}  // namespace ingot
