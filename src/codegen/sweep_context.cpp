#include "codegen/sweep_context.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace ingot {

std::string position(std::string index, int64_t inner, int64_t extent, int64_t outer) {
  if (inner > 1) index += fmt::format(" / {}", inner);
  if (outer > 1) index += fmt::format(" % {}", extent);
  return index;
}

SweepContext::SweepContext(const Plan& plan, int sweep)
    : plan_(plan), sweep_(plan.sweeps[static_cast<size_t>(sweep)]), functions_(plan) {
  for (const auto* part : {&sweep_.body, &sweep_.statistics, &sweep_.tail}) {
    computed_.insert(part->begin(), part->end());
  }
}

ValueId SweepContext::resolve(ValueId value) const {
  while (node(value).kind == NodeKind::view && computes(value)) value = node(value).args[0];
  return value;
}

const Shape& SweepContext::seen(ValueId value) const {
  static const Shape scalar;
  if (is_constant(value)) return scalar;
  const auto found = sweep_.shapes.find(value);
  if (found == sweep_.shapes.end()) {
    throw std::logic_error(
        fmt::format("sweep {}: value {} has no shape in it", sweep_.name, value));
  }
  return found->second;
}

DType SweepContext::dtype_in_memory(ValueId value) const {
  return ingot::dtype_in_memory(plan_, value);
}

std::string SweepContext::name_of(ValueId value) const {
  const Node& n = node(value);
  std::string what;
  switch (n.kind) {
    case NodeKind::leaf:
      what = identifier(n.name);
      break;
    case NodeKind::pointwise:
      what = std::string(ingot::name_of(n.op));
      break;
    case NodeKind::reduce:
      what = std::string(ingot::name_of(n.finish));
      break;
    case NodeKind::matmul:
      what = "product";
      break;
    case NodeKind::view:
      what = "view";
      break;
    case NodeKind::scan:
      what = "cumsum";
      break;
    case NodeKind::constant:
      what = "constant";
      break;
  }
  return fmt::format("v{}_{}", value, what);
}

std::string SweepContext::operand(ValueId value, bool written, bool vector) {
  const auto [found, inserted] = index_.try_emplace({value, written}, operands_.size());
  if (inserted)
    operands_.push_back(
        {value, written, false, static_cast<int>(size_of(dtype_in_memory(value))), seen(value)});
  KernelOperand& operand = operands_[found->second];
  operand.vector = operand.vector || (vector && !is_apart(value, written));
  return name_of(value) + (written ? "_out" : "");
}

std::string SweepContext::monoid(const SharedState& state, const std::string& value_type) const {
  const auto is_rounded = [this](ValueId value) {
    return node(value).finish == Finish::max_exponent || functions_.is_rounded(value);
  };
  const bool coarse = state.monoid == MonoidKind::log_sum_exp && value_type == "float" &&
                      std::all_of(state.finishes.begin(), state.finishes.end(), is_rounded);
  return coarse ? "LogSumExp<float, true>" : monoid_type(state.monoid, value_type);
}

std::string SweepContext::held_as_read(ValueId value) const {
  return fmt::format("widen(held.{}.lanes[i])", name_of(value));
}

std::string SweepContext::operands_struct() const {
  std::string text = "  struct Operands {\n";
  for (const KernelOperand& operand : operands_) {
    text += fmt::format("    Tensor {}{};  // {} {}\n", name_of(operand.value),
                        operand.written ? "_out" : "", storage_type(dtype_in_memory(operand.value)),
                        to_string(operand.seen));
  }
  // An empty struct would be a kernel parameter of no size.
  if (operands_.empty()) text += "    Tensor none;\n";
  return text + "  };\n";
}

void SweepContext::turn(Apart apart, AxisMask row) {
  apart_ = std::move(apart);
  index_in_rows(row);
}

