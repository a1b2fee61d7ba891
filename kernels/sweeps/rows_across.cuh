// The rows sweep where the elements of a row are not neighbours in memory: reductions over the
// channels of [N, C, space], say. Neighbouring threads own neighbouring rows, so that each of their
// accesses is one of whole lines; the elements of a row are dealt to a team of threads of one lane.
//
// A row is kRow elements of a sample, kInner apart; kInner rows lie side by side. The body is that
// of rows.cuh with these two, and functions of one element (V = 1).
//
//   rows_across          a thread holds its elements' live values in registers
//   rows_across_looped   rows too long for that: each phase reads its operands again
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"

namespace ingot {

template <class M, int Team, int Lanes>
struct AcrossStorage {
  typename M::State of[Team > 1 ? Team : 1][Team > 1 ? Lanes : 1];
};

// Where a block's threads stand: Lanes rows side by side, each with a team of Team threads.
template <class Body, int Team, int Lanes>
struct AcrossPlace {
  static constexpr u32 kBefore = static_cast<u32>(Body::kInner) * static_cast<u32>(Body::kRow);
  int lane, rank;
  i64 b;
  u32 e;
  bool active;

  INGOT_D explicit AcrossPlace(i64 rows) {
    lane = static_cast<int>(threadIdx.x) % Lanes;
    rank = static_cast<int>(threadIdx.x) / Lanes;
    const i64 index = static_cast<i64>(blockIdx.x) * Lanes + lane;
    active = index < rows;
    const i64 mine = active ? index : rows - 1;
    b = mine / Body::kRowsPerSample;
    const u32 row = static_cast<u32>(mine % Body::kRowsPerSample);
    e = row / static_cast<u32>(Body::kInner) * kBefore + row % static_cast<u32>(Body::kInner);
  }
  INGOT_D u32 at(int element) const {
    return e + static_cast<u32>(element) * static_cast<u32>(Body::kInner);
  }
  // In the order of the ranks, so that all threads of a team get equal bits.
  template <class M>
  INGOT_D typename M::State merged(const typename M::State& state,
                                   AcrossStorage<M, Team, Lanes>& storage) const {
    if constexpr (Team == 1) {
      return state;
    } else {
      storage.of[rank][lane] = state;
      __syncthreads();
      typename M::State all = storage.of[0][lane];
      INGOT_UNROLL
      for (int i = 1; i < Team; ++i) all = M::merge(all, storage.of[i][lane]);
      return all;
    }
  }
};

// Grid: ceil(rows / Lanes) blocks of Lanes·Team threads.
template <class Body, int Team, int Lanes>
struct RowsAcross {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Place = AcrossPlace<Body, Team, Lanes>;
  static constexpr int kElements = static_cast<int>((Body::kRow + Team - 1) / Team);
  static constexpr bool kFull = Body::kRow % Team == 0;
  static constexpr int kSure = kFull ? kElements : kElements - 1;

  INGOT_D static bool inside(const Place& place, int k) {
    return k < kSure || k * Team + place.rank < Body::kRow;
  }

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, const Place& place,
                                     typename Body::template Element<1> (&element)[kElements],
                                     Row& row) {
    if constexpr (P < Body::kPhases) {
      using Monoid = decltype(Body::monoid(Index<P>{}));
      using Value = typename Body::Value;
      __shared__ AcrossStorage<Monoid, Team, Lanes> storage;
      // All values first, as in rows.cuh; one past the end is the last one again.
      Value sure[Monoid::kCount][kSure > 0 ? kSure : 1], last[Monoid::kCount][1];
      INGOT_UNROLL
      for (int k = 0; k < kElements; ++k) {
        const int index = inside(place, k) ? k * Team + place.rank : Body::kRow - 1;
        Body::template phase<P, 1>(operands, row, place.b, place.at(index), element[k], last);
        INGOT_UNROLL
        for (int n = 0; n < Monoid::kCount; ++n) {
          if (k < kSure) sure[n][k] = last[n][0];
        }
      }
      auto state = Monoid::identity();
      if constexpr (kSure > 0) state = Monoid::lift(sure, place.rank, Team);
      if constexpr (!kFull) {
        constexpr int kLast = kElements - 1;
        if (inside(place, kLast)) {
          state = Monoid::merge(state, Monoid::lift(last, kLast * Team + place.rank, 1));
        }
      }
      state = place.template merged<Monoid>(state, storage);
      Body::template resolve<P>(operands, state, place.b, place.e, row);
      resolve_phases<P + 1>(operands, place, element, row);
    }
  }

