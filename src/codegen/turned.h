// Sweeps of which operands lie turned: features apart, rows side by side. What lies how is known
// only when a call's tensors are, so that kernels for it are written then.
#pragma once

#include <array>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "codegen/kernel_source.h"

namespace ingot {

// How an operand of a kernel lies: strides in elements, over the sweep's axes, and its address
// modulo 16.
struct OperandLayout {
  std::array<int64_t, kAxes> strides{};
  uintptr_t low_bits = 0;
};

// Whether a kernel can move its features as many at a time as it does.
bool moves_vectors(const KernelOperand& operand, const KernelEntry& entry,
                   const OperandLayout& layout, int64_t batch);

// Operands that are moved element by element: values, and whether they are written.
struct TurnedOperands {
  std::set<std::pair<ValueId, bool>> apart;
  int64_t least_bytes = 0;  // of an element of those that lie turned
  bool are_most = false;    // of the bytes that the sweep moves

  auto operator<=>(const TurnedOperands&) const = default;
};
// Where a kernel of rows (of generate_sweep()) would read a sector of memory for each element of
// some operand, since rows lie side by side in it: that one, and what else moves no vectors.
std::optional<TurnedOperands> turned_operands(const Plan& plan, const KernelSource& source,
                                              std::span<const OperandLayout> layouts,
                                              int64_t batch);
// The same sweep as one kernel that moves whole sectors of these operands as well. Nothing where
// rows are too long to be held.
std::optional<KernelSource> generate_turned(const Plan& plan, const KernelSource& source,
                                            const TurnedOperands& operands);

}  // namespace ingot
