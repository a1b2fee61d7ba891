// How rows_in_waves.cuh cuts its work, for host and device: plain C++, shared by the run time and
// by standalone files.
#pragma once

#include "common/types.cuh"

namespace ingot {

// Vectors of a piece that a thread holds.
INGOT_HD constexpr int wave_vectors(int width) {
  return width >= 8 ? 2 : width >= 4 ? 4 : 8;
}
INGOT_HD constexpr i64 wave_pieces(i64 row, int width, int threads) {
  const i64 piece = static_cast<i64>(width) * threads * wave_vectors(width);
  return (row + piece - 1) / piece;
}

// Pieces between two stages of one: all of a row's, and of those that are under way on a large GPU
// about half, at which fewer blocks wait than miss the cache.
INGOT_HD constexpr i64 wave_lag(i64 pieces) {
  constexpr i64 kUnderWay = 160;
  return pieces + kUnderWay;
}

// Blocks. The first and the last have no piece for some stage.
INGOT_HD constexpr i64 wave_tasks(i64 rows, i64 pieces, int phases) {
  return rows * pieces + phases * wave_lag(pieces);
}

// The ticket and the flags, behind which states begin.
INGOT_HD constexpr i64 wave_counters(i64 rows, int phases) {
  return 1 + rows * phases;
}
INGOT_HD constexpr i64 wave_counter_bytes(i64 rows, int phases) {
  return (4 * wave_counters(rows, phases) + 15) / 16 * 16;
}
// All of the memory. state: bytes of a state of all phases together, each rounded up to eight.
INGOT_HD constexpr i64 wave_bytes(i64 rows, i64 pieces, int phases, i64 state) {
  const i64 padding = 4 * state;  // arrays begin on multiples of 16
  return wave_counter_bytes(rows, phases) + rows * (pieces + 1) * state + padding;
}

}  // namespace ingot
