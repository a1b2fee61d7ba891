#include "codegen/row_cut.h"

#include <algorithm>
#include <optional>

#include "sweeps/waves.cuh"

namespace ingot {
namespace {

constexpr int64_t kLoopedThreads = 512, kSmallLoopThreads = 256;
constexpr int64_t kLine = 128;  // bytes; half of them where elements are read one by one
// Of a row that loops, of one of the blocks that share it; twice as many where none are live.
constexpr int64_t kBlockElements = int64_t{5} << 12;
constexpr int64_t kMostBlocks = 8;
// Of a multiprocessor's shared memory, what the blocks of looping rows that are there at once do
// not keep values in: the system's, and their states.
constexpr int64_t kMultiprocessorBytes = int64_t{228} << 10, kNotKeptBytes = 1024 + 2048;
// Rows of so many elements stay in all multiprocessors' shared memory where they fit (of half a
// megabyte faster by a seventh, of a quarter no faster). Where a cluster keeps less than this part,
// others are done in waves (8 MB were faster by a fifth, 1.5 MB slower by a tenth), or by large
// blocks where small ones would.
constexpr int64_t kLeastResident = int64_t{1} << 17, kLeastKept = 4;
// With weights of so many elements at most: more are not in the L2 cache any longer when the next
// row reads them, and it is faster to have only these there (16 rows of 16 MB: by a tenth).
constexpr int64_t kMostWeights = int64_t{1} << 20;
// Threads of a piece in waves, of which three blocks or two fit, and of one that stays: few, each
// with many vectors, since merging their states takes as many instructions as folding does.
constexpr int64_t kWaveThreads = 512, kResidentThreads = 256;
// Rows of so many elements of which nothing is wanted but their states are folded piece by piece
// (log-sum-exp of 1024 rows of 1.5 MB 1.00 of its bytes' time, looping 1.08; 2 of 16 MB 1.6, 5; of
// 128256 numbers 1.15 and 1.51, of 65536 1.26 and 1.32, where the largest lies 1.09 and 1.05; of
// 128256 in bf16 1.95 and 1.26).
constexpr int64_t kLeastFolded = int64_t{3} << 15, kLeastFoldedOf16Bits = int64_t{1} << 17;
constexpr int kFoldingBlocks = 3;  // on a multiprocessor: a thread loads eight vectors, or sixteen
// Blocks that stay on a multiprocessor; what each takes of its shared memory for a list of a row's
// pieces, and how many those may be.
constexpr int kResidentBlocks = 2, kResidentBlocksOf16Bits = 3;
constexpr int64_t kQueueBytes = 4096, kMostPieces = kQueueBytes / 4 - 1;

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

bool has_live(const RowNeeds& row) {
  return row.lane_bytes + row.other_bytes > 0;
}

// Bytes that all vectors of a looping row's block ask for, those of one vector of each thread, and
// how many vectors there is room for.
int64_t vectors_of(const RowNeeds& row, const RowCut& cut, int width) {
  const int64_t span = cut.blocks * cut.team * width;
  return (row.elements + span - 1) / span;
}
int64_t vector_bytes(const RowNeeds& row, const RowCut& cut, int width) {
  return cut.team * (row.lane_bytes * width + row.other_bytes);
}
int64_t room_for(const RowNeeds& row, const RowCut& cut, int width, const Target& target) {
  const int64_t bytes = vector_bytes(row, cut, width);
  const int64_t most =
      std::min<int64_t>(kMultiprocessorBytes / cut.at_once - kNotKeptBytes, target.shared_bytes);
  // The kernel keeps vectors that it reads together, two, four or eight, or none of them.
  const int64_t room = bytes > 0 ? most / bytes : 0;
  return room > 8 && room < vectors_of(row, cut, width) ? room / 4 * 4 : room;
}
void keep(RowCut& cut, const RowNeeds& row, int width, const Target& target) {
  const int64_t vectors = vectors_of(row, cut, width), room = room_for(row, cut, width, target);
  cut.streams = room < vectors;
  cut.shared_bytes = std::min(vectors, room) * vector_bytes(row, cut, width);
}

// How rows loop, by measurement (docs/kernel-log.md): a multiprocessor is to have many blocks, so
// that some write results while others read, as far as registers suffice.
RowCut cut_looped(const RowNeeds& row, int width, const Target& target) {
  RowCut cut;
  cut.kernel = RowTemplate::looped;
  const bool small = row.small_state && row.phases <= 1;
  const bool heavy = row.weighted && row.phases > 1;  // in registers
  const bool in_halves = width == 8 && !has_live(row);
  const int64_t elements = in_halves ? 2 * kBlockElements : kBlockElements;
  while (cut.blocks < kMostBlocks && cut.blocks * elements < row.elements) cut.blocks *= 2;
  if (width == 8 || heavy || (!has_live(row) && !small)) {
    // Of 16-bit rows and large states, whose threads wait for one another longer than for memory.
    cut.team = kSmallLoopThreads;
    cut.at_once = small ? 6 : heavy ? 3 : has_live(row) && !row.weighted ? 5 : 4;
    if (!has_live(row)) return cut;
    keep(cut, row, width, target);
    const int64_t live = vectors_of(row, cut, width) * vector_bytes(row, cut, width);
    if (live <= kLeastKept * cut.shared_bytes) return cut;
  }
  cut.team = kLoopedThreads;
  cut.at_once = heavy ? 1 : row.one_live && (row.small_state || !row.weighted) ? 3 : 2;
  keep(cut, row, width, target);
  if (!cut.streams) return cut;
  // What is read again wants fewer blocks, each of which keeps more. Two phases of vectors of eight
  // take the registers of two blocks.
  cut.at_once = heavy || (row.phases > 1 && width > 4) ? 1 : 2;
  keep(cut, row, width, target);
  cut.streams = true;
  return cut;
}

// The largest teams, of rows of which nothing need be held, or several 16-bit values each.
bool loops_faster(const RowNeeds& row, int64_t team, int width) {
  return team > kMostTeamThreads && (!has_live(row) || (width == 8 && row.values > 1));
}

RowCut cut_in_waves(const RowNeeds& row, int width) {
  RowCut cut;
  cut.kernel = RowTemplate::waves;
  cut.team = kWaveThreads;
  cut.blocks = wave_pieces(row.elements, width);
  // Threads hold a piece for each stage.
  cut.at_once = row.phases > 1 ? 1 : row.one_live && width <= 4 ? 3 : 2;
  cut.streams = true;
  return cut;
}

// Pieces of rows, drawn by so many blocks of each multiprocessor, which stay.
RowCut cut_by_drawing(RowTemplate kernel, const RowNeeds& row, int width, int at_once,
                      const Target& target) {
  RowCut cut;
  cut.kernel = kernel;
  cut.team = kResidentThreads;
  cut.blocks = wave_pieces(row.elements, width);
  cut.at_once = at_once;
  cut.stay = at_once * target.units;
  cut.streams = true;
  return cut;
}

// Rows that the whole GPU keeps: all of one row's pieces, and one more that each block has drawn.
std::optional<RowCut> cut_resident(const RowNeeds& row, int width, const Target& target) {
  if (row.phases != 1 || !has_live(row) || row.odd) return {};
  if (row.weighted && row.elements > kMostWeights) return {};
  const bool halves = row.lane_bytes == 2 && row.other_bytes == 0;
  RowCut cut = cut_by_drawing(RowTemplate::resident, row, width,
                              halves ? kResidentBlocksOf16Bits : kResidentBlocks, target);
  const int64_t piece = wave_piece(width) / (cut.team * width) * vector_bytes(row, cut, width);
  const int64_t bytes = std::min<int64_t>(
      kMultiprocessorBytes / cut.at_once - kNotKeptBytes - kQueueBytes, target.shared_bytes);
  cut.shared_bytes = bytes / piece * piece;
  const bool fits = cut.blocks + cut.stay <= cut.shared_bytes / piece * cut.stay;
  if (!fits || cut.blocks > kMostPieces) return {};
  return cut;
}

RowCut cut_folded(const RowNeeds& row, int width, const Target& target) {
  return cut_by_drawing(RowTemplate::folded, row, width, kFoldingBlocks, target);
}

RowCut cut_in_pieces(const RowNeeds& row, int width, const Target& target) {
  return cut_resident(row, width, target).value_or(cut_in_waves(row, width));
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

RowCut cut_row(const RowNeeds& row, int width, const Target& target) {
  RowCut cut;
  cut.team = team_for(row, lanes_of_lines(row.elements / width, width), width);
  if (held_by_thread(row, cut.team, width) <= kHeldLimit && !loops_faster(row, cut.team, width)) {
    cut.teams = std::max<int64_t>(kBlockThreads / cut.team, 1);
    return cut;
  }
  const int64_t least_folded = width == 8 ? kLeastFoldedOf16Bits : kLeastFolded;
  if (!row.stores && row.phases == 1 && !row.odd && row.elements >= least_folded) {
    return cut_folded(row, width, target);
  }
  const RowCut looped = cut_looped(row, width, target);
  const int64_t live = vectors_of(row, looped, width) * vector_bytes(row, looped, width);
  if (looped.shared_bytes == 0) return looped;
  if (row.elements >= kLeastResident) {
    if (const auto resident = cut_resident(row, width, target)) return *resident;
  }
  return live > kLeastKept * looped.shared_bytes ? cut_in_waves(row, width) : looped;
}

RowCut cut_beside(const RowCut& other, const RowNeeds& row, int width, const Target& target) {
  if (other.kernel == RowTemplate::folded) return cut_folded(row, width, target);
  if (in_pieces(other.kernel)) return cut_in_pieces(row, width, target);
  const RowCut own = cut_row(row, width, target);
  return in_pieces(own.kernel) ? cut_looped(row, width, target) : own;
}

}  // namespace ingot
