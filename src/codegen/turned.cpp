#include "codegen/turned.h"

#include <algorithm>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

// Half a sector of floats that lie turned, whole lines of what lies row by row: measured, 8 rows
// take 1.2 to 2.2 times as long, 16 rows 1.9 to 2.6 times. Where most of a sweep's bytes lie
// turned, a sector of them: 8 rows take 0.72 to 0.91 of the time of 4 rows, 16 rows no less.
constexpr int64_t kRowsOfAWarp = 4, kRowsOfMostlyTurned = 8;
constexpr int64_t kMostWarps = 16;  // of a row: with 1024 threads it has too few registers
// Values held by a thread: as teams grow; of two blocks of so many warps in a multiprocessor; of
// one.
constexpr int64_t kHeldGrowing = 16, kHeldOfTwo = 24, kHeldOfOne = 48;
constexpr int64_t kMostStateBytes = 32768;  // of the 48 KB of static shared memory

// Rows behind one another that lie side by side in memory.
int64_t rows_beside(const KernelSource& source, const Shape& space, const OperandLayout& layout,
                    int64_t batch) {
  int64_t count = 1;
  for (const Axis axis : {kGroups, kRows, kBatch}) {
    const int64_t extent = space.extent(axis, batch);
    if ((source.row_axes & axis_bit(axis)) || extent == 1) continue;
    if (layout.strides[axis] != count) break;
    count *= extent;
  }
  return count;
}

// Of so many rows a warp, as turned_block(); nothing where a thread would hold more than `most`.
std::optional<TurnedBlock> block_of(int64_t rows, int64_t most, int64_t vectors,
                                    int64_t held_of_vector, int64_t state_bytes) {
  TurnedBlock block{rows};
  const auto held = [&] { return (vectors + block.team() - 1) / block.team() * held_of_vector; };
  while (block.warps < kMostWarps && held() > kHeldGrowing) block.warps *= 2;
  if (held() > most) return {};
  if (block.warps == kMostWarps) block.at_once = held() <= kHeldOfTwo ? 2 : 1;
  block.fill();
  if (block.warps * block.groups * block.rows * state_bytes > kMostStateBytes) return {};
  return block;
}

}  // namespace

bool moves_vectors(const KernelOperand& operand, const KernelEntry& entry,
                   const OperandLayout& layout, int64_t batch) {
  if (layout.strides[kFeatures] != 1) return false;
  const int64_t unit = std::min<int64_t>(16, entry.width * operand.bytes);
  std::array<int64_t, kAxes> expected{};  // modulo a vector
  if (entry.odd) expected = dense_strides(operand.seen);
  if (entry.across_rows) {
    expected = dense_strides(operand.seen);
    for (const Axis axis : {kRows, kGroups}) {
      const bool counts = operand.seen.extent(axis, 1) > 1;
      if (counts && layout.strides[axis] != expected[axis]) return false;
    }
    expected[kBatch] = 0;
  }
  uintptr_t bits = layout.low_bits;
  for (const Axis axis : {kBatch, kRows, kGroups}) {
    if (axis == kBatch && batch == 1) continue;
    bits |= static_cast<uintptr_t>((layout.strides[axis] - expected[axis]) * operand.bytes);
  }
  return entry.width == 1 || bits % static_cast<uintptr_t>(unit) == 0;
}

std::optional<TurnedOperands> turned_operands(const Plan& plan, const KernelSource& source,
                                              std::span<const OperandLayout> layouts,
                                              int64_t batch) {
  if (source.row_axes == 0) return {};
  const Shape& space = plan.sweeps[static_cast<size_t>(source.sweep)].space;
  if (space.static_elements() >= kElementsByI32) return {};
  const auto in_rows = std::find_if(source.entries.begin(), source.entries.end(),
                                    [](const KernelEntry& entry) { return !entry.across_rows; });
  TurnedOperands turned;
  int64_t apart = 0, beside = 0;  // bytes of an element
  for (size_t i = 0; i < layouts.size(); ++i) {
    const KernelOperand& operand = source.operands[i];
    const OperandLayout& layout = layouts[i];
    if (!operand.vector) continue;
    if (moves_vectors(operand, *in_rows, layout, batch)) {
      if (operand.seen.static_elements() == space.static_elements()) beside += operand.bytes;
      continue;
    }
    turned.apart.insert({operand.value, operand.written});
    if (layout.strides[kFeatures] == 1) continue;
    if (rows_beside(source, space, layout, batch) < kRowsOfASector) continue;
    apart += operand.bytes;
    turned.least_bytes = turned.least_bytes == 0
                             ? operand.bytes
                             : std::min<int64_t>(turned.least_bytes, operand.bytes);
  }
  if (turned.least_bytes == 0) return {};
  turned.are_most = apart > beside;
  return turned;
}

std::optional<TurnedBlock> turned_block(int64_t vectors, int64_t held_of_vector,
                                        int64_t state_bytes, bool are_most) {
  std::optional<TurnedBlock> block;
  if (are_most) {
    block = block_of(kRowsOfMostlyTurned, kHeldOfTwo, vectors, held_of_vector, state_bytes);
  }
  return block ? block : block_of(kRowsOfAWarp, kHeldOfOne, vectors, held_of_vector, state_bytes);
}

std::optional<KernelSource> generate_turned(const Plan& plan, const KernelSource& source,
                                            const TurnedOperands& operands) {
  if (source.entries.front().role == KernelRole::map) {
    return write_map_turned(plan, source.sweep, operands);
  }
  return write_rows_turned(plan, source.sweep, operands);
}

}  // namespace ingot
