// Builds graphs with shape and dtype inference: what the importer and the rewrites use to append
// nodes. Every method returns the new value's id and throws Error on shapes that do not fit.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace ingot {

class GraphBuilder {
 public:
  GraphBuilder() = default;
  explicit GraphBuilder(Graph graph) : graph_(std::move(graph)) {}

  ValueId leaf(LeafRole role, std::string name, DType dtype, Shape shape);
  ValueId leaf(const Node& like);  // of another graph
  // Says of a leaf [1, 1, 1, N] of f32 that its elements are 0, 1, 2, ... N - 1: a backend may
  // count instead of reading it. N ≤ 2^24, up to which f32 counts.
  void hold_positions(ValueId leaf);
  ValueId constant(double value, DType dtype = DType::f32);
  // a: [B, R, 1, K]; b: [1|B, N, 1, K] where transpose_b, else [1|B, K, 1, N]. Result [B, R, 1, N].
  ValueId matmul(ValueId a, ValueId b, bool transpose_b);
  ValueId pointwise(PointwiseOp op, std::vector<ValueId> args);
  ValueId cast(ValueId a, DType dtype);
  ValueId reduce(Finish finish, ValueId a, AxisMask axes);
  // The same elements in the same order; the batch axis stays.
  ValueId view(ValueId a, Shape shape);
  // Of each element the sum of those before it along the features, and itself; of 16 bits in fp32.
  ValueId scan(ValueId a);

  void result(ValueId value, std::string name);
  // Writes `value` into the buffer when the graph has run; a later update replaces an earlier one.
  void update(ValueId value, ValueId buffer);
  // What the buffer holds at this point of the program: the leaf, or the value that an earlier
  // operator has put in its place (a module that is called twice sees its own first update).
  ValueId current(ValueId buffer) const;
  // Name and source given to nodes appended from now on.
  void set_origin(std::string name, std::string source);

  const Graph& graph() const { return graph_; }
  Graph take();  // validates

 private:
  ValueId append(Node node);
  Graph graph_;
  std::string origin_name_, origin_source_;
};

}  // namespace ingot
