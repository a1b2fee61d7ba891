// Sweeps of which operands lie turned: in memory their neighbours are those of the same column in
// the next rows, while other operands, results maybe, lie row by row. (A LayerNorm over the
// channels of [N, C, space] seen as [N, space, C]; a residual that was transposed.)
//
// A warp takes Rows neighbouring rows and 32 / Rows vectors of each: what lies row by row it moves
// in vectors, whole lines of memory by the lanes of a row; of what lies turned each lane moves the
// V elements of its vector one by one, a sector or half of one by the lanes of a column. Which
// operand is which is written in the body, so that all loads of a thread are issued before the
// first is used.
//
//   rows_turned   the body is that of rows.cuh; a row is held in registers by Warps warps
//   map_turned    the body is that of map.cuh with kRow (features), kRowsPerSample
//
// Elements are counted as an InRow.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"
#include "sweeps/rows.cuh"

namespace ingot {

// Where a thread stands: Groups groups of Warps warps, each with Rows rows. A row's team has ranks.
template <class Body, int Rows, int Warps, int Groups>
struct TurnedPlace {
  static constexpr int kLanes = 32 / Rows, kTeam = kLanes * Warps, kBlockRows = Rows * Groups;
  int lane, warp, row, rank;  // row: of the block's
  i64 b;
  InRow e;  // where the row begins
  bool active;

  INGOT_D TurnedPlace(i64 block, i64 rows) {
    lane = static_cast<int>(threadIdx.x) % kLanes;
    warp = static_cast<int>(threadIdx.x) / 32 % Warps;
    row = static_cast<int>(threadIdx.x) / (32 * Warps) * Rows +
          static_cast<int>(threadIdx.x) % 32 / kLanes;
    rank = warp * kLanes + lane;
    const i64 index = block * kBlockRows + row;
    active = index < rows;
    // Past the end the last row again, since shuffles and barriers need all threads.
    const i64 mine = active ? index : rows - 1;
    b = mine / Body::kRowsPerSample;
    e = {static_cast<u32>(mine % Body::kRowsPerSample), 0};
  }
};

// States of the warps of each row, where these are several.
template <class M, class Place, int Warps>
struct TurnedStorage {
  typename M::State of[Warps > 1 ? Place::kBlockRows : 1][Warps];
};

// Merges over the team of each row, lower ranks first, so that all its threads get equal bits.
template <class M, class Place, int Warps>
INGOT_D typename M::State merge_turned(typename M::State state, const Place& place,
                                       TurnedStorage<M, Place, Warps>& storage) {
  constexpr int kLanes = Place::kLanes, kEach = Warps > kLanes ? Warps / kLanes : 1;
  state = LaneMerge<M, kLanes>::run(state);
  if constexpr (Warps > 1) {
    if (place.lane == 0) storage.of[place.row][place.warp] = state;
    __syncthreads();
    const int first = place.lane * kEach % Warps;
    state = storage.of[place.row][first];
    INGOT_UNROLL
    for (int i = 1; i < kEach; ++i) state = M::merge(state, storage.of[place.row][first + i]);
    state = LaneMerge<M, (kLanes < Warps ? kLanes : Warps)>::run(state);
  }
  return state;
}

// Grid: ceil(rows / (Rows·Groups)) blocks of 32·Warps·Groups threads.
template <class Body, int V, int Rows, int Warps, int Groups>
struct RowsTurned {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Place = TurnedPlace<Body, Rows, Warps, Groups>;
  using Held = RegisterRow<Body, V, Place::kTeam>;

  template <int P>
  INGOT_D static void resolve_phases(const Operands& operands, const Place& place, Held& held,
                                     Row& row) {
    if constexpr (P < Body::kPhases) {
      using Monoid = PhaseMonoid<Body, P>;
      __shared__ TurnedStorage<Monoid, Place, Warps> storage;
      const auto lifted = held.template lift<P>(operands, row, place.b, place.e, place.rank);
      const auto state = merge_turned<Monoid, Place, Warps>(lifted, place, storage);
      Body::template resolve<P>(operands, state, place.b, place.e, row);
      resolve_phases<P + 1>(operands, place, held, row);
    }
  }

  INGOT_D static void run(const Operands& operands, i64 rows) {
    const Place place(blockIdx.x, rows);
    let_next_kernel_start();
    wait_for_previous_kernel();

    Row row;
    Held held;
    Body::row(operands, place.b, place.e, row);
    resolve_phases<0>(operands, place, held, row);
    if (!place.active) return;
    INGOT_UNROLL
    for (int k = 0; k < held.kVectors; ++k) {
      if (!held.inside(k, place.rank)) continue;
      const InRow e = place.e + held.offset(k, place.rank);
      Body::template finish<V>(operands, row, place.b, e, held.element[k]);
    }
    if (place.rank == 0) Body::finish_row(operands, row, place.b, place.e);
  }
};
template <class Body, int V, int Rows, int Warps, int Groups>
INGOT_D void rows_turned(const typename Body::Operands& operands, i64 rows) {
  RowsTurned<Body, V, Rows, Warps, Groups>::run(operands, rows);
}

// A block has Unroll vectors a thread of its rows. Grid: blocks along a row, times those of
// rows_turned.
template <class Body, int V, int Rows, int Warps, int Groups, int Unroll>
INGOT_D void map_turned(const typename Body::Operands& operands, i64 rows) {
  using Place = TurnedPlace<Body, Rows, Warps, Groups>;
  constexpr int kVectors = static_cast<int>(Body::kRow / V), kSpan = Place::kTeam * Unroll;
  constexpr u32 kTiles = (kVectors + kSpan - 1) / kSpan;
  const Place place(blockIdx.x / kTiles, rows);
  const int first = static_cast<int>(blockIdx.x % kTiles) * kSpan + place.rank;
  let_next_kernel_start();
  wait_for_previous_kernel();

  typename Body::template Feature<V> feature[Unroll];
  typename Body::template Element<V> element[Unroll];
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    // Past the end the last vector again, as in map.cuh.
    const int vector = first + k * Place::kTeam;
    const InRow e = place.e + (vector < kVectors ? vector : kVectors - 1) * V;
    Body::template feature<V>(operands, e, feature[k]);
    Body::template load<V>(operands, place.b, e, element[k]);
  }
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    const int vector = first + k * Place::kTeam;
    if (!place.active || vector >= kVectors) continue;
    const InRow e = place.e + vector * V;
    Body::template finish<V>(operands, feature[k], element[k], place.b, e);
  }
}

}  // namespace ingot
