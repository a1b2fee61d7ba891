#include "graph/graph.h"

#include <algorithm>
#include <iterator>

#include "support/error.h"

namespace ingot {
namespace {

constexpr std::string_view kDTypeNames[] = {"f32", "f64", "f16", "bf16", "i64", "bool"};
constexpr std::string_view kAxisNames[] = {"batch", "rows", "groups", "features"};
constexpr std::string_view kFinishNames[] = {
    "sum",          "max",     "min",        "argmax", "mean", "variance", "variance_unbiased",
    "max_exponent", "sum_exp", "log_sum_exp"};
constexpr std::string_view kMonoidNames[] = {"sum",     "max",         "min",    "argmax",
                                             "moments", "log_sum_exp", "average"};
constexpr std::string_view kRoleNames[] = {"input", "parameter", "buffer"};

template <class Enum, size_t N>
Enum enum_from(const std::string_view (&names)[N], std::string_view name, std::string_view what) {
  const auto found = std::find(std::begin(names), std::end(names), name);
  if (found == std::end(names)) {
    fail(INGOT_INVALID_ARGUMENT, "there is no {} '{}'; known are {}", what, name,
         fmt::join(names, ", "));
  }
  return static_cast<Enum>(found - std::begin(names));
}

std::string axes_to_string(AxisMask axes) {
  std::string text;
  for (int axis = 0; axis < kAxes; ++axis) {
    if (!(axes & axis_bit(static_cast<Axis>(axis)))) continue;
    if (!text.empty()) text += ", ";
    text += kAxisNames[axis];
  }
  return text;
}

int64_t broadcast_extent(int64_t a, int64_t b, const Shape& left, const Shape& right) {
  if (a == b || b == 1) return a;
  if (a == 1) return b;
  fail(INGOT_INVALID_ARGUMENT, "shapes {} and {} do not broadcast", to_string(left),
       to_string(right));
}

std::string operator_text(const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
      return fmt::format("{} \"{}\"", kRoleNames[static_cast<size_t>(node.role)], node.name);
    case NodeKind::constant:
      return fmt::format("constant {}", node.constant);
    case NodeKind::matmul:
      return node.transpose_b ? "matmul transpose_b" : "matmul";
    case NodeKind::pointwise:
      return std::string(name_of(node.op));
    case NodeKind::reduce:
      return fmt::format("reduce {} over {}", name_of(node.finish), axes_to_string(node.axes));
    case NodeKind::view:
      return "view";
    case NodeKind::scan:
      return "scan";
  }
  return "?";
}

}  // namespace

std::string_view name_of(DType dtype) {
  return kDTypeNames[static_cast<size_t>(dtype)];
}
DType dtype_from(std::string_view name) {
  return enum_from<DType>(kDTypeNames, name, "dtype");
}
std::string_view name_of(Axis axis) {
  return kAxisNames[axis];
}
Axis axis_from(std::string_view name) {
  return enum_from<Axis>(kAxisNames, name, "axis");
}
std::string_view name_of(Finish finish) {
  return kFinishNames[static_cast<size_t>(finish)];
}
Finish finish_from(std::string_view name) {
  return enum_from<Finish>(kFinishNames, name, "reduction");
}
std::string_view name_of(MonoidKind monoid) {
  return kMonoidNames[static_cast<size_t>(monoid)];
}
MonoidKind monoid_of(Finish finish) {
  switch (finish) {
    case Finish::sum:
      return MonoidKind::sum;
    case Finish::max:
      return MonoidKind::max;
    case Finish::min:
      return MonoidKind::min;
    case Finish::argmax:
      return MonoidKind::argmax;
    case Finish::mean:
    case Finish::variance:
    case Finish::variance_unbiased:
      return MonoidKind::moments;
    case Finish::max_exponent:
    case Finish::sum_exp:
    case Finish::log_sum_exp:
      return MonoidKind::log_sum_exp;
  }
  return MonoidKind::sum;
}

int64_t Shape::extent(Axis axis, int64_t batch) const {
  switch (axis) {
    case kBatch:
      return batched ? batch : 1;
    case kRows:
      return rows;
    case kGroups:
      return groups;
    case kFeatures:
      return features;
  }
  return 1;
}

AxisMask Shape::static_axes() const {
  AxisMask mask = 0;
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    if (extent(axis, 1) > 1) mask = static_cast<AxisMask>(mask | axis_bit(axis));
  }
  return mask;
}

Shape Shape::without(AxisMask axes) const {
  const auto kept = [axes](Axis axis, int64_t extent) {
    return axes & axis_bit(axis) ? int64_t{1} : extent;
  };
  return {batched && !(axes & axis_bit(kBatch)), kept(kRows, rows), kept(kGroups, groups),
          kept(kFeatures, features)};
}

int64_t Shape::elements(int64_t batch) const {
  return (batched ? batch : 1) * static_elements();
}

std::string to_string(const Shape& shape) {
  return fmt::format("[{}, {}, {}, {}]", shape.batched ? "B" : "1", shape.rows, shape.groups,
                     shape.features);
}

Shape broadcast(const Shape& a, const Shape& b) {
  return {a.batched || b.batched, broadcast_extent(a.rows, b.rows, a, b),
          broadcast_extent(a.groups, b.groups, a, b),
          broadcast_extent(a.features, b.features, a, b)};
}

std::vector<ValueId> Graph::leaves() const {
  std::vector<ValueId> ids;
  for (size_t id = 0; id < nodes.size(); ++id) {
    if (nodes[id].kind == NodeKind::leaf) ids.push_back(static_cast<ValueId>(id));
  }
  return ids;
}

std::vector<std::vector<ValueId>> Graph::users() const {
  std::vector<std::vector<ValueId>> users(nodes.size());
  for (size_t id = 0; id < nodes.size(); ++id) {
    for (const ValueId arg : nodes[id].args) {
      auto& of_arg = users[static_cast<size_t>(arg)];
      // A node that takes a value twice (x · x) is one user.
      if (of_arg.empty() || of_arg.back() != static_cast<ValueId>(id)) {
        of_arg.push_back(static_cast<ValueId>(id));
      }
    }
  }
  return users;
}

std::string to_string(const Graph& graph) {
  std::string text = graph.name + "\n";
  for (size_t id = 0; id < graph.nodes.size(); ++id) {
    const Node& node = graph.nodes[id];
    text += fmt::format("  %{} = {}", id, operator_text(node));
    for (size_t i = 0; i < node.args.size(); ++i) {
      text += fmt::format("{}%{}", i == 0 ? " " : ", ", node.args[i]);
    }
    text += fmt::format(" : {}{}", name_of(node.dtype), to_string(node.shape));
    const bool origin = node.kind != NodeKind::leaf && !node.name.empty();
    if (origin || !node.source.empty()) {
      text += fmt::format("  // {}{}{}", origin ? node.name : "",
                          origin && !node.source.empty() ? ", " : "", node.source);
    }
    text += '\n';
  }
  for (const Result& result : graph.results) {
    text += fmt::format("  return %{} as \"{}\"\n", result.value, result.name);
  }
  for (const Update& update : graph.updates) {
    text += fmt::format("  update %{} := %{}\n", update.buffer, update.value);
  }
  return text;
}

}  // namespace ingot