  INGOT_D static void run(const Operands& operands, i64 rows) {
    const Place place(rows);
    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    typename Body::template Element<1> element[kElements];
    Body::row(operands, place.b, place.e, row);
    resolve_phases<0>(operands, place, element, row);
    if (!place.active) return;
    INGOT_UNROLL
    for (int k = 0; k < kElements; ++k) {
      if (inside(place, k)) {
        const u32 e = place.at(k * Team + place.rank);
        Body::template finish<1>(operands, row, place.b, e, element[k]);
      }
    }
    if (place.rank == 0) Body::finish_row(operands, row, place.b, place.e);
  }
};
template <class Body, int Team, int Lanes>
INGOT_D void rows_across(const typename Body::Operands& operands, i64 rows) {
  RowsAcross<Body, Team, Lanes>::run(operands, rows);
}

// The same grid.
template <class Body, int Team, int Lanes>
struct RowsAcrossLooped {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  using Place = AcrossPlace<Body, Team, Lanes>;
  static constexpr int kRow = static_cast<int>(Body::kRow);
  static constexpr int kAhead = 8;  // elements in flight
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));

  // Evaluates phases 0 ... P for one element; the last one's values are returned in x.
  template <int P>
  INGOT_D static void replay(const Operands& operands, const Row& row, i64 b, u32 e,
                             typename Body::template Element<1>& element,
                             Value (&x)[Monoid<P>::kCount][1]) {
    if constexpr (P > 0) {
      Value ignored[Monoid<P - 1>::kCount][1];
      replay<P - 1>(operands, row, b, e, element, ignored);
    }
    Body::template phase<P, 1>(operands, row, b, e, element, x);
  }

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, const Place& place, Row& row) {
    if constexpr (P < Body::kPhases) {
      using M = Monoid<P>;
      __shared__ AcrossStorage<M, Team, Lanes> storage;
      auto state = M::identity();
      int index = place.rank;
      for (; index + (kAhead - 1) * Team < kRow; index += kAhead * Team) {
        Value x[M::kCount][kAhead];
        INGOT_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          typename Body::template Element<1> element;
          Value one[M::kCount][1];
          replay<P>(operands, row, place.b, place.at(index + k * Team), element, one);
          INGOT_UNROLL
          for (int n = 0; n < M::kCount; ++n) x[n][k] = one[n][0];
        }
        state = M::merge(state, M::lift(x, index, Team));
      }
      for (; index < kRow; index += Team) {
        typename Body::template Element<1> element;
        Value x[M::kCount][1];
        replay<P>(operands, row, place.b, place.at(index), element, x);
        state = M::merge(state, M::lift(x, index, 1));
      }
      state = place.template merged<M>(state, storage);
      Body::template resolve<P>(operands, state, place.b, place.e, row);
      resolve_phases<P + 1>(operands, place, row);
    }
  }

  INGOT_D static void run(const Operands& operands, i64 rows) {
    const Place place(rows);
    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    Body::row(operands, place.b, place.e, row);
    resolve_phases<0>(operands, place, row);
    if (!place.active) return;
#pragma unroll 4
    for (int index = place.rank; index < kRow; index += Team) {
      typename Body::template Element<1> element;
      if constexpr (Body::kPhases > 0) {
        Value ignored[Monoid<Body::kPhases - 1>::kCount][1];
        replay<Body::kPhases - 1>(operands, row, place.b, place.at(index), element, ignored);
      }
      Body::template finish<1>(operands, row, place.b, place.at(index), element);
    }
    if (place.rank == 0) Body::finish_row(operands, row, place.b, place.e);
  }
};
template <class Body, int Team, int Lanes>
INGOT_D void rows_across_looped(const typename Body::Operands& operands, i64 rows) {
  RowsAcrossLooped<Body, Team, Lanes>::run(operands, rows);
}

}  // namespace ingot
