// Over which axes the reductions of a sweep run, and whether those make rows.
#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

// The axes that all reductions of the sweep run over, if these are the same.
std::optional<AxisMask> common_axes(const Plan& plan, const Sweep& s) {
  std::optional<AxisMask> common;
  for (const ValueId reduction : reductions_of(plan.graph, s)) {
    const auto inside =
        static_cast<AxisMask>(s.space.static_axes() & reduced_axes(plan.graph, s, reduction));
    if (common && *common != inside) return std::nullopt;
    common = inside;
  }
  return common == AxisMask{0} ? std::nullopt : common;
}

}  // namespace

std::vector<ValueId> reductions_of(const Graph& graph, const Sweep& sweep) {
  std::vector<ValueId> result;
  for (const ValueId value : sweep.body) {
    if (graph[value].kind == NodeKind::reduce) result.push_back(value);
  }
  return result;
}

int64_t inner_extent(const Shape& space, AxisMask row) {
  int64_t inner = 1;
  for (const Axis axis : {kFeatures, kGroups, kRows}) {
    if (row & axis_bit(axis)) break;
    inner *= space.extent(axis, 1);
  }
  return inner;
}

bool reduces_rows(const Plan& plan, int sweep) {
  const Sweep& s = plan.sweeps[static_cast<size_t>(sweep)];
  const std::optional<AxisMask> common = common_axes(plan, s);
  if (!common) return false;
  // No axis outside the row lies between two of it.
  const AxisMask outside = static_cast<AxisMask>(s.space.static_axes() & ~*common);
  bool begun = false, ended = false;
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    if (*common & axis_bit(axis)) {
      if (ended) return false;
      begun = true;
    } else if (outside & axis_bit(axis)) {
      ended = begun;
    }
  }
  const int64_t inner = inner_extent(s.space, *common);
  return inner == 1 || (inner >= kRowsOfASector && s.space.static_elements() < kElementsByI32);
}

}  // namespace ingot
