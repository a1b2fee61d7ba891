// The rows sweep (rows.cuh) that also packs one of the values it stores into the form in which a
// product reads it (product/split.cuh, product/scaled_rows.cuh): the row is in registers, so that
// nothing reads it again. Exponents and halves are those of a packing pass of its own.
//
// The body's finish() hands out the value: finish(const Operands&, const Row&, i64 b, i64 e,
// Element<V>&, float (&packed)[V]). Where others read it too (`plain`), it is also stored as it is,
// at place(const Operands&, i64 b, i64 e). The body may have no reductions: then a row is what the
// product sums over.
#pragma once

#include "product/scaled_rows.cuh"
#include "sweeps/rows.cuh"

namespace ingot {

// Grid: ceil(rows / Teams) blocks of Team·Teams threads; a team is a warp or a whole block. Rows
// are whole lines of the packed form; of a thread's vectors the last alone can lie past a row's
// end.
template <class Body, int Team, int Teams, class Vectors>
INGOT_D void rows_packed(const typename Body::Operands& operands, i64 rows, void* packed,
                         i32* exponent, bool plain) {
  using Held = RegisterRow<Body, 4, Team>;
  static_assert(Body::kRow % Vectors::kLine == 0, "nothing is written past a row's end");
  static_assert(Team == 32 || Teams == 1, "lines belong to lanes of one warp");
  const int rank = static_cast<int>(threadIdx.x % Team);
  const i64 index = static_cast<i64>(blockIdx.x) * Teams + threadIdx.x / Team;
  const i64 b = index / Body::kRowsPerSample;
  const i64 e = index % Body::kRowsPerSample * Body::kRow;

  // In this order: a packing may run beside this kernel (product/pack_args.cuh).
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (index >= rows) return;  // whole teams

  typename Body::Row row;
  Held held;
  Body::row(operands, b, e, row);
  RowsInRegisters<Body, 4, Team, Teams>::template resolve_phases<0>(operands, held, row, b, e,
                                                                    rank);
  float value[Held::kVectors][4];
  float amax = 0.f;
  INGOT_UNROLL
  for (int k = 0; k < Held::kVectors; ++k) {
    if (k == Held::kVectors - 1 && !Held::inside(k, rank)) {
      INGOT_UNROLL
      for (float& v : value[k]) v = 0.f;
      continue;
    }
    const i64 at = e + Held::offset(k, rank);
    Body::template finish<4>(operands, row, b, at, held.element[k], value[k]);
  }
  INGOT_UNROLL
  for (int k = 0; k < Held::kVectors; ++k) {
    const float4 v = {value[k][0], value[k][1], value[k][2], value[k][3]};
    if (plain && Held::inside(k, rank)) {
      float* place = Body::place(operands, b, e + Held::offset(k, rank));
      __stcs(reinterpret_cast<float4*>(place), v);  // what is read next is the packed row
    }
    amax = max_magnitude(amax, v);
  }
  const i32 own = scale_exponent(row_maximum<Team>(amax), kExactTarget);
  u32* line = static_cast<u32*>(packed) + index * (Body::kRow / Vectors::kLine * 32);
  INGOT_UNROLL
  for (int k = 0; k < Held::kVectors; ++k) {
    const float4 v = {value[k][0], value[k][1], value[k][2], value[k][3]};
    Vectors::store(line, k * Team + rank, v, pow2(-own), Held::inside(k, rank));
  }
  if (rank != 0) return;
  exponent[index] = own;
  Body::finish_row(operands, row, b, e);
}

}  // namespace ingot