void SweepContext::index_in_rows(AxisMask row) {
  index_type_ = "InRow";
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    // Along the axes of its own part: those of a row, or the others.
    const bool inside = (row & axis_bit(axis)) != 0;
    int64_t inner = 1, outer = 1;
    for (const Axis other : {kRows, kGroups, kFeatures}) {
      if (((row & axis_bit(other)) != 0) != inside) continue;
      if (other > axis) inner *= space().extent(other, 1);
      if (other < axis) outer *= space().extent(other, 1);
    }
    coordinates_[axis] =
        position(inside ? "e.column" : "e.row", inner, space().extent(axis, 1), outer);
  }
}

void SweepContext::index_in_pieces() {
  index_type_ = "InPiece";
  address_vectors();
  const Shape& all = space();
  const int64_t inner = all.features, middle = inner * all.groups;
  coordinates_[kFeatures] =
      fmt::format("(i64{{{}}} + e.offset)", position("e.first", 1, inner, all.rows * all.groups));
  coordinates_[kGroups] = position("e.first", inner, all.groups, all.rows);
  coordinates_[kRows] = position("e.first", middle, all.rows, 1);
}

void SweepContext::index_in_32_bits() {
  index_type_ = "u32";
  coordinates_.clear();
}

int SweepContext::widest() const {
  for (const auto* part : {&sweep_.loads, &sweep_.stores}) {
    for (const ValueId value : *part) {
      const auto found = sweep_.shapes.find(value);
      if (found == sweep_.shapes.end() || found->second.features == 1) continue;
      if (found->second.batched && size_of(dtype_in_memory(value)) == 2) return 8;
    }
  }
  return 4;
}

int SweepContext::widest_of(int64_t elements) const {
  int width = widest();
  while (width > 1 && elements % width != 0) width /= 2;
  return width;
}

int SweepContext::width() const {
  return widest_of(space().features);
}

bool SweepContext::counts(ValueId value) const {
  // Split into groups, positions begin anew in none of them: they are read.
  const int64_t counted = node(value).shape.features;
  const bool by_features = counted == seen(value).features && counted == space().features;
  return node(value).positions && !computes(value) && by_features;
}

bool SweepContext::lies_otherwise(ValueId value) const {
  const auto found = sweep_.shapes.find(value);
  return found != sweep_.shapes.end() && found->second.features > 1 && found->second != space();
}

int SweepContext::odd_width(int64_t row) const {
  constexpr int64_t kMost = int64_t{1} << 31;
  const bool by_rows = row == space().features && row < kMost;
  const auto otherwise = [this](ValueId value) { return lies_otherwise(value); };
  if (!by_rows || std::any_of(sweep_.stores.begin(), sweep_.stores.end(), otherwise)) return 0;
  return width() < widest() ? widest() : 0;
}

bool SweepContext::has_lanes(ValueId value) const {
  const Shape& shape = seen(value);
  return shape.features > 1 || (across_rows_ && shape.rows * shape.groups > 1);
}

int SweepContext::width_across_rows() const {
  const Shape& space = this->space();
  const int64_t elements = space.static_elements();
  if (space.rows * space.groups == 1 || elements >= int64_t{1} << 31) return 0;
  const auto like_space = [&](ValueId value) {
    const Shape& shape = seen(value);
    return std::tie(shape.rows, shape.groups, shape.features) ==
           std::tie(space.rows, space.groups, space.features);
  };
  const auto fits = [&](ValueId value) {
    // What has no shape here is an operand of the product before the sweep.
    if (is_constant(value) || !sweep_.shapes.contains(value)) return true;
    return seen(value).features == 1 || (like_space(value) && !counts(value));
  };
  if (!std::all_of(sweep_.loads.begin(), sweep_.loads.end(), fits)) return 0;
  if (!std::all_of(sweep_.stores.begin(), sweep_.stores.end(), like_space)) return 0;
  const int width = widest_of(elements);
  return width > this->width() ? width : 0;
}

}  // namespace ingot
