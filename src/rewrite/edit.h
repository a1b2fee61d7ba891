// How rules change a graph: it is written anew, node by node, with some nodes replaced.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "graph/builder.h"

namespace ingot {

// One node of the old graph, its arguments already translated; what the builder holds is the new
// graph so far.
class NodeEdit {
 public:
  NodeEdit(GraphBuilder& builder, const Node& node, const std::vector<int>& uses)
      : builder_(builder), node_(node), uses_(uses) {}

  GraphBuilder& builder() { return builder_; }
  const Node& node() const { return node_; }
  // A value of the new graph.
  const Node& operator[](ValueId id) const { return builder_.graph()[id]; }

  bool is_constant(ValueId id) const { return (*this)[id].kind == NodeKind::constant; }
  bool is_pointwise(ValueId id, PointwiseOp op) const {
    return (*this)[id].kind == NodeKind::pointwise && (*this)[id].op == op;
  }
  // Whether the value has one reader in the old graph (or is new): what replaces it then leaves it
  // dead.
  bool used_once(ValueId id) const {
    return static_cast<size_t>(id) >= uses_.size() || uses_[static_cast<size_t>(id)] <= 1;
  }
  std::string place() const;  // "bn, model.py:16"

 private:
  GraphBuilder& builder_;
  const Node& node_;
  const std::vector<int>& uses_;  // by value of the new graph
};

// Returns what stands for the node in the new graph, or kNoValue to keep it.
using NodeRewrite = std::function<ValueId(NodeEdit&)>;

// Applies `rewrite` to every node but the leaves; returns how many it replaced and appends their
// places.
int rewrite_nodes(Graph& graph, std::vector<std::string>& where, const NodeRewrite& rewrite);

// Drops what no result or update needs. Leaves stay: a run binds them by position.
Graph without_dead_values(const Graph& graph);

}  // namespace ingot
