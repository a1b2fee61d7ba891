// How rows_in_waves.cuh and rows_resident.cuh cut their work, for host and device: plain C++,
// shared by the run time and by standalone files.
#pragma once

#include "common/types.cuh"

namespace ingot {

// Elements of a piece. Of single ones a thread would hold too many.
INGOT_HD constexpr i64 wave_piece(int width) {
  return width > 1 ? 8192 : 4096;
}
INGOT_HD constexpr i64 wave_pieces(i64 row, int width) {
  return (row + wave_piece(width) - 1) / wave_piece(width);
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

// The ticket, and how many pieces of each row and phase have come. States begin behind them.
INGOT_HD constexpr i64 wave_counter_bytes(i64 rows, int phases) {
  return (4 * (1 + rows * phases) + 15) / 16 * 16;
}
// All of the memory, which is zero at the beginning. state: bytes of a state of all phases
// together, each rounded up to eight; they lie in words of twice the size (row_pieces.cuh).
INGOT_HD constexpr i64 wave_bytes(i64 rows, i64 pieces, int phases, i64 state) {
  return wave_counter_bytes(rows, phases) + (rows * (pieces + 1) * 2 * state + 15) / 16 * 16;
}
// Blocks that set it to zero.
inline constexpr i64 kWaveBeginBlocks = 64;

}  // namespace ingot
