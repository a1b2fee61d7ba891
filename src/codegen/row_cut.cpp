#include "codegen/row_cut.h"

#include <algorithm>

#include "sweeps/waves.cuh"

namespace ingot {
namespace {

constexpr int64_t kLoopedThreads = 512, kWaveThreads = 512;
constexpr int64_t kLine = 128;  // bytes; half of them where elements are read one by one
// Of a row that loops, of one of the blocks that share it.
constexpr int64_t kBlockElements = int64_t{5} << 12;
constexpr int64_t kMostBlocks = 8;
// Of a multiprocessor's shared memory, what the blocks of looping rows that are there at once do
// not keep values in: the system's, and their states.
constexpr int64_t kMultiprocessorBytes = int64_t{228} << 10, kNotKeptBytes = 1024 + 2048;
// Rows of which a cluster keeps less than this part are done in waves: 8 MB were faster by a fifth
// in waves, 1.5 MB slower by a tenth.
constexpr int64_t kLeastKept = 4;

// The fewest lanes whose vectors, side by side, fill whole lines of memory: a warp that reads
// pieces of many lines takes as many turns. Not where a row would leave over a quarter of them
// idle. (A whole warp for 77 single elements took 1.5 times as long as half of one.)
int64_t lanes_of_lines(int64_t vectors, int width) {
  const int64_t vector_bytes = std::min(4 * width, 16), line = width == 1 ? kLine / 2 : kLine;
  int64_t lanes = 1;
  while (lanes * vector_bytes < line) {
    const int64_t next = 2 * lanes, slots = (vectors + next - 1) / next * next;
    if (4 * slots > 5 * vectors) break;
    lanes = next;
  }
  return lanes;
}

// Blocks of a looping row that a multiprocessor is to have, so that some write results while
// others read, as far as registers suffice. Two of rows that are kept took 3 to 6% longer,
// measured, though each keeps more; three of rows that are read again, 4%. Two phases of vectors of
// eight take the registers of two blocks.
int at_once(const RowNeeds& row, int width, bool kept) {
  if (row.phases > 1 && width > 4) return 1;
  return kept && row.one_live && row.small_state ? 3 : 2;
}

// Vectors of each thread of a looping row's blocks, and how many there is room for in shared
// memory.
int64_t vectors_of(const RowNeeds& row, int64_t blocks, int width) {
  const int64_t span = blocks * kLoopedThreads * width;
  return (row.elements + span - 1) / span;
}
int64_t vector_bytes(const RowNeeds& row, int width) {
  return kLoopedThreads * (row.lane_bytes * width + row.other_bytes);
}
int64_t room_for(const RowNeeds& row, int width, int blocks_at_once, const Target& target) {
  const int64_t bytes = vector_bytes(row, width);
  const int64_t most =
      std::min<int64_t>(kMultiprocessorBytes / blocks_at_once - kNotKeptBytes, target.shared_bytes);
  return bytes > 0 ? most / bytes : 0;
}

RowCut cut_looped(const RowNeeds& row, int width, const Target& target) {
  RowCut cut;
  cut.kernel = RowTemplate::looped;
  cut.team = kLoopedThreads;
  while (cut.blocks < kMostBlocks && cut.blocks * kBlockElements < row.elements) cut.blocks *= 2;
  const int64_t bytes = vector_bytes(row, width), vectors = vectors_of(row, cut.blocks, width);
  cut.at_once = at_once(row, width, true);
  if (bytes == 0) return cut;
  int64_t kept = room_for(row, width, cut.at_once, target);
  if (kept < vectors) {
    cut.streams = true;
    cut.at_once = at_once(row, width, false);
    kept = room_for(row, width, cut.at_once, target);
    // The kernel keeps vectors that it reads together, four or eight, or none of them.
    if (kept > 8) kept = kept / 4 * 4;
  }
  cut.shared_bytes = std::min(vectors, kept) * bytes;
  return cut;
}

}  // namespace

int64_t held_by_thread(const RowNeeds& row, int64_t team, int width) {
  const int64_t vectors = row.elements / width;
  return (vectors + team - 1) / team * width * row.values;
}

// A warp may hold as many as there is room for: beyond it a team has barriers to meet at, and 64
// threads a row left a multiprocessor waiting for the next block. Vectors of eight are half as many
// loads.
int64_t team_for(const RowNeeds& row, int64_t from, int width) {
  int64_t team = from;
  const auto most = [&] { return team == kWarp || width == 8 ? kHeldLimit : kHeldTarget; };
  while (team < kMostTeamThreads && held_by_thread(row, team, width) > most()) team *= 2;
  return held_by_thread(row, team, width) > kHeldLimit ? 2 * kMostTeamThreads : team;
}

RowCut cut_in_waves(const RowNeeds& row, int width) {
  RowCut cut;
  cut.kernel = RowTemplate::waves;
  cut.team = kWaveThreads;
  cut.blocks = wave_pieces(row.elements, width, kWaveThreads);
  // Threads hold a piece for each stage.
  cut.at_once = row.phases > 1 ? 1 : row.one_live && width <= 4 ? 3 : 2;
  cut.streams = true;
  return cut;
}

RowCut cut_row(const RowNeeds& row, int width, const Target& target) {
  RowCut cut;
  cut.team = team_for(row, lanes_of_lines(row.elements / width, width), width);
  if (held_by_thread(row, cut.team, width) <= kHeldLimit) {
    cut.teams = std::max<int64_t>(kBlockThreads / cut.team, 1);
    return cut;
  }
  const RowCut looped = cut_looped(row, width, target);
  const int64_t live = vectors_of(row, looped.blocks, width) * vector_bytes(row, width);
  const bool mostly_read_again = looped.shared_bytes > 0 && live > kLeastKept * looped.shared_bytes;
  return mostly_read_again ? cut_in_waves(row, width) : looped;
}

}  // namespace ingot
