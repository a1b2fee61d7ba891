#include "standalone/binding.h"

#include <algorithm>

#include "codegen/type_names.h"
#include "support/error.h"

namespace ingot::standalone {
namespace {

const Node& operand_node(const Plan& plan, const Sweep& sweep, int operand) {
  return plan.graph[plan.graph[sweep.matmul].args[static_cast<size_t>(operand)]];
}

}  // namespace

Binding::Binding(const Request& request) : request_(request), leaves_(plan().graph.leaves()) {
  buffer_names_.resize(plan().buffers.size());
  for (size_t i = 0; i < buffer_names_.size(); ++i) buffer_names_[i] = fmt::format("buffer{}", i);
  for (size_t value = 0; value < plan().placements.size(); ++value) {
    const Placement& placement = plan().placements[value];
    if (placement.kind != Placement::Kind::workspace) continue;
    const std::string name = identifier(plan().graph.nodes[value].name);
    buffer_names_[static_cast<size_t>(placement.index)] =
        fmt::format("v{}{}{}", value, name.empty() ? "" : "_", name);
  }
}

std::optional<ValueId> Binding::leaf_of(ValueId value) const {
  const Placement& placement = plan().placements[static_cast<size_t>(value)];
  if (placement.kind == Placement::Kind::leaf) return value;
  if (placement.kind == Placement::Kind::update) {
    return plan().graph.updates[static_cast<size_t>(placement.index)].buffer;
  }
  return std::nullopt;
}

std::string Binding::address(ValueId value) const {
  if (const std::optional<ValueId> leaf = leaf_of(value)) {
    const auto at = std::lower_bound(leaves_.begin(), leaves_.end(), *leaf);
    return fmt::format("tensors[{}]", at - leaves_.begin());
  }
  const Placement& placement = plan().placements[static_cast<size_t>(value)];
  if (placement.kind == Placement::Kind::result) {
    return fmt::format("tensors[{}]", leaves_.size() + static_cast<size_t>(placement.index));
  }
  if (placement.kind != Placement::Kind::workspace) {
    throw std::logic_error("a sweep reads a value that is nowhere");
  }
  return "workspace + " + buffer_name(placement.index);
}

std::array<int64_t, kAxes> Binding::strides(ValueId value, const Shape& seen) const {
  const std::optional<ValueId> leaf = leaf_of(value);
  if (leaf && !request_.leaf_strides.empty()) {
    const auto at = std::lower_bound(leaves_.begin(), leaves_.end(), *leaf);
    const auto& given = request_.leaf_strides[static_cast<size_t>(at - leaves_.begin())];
    const Shape& own = plan().graph[*leaf].shape;
    const std::array<int64_t, kAxes> dense = dense_strides(own);
    for (int axis = 0; axis < kAxes; ++axis) {
      const bool varies = own.extent(static_cast<Axis>(axis), 2) > 1;
      const auto i = static_cast<size_t>(axis);
      if (varies && given[i] != dense[i]) return strides_in(own, given, seen);
    }
  }
  return dense_strides(seen);
}

ValueId Binding::matrix_value(const Sweep& sweep, int operand) const {
  return product_operand(plan().graph, sweep, operand);
}

MatrixStrides Binding::matrix(const Sweep& sweep, int operand) const {
  const Shape& shape = operand_node(plan(), sweep, operand).shape;
  const std::array<int64_t, kAxes> own = strides(matrix_value(sweep, operand), shape);
  const bool k_last = operand == 0 || plan().graph[sweep.matmul].transpose_b;
  const int64_t rows = k_last ? shape.rows : shape.features;
  const int64_t k = k_last ? shape.features : shape.rows;
  MatrixStrides result = {own[k_last ? kRows : kFeatures], own[k_last ? kFeatures : kRows]};
  if (k == 1) result.k_stride = 1;
  if (rows == 1) result.row_stride = shape.batched ? own[kBatch] : k * result.k_stride;
  if (shape.batched && rows > 1 && own[kBatch] != rows * result.row_stride) {
    fail(INGOT_UNSUPPORTED,
         "a standalone file cannot hold the product of {}: its operand has gaps between samples",
         sweep.name);
  }
  return result;
}

bool Binding::admits(const KernelSource& source, const KernelEntry& entry, bool single) const {
  if (entry.width == 1) return true;
  const std::vector<OperandLayout> all = layouts(source);
  for (size_t i = 0; i < all.size(); ++i) {
    const KernelOperand& operand = source.operands[i];
    if (operand.vector && !moves_vectors(operand, entry, all[i], single ? 1 : kMany)) {
      return false;
    }
  }
  return true;
}

std::vector<OperandLayout> Binding::layouts(const KernelSource& source) const {
  std::vector<OperandLayout> result;
  for (const KernelOperand& operand : source.operands) {
    result.push_back({strides(operand.value, operand.seen), 0});
  }
  return result;
}

}  // namespace ingot::standalone
