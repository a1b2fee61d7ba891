#include "rewrite/edit.h"

#include <stdexcept>

namespace ingot {
namespace {

std::vector<bool> needed_values(const Graph& graph) {
  std::vector<bool> needed(graph.nodes.size(), false);
  for (const Result& result : graph.results) needed[static_cast<size_t>(result.value)] = true;
  for (const Update& update : graph.updates) needed[static_cast<size_t>(update.value)] = true;
  for (size_t id = graph.nodes.size(); id-- > 0;) {
    if (graph.nodes[id].kind == NodeKind::leaf) needed[id] = true;
    if (!needed[id]) continue;
    for (const ValueId arg : graph.nodes[id].args) needed[static_cast<size_t>(arg)] = true;
  }
  return needed;
}

ValueId append(GraphBuilder& builder, const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
      return builder.leaf(node);
    case NodeKind::constant:
      return builder.constant(node.constant, node.dtype);
    case NodeKind::matmul:
      return builder.matmul(node.args[0], node.args[1], node.transpose_b);
    case NodeKind::pointwise:
      return node.op == PointwiseOp::cast_ ? builder.cast(node.args[0], node.dtype)
                                           : builder.pointwise(node.op, node.args);
    case NodeKind::reduce:
      return builder.reduce(node.finish, node.args[0], node.axes);
    case NodeKind::view:
      return builder.view(node.args[0], node.shape);
    case NodeKind::scan:
      return builder.scan(node.args[0]);
  }
  return kNoValue;
}

std::vector<int> count_uses(const Graph& graph) {
  std::vector<int> uses(graph.nodes.size(), 0);
  for (const Node& node : graph.nodes) {
    for (const ValueId arg : node.args) ++uses[static_cast<size_t>(arg)];
  }
  for (const Result& result : graph.results) ++uses[static_cast<size_t>(result.value)];
  for (const Update& update : graph.updates) ++uses[static_cast<size_t>(update.value)];
  return uses;
}

}  // namespace

std::string NodeEdit::place() const {
  const std::string_view name = !node_.name.empty()                 ? std::string_view(node_.name)
                                : node_.kind == NodeKind::pointwise ? name_of(node_.op)
                                : node_.kind == NodeKind::reduce    ? name_of(node_.finish)
                                                                    : std::string_view("value");
  return std::string(name) + (node_.source.empty() ? "" : ", " + node_.source);
}

int rewrite_nodes(Graph& graph, std::vector<std::string>& where, const NodeRewrite& rewrite) {
  GraphBuilder builder;
  const std::vector<int> old_uses = count_uses(graph);
  std::vector<int> uses;  // of new values that stand for old ones
  std::vector<ValueId> map(graph.nodes.size(), kNoValue);
  int replaced = 0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node node = graph.nodes[i];
    for (ValueId& arg : node.args) arg = map[static_cast<size_t>(arg)];
    builder.set_origin(node.name, node.source);
    ValueId id = kNoValue;
    if (node.kind != NodeKind::leaf) {
      NodeEdit edit(builder, node, uses);
      id = rewrite(edit);
      if (id != kNoValue) where.push_back(edit.place());
      replaced += id != kNoValue;
    }
    if (id == kNoValue) id = append(builder, node);
    // A constant is weaker than what it replaces: a user may infer another dtype from it.
    if (builder.graph()[id].dtype != node.dtype) id = builder.cast(id, node.dtype);
    if (builder.graph()[id].shape != node.shape) {
      throw std::logic_error("a rewrite changed the shape of " + node.name + to_string(node.shape));
    }
    map[i] = id;
    if (uses.size() <= static_cast<size_t>(id)) uses.resize(static_cast<size_t>(id) + 1, 0);
    uses[static_cast<size_t>(id)] += old_uses[i];
  }
  Graph result = builder.graph();
  result.name = graph.name;
  for (const Result& old : graph.results) {
    result.results.push_back({map[static_cast<size_t>(old.value)], old.name});
  }
  for (const Update& old : graph.updates) {
    result.updates.push_back(
        {map[static_cast<size_t>(old.value)], map[static_cast<size_t>(old.buffer)]});
  }
  graph = std::move(result);
  return replaced;
}

Graph without_dead_values(const Graph& graph) {
  const std::vector<bool> needed = needed_values(graph);
  std::vector<ValueId> map(graph.nodes.size(), kNoValue);
  Graph result;
  result.name = graph.name;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!needed[i]) continue;
    Node node = graph.nodes[i];
    for (ValueId& arg : node.args) arg = map[static_cast<size_t>(arg)];
    map[i] = static_cast<ValueId>(result.nodes.size());
    result.nodes.push_back(std::move(node));
  }
  for (const Result& old : graph.results) {
    result.results.push_back({map[static_cast<size_t>(old.value)], old.name});
  }
  for (const Update& old : graph.updates) {
    result.updates.push_back(
        {map[static_cast<size_t>(old.value)], map[static_cast<size_t>(old.buffer)]});
  }
  return result;
}

}  // namespace ingot
