// The scan sweep: running sums along rows. A team of threads owns a row and goes through it from
// left to right, a tile of Vectors · Team · V elements at a time, all of which is loaded before
// anything waits. Vector k of a thread is elements (k·Team + rank)·V … + V of the tile. A thread
// sums its vectors' elements, a warp the sums of each vector, the team's first warp those of the
// warps; what came before the tile is carried along.
//
// The order is fixed, so are the bits; an element's sum follows from itself and those before it
// alone, as Inf and NaN do. Elements of 16 bits are summed in fp32.
//
// Teams of part of a warp, or of one, share a block; a team of several warps has its own.
//
// The body (generated):
//   static constexpr i64 kRow, kRowsPerSample;   using Value = float;   struct Operands;
//   template <int V> static void values(const Operands&, i64 b, i64 e, Value (&x)[V]);
//   template <int V> static void store(const Operands&, i64 b, i64 e, const Value (&sum)[V]);
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

// Of the values of Width neighbouring lanes, the sum of those before this one's; `all`: of all.
template <int Width, class Value>
INGOT_D Value sum_before(Value own, int lane, Value& all) {
  Value sum = own;
  INGOT_UNROLL
  for (int distance = 1; distance < Width; distance *= 2) {
    const Value left = __shfl_up_sync(0xffffffffu, sum, distance, Width);
    if (lane >= distance) sum += left;
  }
  all = __shfl_sync(0xffffffffu, sum, Width - 1, Width);
  const Value before = __shfl_up_sync(0xffffffffu, sum, 1, Width);
  return lane == 0 ? Value(0) : before;
}

// Sums of Count parts, in order, become sums of what is before each; returns that of all. By one
// warp.
template <int Count, class Value>
INGOT_D Value sum_parts(Value (&parts)[Count], int lane) {
  constexpr int kEach = (Count + 31) / 32;
  Value part[kEach], own = 0, all;
  INGOT_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int at = lane * kEach + i;
    part[i] = at < Count ? parts[at] : Value(0);
    own += part[i];
  }
  Value before = sum_before<32>(own, lane, all);
  INGOT_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int at = lane * kEach + i;
    if (at < Count) parts[at] = before;
    before += part[i];
  }
  return all;
}

template <class Body, int V, int Team, int Vectors, int Rows>
INGOT_D void scan_sweep(const typename Body::Operands& operands, i64 rows) {
  using Value = typename Body::Value;
  constexpr int kWidth = Team < 32 ? Team : 32, kWarps = (Team + 31) / 32;
  constexpr i64 kTile = static_cast<i64>(V) * Team * Vectors;
  static_assert(kWarps == 1 || Rows == 1, "teams of several warps wait for one another by block");
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int rank = threadIdx.x % Team, lane = rank % kWidth, warp = rank / 32;
  const i64 wanted = static_cast<i64>(blockIdx.x) * Rows + threadIdx.x / Team;
  // Lanes without a row take part in the sums of their warp.
  const bool owns = wanted < rows;
  const i64 row = owns ? wanted : rows - 1;
  const i64 b = row / Body::kRowsPerSample, e = row % Body::kRowsPerSample * Body::kRow;
  Value carry = 0;
  for (i64 tile = 0; tile < Body::kRow; tile += kTile) {
    const auto at = [&](int k) { return tile + (static_cast<i64>(k) * Team + rank) * V; };
    const auto inside = [&](int k) { return Body::kRow % kTile == 0 || at(k) < Body::kRow; };
    Value x[Vectors][V], before[Vectors], all[Vectors];
    // Behind a branch each vector would be waited for before the next is loaded: a vector past the
    // end is the row's last one again.
    INGOT_UNROLL
    for (int k = 0; k < Vectors; ++k) {
      Body::template values<V>(operands, b, e + (inside(k) ? at(k) : Body::kRow - V), x[k]);
    }
    INGOT_UNROLL
    for (int k = 0; k < Vectors; ++k) {
      INGOT_UNROLL
      for (int i = 0; i < V; ++i) {
        if (!inside(k)) x[k][i] = 0;
        if (i > 0) x[k][i] += x[k][i - 1];
      }
      before[k] = sum_before<kWidth>(x[k][V - 1], lane, all[k]);
    }
    Value next = carry;
    if constexpr (kWarps > 1) {
      // Two arrays in turn: nobody writes what another warp may still read.
      __shared__ Value parts[2][Vectors * kWarps], totals[2];
      const int turn = tile / kTile % 2;
      INGOT_UNROLL
      for (int k = 0; k < Vectors; ++k) {
        if (lane == 0) parts[turn][k * kWarps + warp] = all[k];
      }
      __syncthreads();
      if (warp == 0) {
        const Value total = sum_parts(parts[turn], lane);
        if (lane == 0) totals[turn] = total;
      }
      __syncthreads();
      INGOT_UNROLL
      for (int k = 0; k < Vectors; ++k) before[k] += parts[turn][k * kWarps + warp];
      next += totals[turn];
    } else {
      Value left = 0;
      INGOT_UNROLL
      for (int k = 0; k < Vectors; ++k) {
        before[k] += left;
        left += all[k];
      }
      next += left;
    }
    INGOT_UNROLL
    for (int k = 0; k < Vectors; ++k) {
      const Value shift = carry + before[k];
      INGOT_UNROLL
      for (int i = 0; i < V; ++i) x[k][i] += shift;
      if (owns && inside(k)) Body::template store<V>(operands, b, e + at(k), x[k]);
    }
    carry = next;
  }
}

}  // namespace ingot
