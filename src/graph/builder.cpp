#include "graph/builder.h"

#include <algorithm>

#include "support/error.h"

namespace ingot {

ValueId GraphBuilder::append(Node node) {
  for (const ValueId arg : node.args) {
    if (arg < 0 || static_cast<size_t>(arg) >= graph_.nodes.size()) {
      fail(INGOT_INVALID_ARGUMENT, "argument {} is not an earlier value", arg);
    }
  }
  node.shape = infer_shape(graph_, node);
  node.dtype = infer_dtype(graph_, node);
  if (node.kind != NodeKind::leaf) node.name = origin_name_;
  if (node.source.empty()) node.source = origin_source_;
  graph_.nodes.push_back(std::move(node));
  return static_cast<ValueId>(graph_.nodes.size() - 1);
}

ValueId GraphBuilder::leaf(LeafRole role, std::string name, DType dtype, Shape shape) {
  Node node;
  node.kind = NodeKind::leaf;
  node.role = role;
  node.name = std::move(name);
  node.dtype = dtype;
  node.shape = shape;
  return append(std::move(node));
}

ValueId GraphBuilder::leaf(const Node& like) {
  return append(like);
}

void GraphBuilder::hold_positions(ValueId leaf) {
  constexpr int64_t kMostCounted = int64_t{1} << 24;
  Node& node = graph_[leaf];
  const Shape row = {false, 1, 1, node.shape.features};
  if (node.dtype != DType::f32 || node.shape != row || row.features > kMostCounted) {
    fail(INGOT_INVALID_ARGUMENT, "positions are f32 [1, 1, 1, N] with N at most {}, not {} {}",
         kMostCounted, name_of(node.dtype), to_string(node.shape));
  }
  node.positions = true;
}

ValueId GraphBuilder::constant(double value, DType dtype) {
  Node node;
  node.kind = NodeKind::constant;
  node.constant = value;
  node.dtype = dtype;
  return append(std::move(node));
}

ValueId GraphBuilder::matmul(ValueId a, ValueId b, bool transpose_b) {
  Node node;
  node.kind = NodeKind::matmul;
  node.transpose_b = transpose_b;
  node.args = {a, b};
  return append(std::move(node));
}

ValueId GraphBuilder::pointwise(PointwiseOp op, std::vector<ValueId> args) {
  if (op == PointwiseOp::cast_) fail(INGOT_INVALID_ARGUMENT, "cast needs a dtype");
  if (args.size() != static_cast<size_t>(arity_of(op))) {
    fail(INGOT_INVALID_ARGUMENT, "{} takes {} arguments, got {}", name_of(op), arity_of(op),
         args.size());
  }
  Node node;
  node.kind = NodeKind::pointwise;
  node.op = op;
  node.args = std::move(args);
  return append(std::move(node));
}

ValueId GraphBuilder::cast(ValueId a, DType dtype) {
  Node node;
  node.kind = NodeKind::pointwise;
  node.op = PointwiseOp::cast_;
  node.dtype = dtype;
  node.args = {a};
  return append(std::move(node));
}

ValueId GraphBuilder::reduce(Finish finish, ValueId a, AxisMask axes) {
  Node node;
  node.kind = NodeKind::reduce;
  node.finish = finish;
  node.axes = axes;
  node.args = {a};
  return append(std::move(node));
}

ValueId GraphBuilder::view(ValueId a, Shape shape) {
  Node node;
  node.kind = NodeKind::view;
  node.shape = shape;
  node.args = {a};
  return append(std::move(node));
}

ValueId GraphBuilder::scan(ValueId a) {
  Node node;
  node.kind = NodeKind::scan;
  node.args = {a};
  return append(std::move(node));
}

void GraphBuilder::result(ValueId value, std::string name) {
  graph_.results.push_back({value, std::move(name)});
}

void GraphBuilder::update(ValueId value, ValueId buffer) {
  const auto existing =
      std::find_if(graph_.updates.begin(), graph_.updates.end(),
                   [buffer](const Update& update) { return update.buffer == buffer; });
  if (existing != graph_.updates.end()) {
    existing->value = value;
  } else {
    graph_.updates.push_back({value, buffer});
  }
}

ValueId GraphBuilder::current(ValueId buffer) const {
  for (const Update& update : graph_.updates) {
    if (update.buffer == buffer) return update.value;
  }
  return buffer;
}

void GraphBuilder::set_origin(std::string name, std::string source) {
  origin_name_ = std::move(name);
  origin_source_ = std::move(source);
}

Graph GraphBuilder::take() {
  graph_.validate();
  return std::exchange(graph_, Graph{});
}

}  // namespace ingot
