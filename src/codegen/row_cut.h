// How a rows sweep is dealt to threads and blocks: which template of kernels/sweeps/ serves rows of
// some length, with which numbers.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace ingot {

// What a kernel needs to know of its rows. Values live across reductions where a later phase reads
// them: so many of each element, so many bytes of a vector of each width.
struct RowNeeds {
  int64_t elements = 1;     // of a row
  int64_t values = 1;       // live, of an element; one at least
  int64_t lane_bytes = 0;   // live, of an element
  int64_t other_bytes = 0;  // live, of a vector
  int phases = 1;
  bool one_live = true;     // value, or none
  bool small_state = true;  // one monoid, and not moments
  bool weighted = false;    // reads what has an element for each of the row's, for all rows
  bool stores = true;       // results of each element
  bool odd = false;         // no vector divides it: sweeps/odd_rows.cuh
};

enum class RowTemplate : uint8_t {
  registers,  // rows_in_registers
  looped,     // rows_looped
  waves,      // rows_in_waves
  resident,   // rows_resident
  folded,     // rows_folded
};

// Whether blocks share rows piece by piece, and meet in memory.
constexpr bool in_pieces(RowTemplate kernel) {
  return kernel == RowTemplate::waves || kernel == RowTemplate::resident ||
         kernel == RowTemplate::folded;
}

struct RowCut {
  RowTemplate kernel = RowTemplate::registers;
  int64_t team = 1, teams = 1;  // threads of a row, and rows of a block (registers)
  int64_t blocks = 1;           // that share a row (looped), or pieces of a row (in pieces)
  int64_t stay = 0;             // blocks of the whole GPU (resident, folded)
  int64_t shared_bytes = 0;
  int at_once = 0;       // blocks that a multiprocessor is to have, where that is known
  bool streams = false;  // results are written past the cache, which is to keep operands

  int threads() const { return static_cast<int>(team * teams); }
};

constexpr int64_t kBlockThreads = 256;  // of a block of several teams
constexpr int64_t kWarp = 32;
constexpr int64_t kMostTeamThreads = 512;  // of a team that grows for the sake of kHeldTarget
constexpr int64_t kHeldTarget = 16;        // values held by a thread, as teams grow
constexpr int64_t kHeldLimit = 32;         // with 1024 threads, of 64 registers each

// Threads for a row, from so many on, each of which holds so many of its values; more than
// kMostTeamThreads where rows are too long for that many.
int64_t team_for(const RowNeeds& row, int64_t from, int width);
int64_t held_by_thread(const RowNeeds& row, int64_t team, int width);

RowCut cut_row(const RowNeeds& row, int width, const Target& target);
// The variant of another width beside one that is cut so: both in pieces, or neither.
RowCut cut_beside(const RowCut& other, const RowNeeds& row, int width, const Target& target);

// Rows of more elements are never held in registers.
constexpr int64_t kMostHeldRow = kHeldLimit * 2 * kMostTeamThreads;

}  // namespace ingot
