// The scan sweep: running sums along rows. A team of threads owns a row and goes through it from
// left to right, Team · V elements a step: a thread sums its V elements, a warp the sums of its
// threads, the team those of its warps; what came before the step is carried along. The order is
// fixed, so are the bits; an element's sum follows from itself and those before it alone, as Inf
// and NaN do. Elements of 16 bits are summed in fp32. Of short rows a block has several, one a
// warp.
//
// Loads of a step are issued before the sums of the one before it are waited for.
//
// The body (generated):
//   static constexpr i64 kRow, kRowsPerSample;   using Value = float;   struct Operands;
//   template <int V> static void values(const Operands&, i64 b, i64 e, Value (&x)[V]);
//   template <int V> static void store(const Operands&, i64 b, i64 e, const Value (&sum)[V]);
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

// The sum of the values of the lanes before this one; `all`: of all of them.
template <class Value>
INGOT_D Value sum_before(Value own, int lane, Value& all) {
  Value sum = own;
  INGOT_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const Value left = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += left;
  }
  all = __shfl_sync(0xffffffffu, sum, 31);
  const Value before = __shfl_up_sync(0xffffffffu, sum, 1);
  return lane == 0 ? Value(0) : before;
}

// A team is of one warp or more; of more than one, a block has one.
template <class Body, int V, int Team, int Rows>
INGOT_D void scan_sweep(const typename Body::Operands& operands, i64 rows) {
  using Value = typename Body::Value;
  constexpr int kWarps = Team / 32;
  static_assert(kWarps == 1 || Rows == 1, "teams of several warps wait for one another by block");
  constexpr i64 kStep = static_cast<i64>(V) * Team;
  __shared__ Value of_warp[2][kWarps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int thread = threadIdx.x % Team;
  const i64 row = static_cast<i64>(blockIdx.x) * Rows + threadIdx.x / Team;
  if (row >= rows) return;
  const i64 b = row / Body::kRowsPerSample, e = row % Body::kRowsPerSample * Body::kRow;
  const int lane = thread % 32, warp = thread / 32;
  const auto load = [&](i64 at, Value(&x)[V]) {
    if (at < Body::kRow) {
      Body::template values<V>(operands, b, e + at, x);
    } else {
      INGOT_UNROLL
      for (int i = 0; i < V; ++i) x[i] = 0;
    }
  };
  Value carry = 0, x[V], next[V];
  i64 at = static_cast<i64>(thread) * V;
  load(at, x);
  for (int step = 0; step * kStep < Body::kRow; ++step, at += kStep) {
    load(at + kStep, next);
    INGOT_UNROLL
    for (int i = 1; i < V; ++i) x[i] += x[i - 1];
    Value all;
    Value before = sum_before(x[V - 1], lane, all);
    if constexpr (kWarps > 1) {
      // Two arrays in turn: nobody writes what another warp may still read.
      Value* sums = of_warp[step % 2];
      if (lane == 0) sums[warp] = all;
      __syncthreads();
      Value total = 0, left = 0;
      INGOT_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) left = total;
        total += sums[w];
      }
      before += left;
      all = total;
    }
    const Value shift = carry + before;
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) x[i] += shift;
    if (at < Body::kRow) Body::template store<V>(operands, b, e + at, x);
    carry += all;
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) x[i] = next[i];
  }
}

}  // namespace ingot
