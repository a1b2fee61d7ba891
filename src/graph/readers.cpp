#include "graph/readers.h"

#include <algorithm>

namespace ingot {

Readers readers_of(const Graph& graph) {
  Readers readers{graph.users(), std::vector<bool>(graph.nodes.size())};
  std::vector<bool> kept(graph.nodes.size());
  for (const auto& result : graph.results) kept[static_cast<size_t>(result.value)] = true;
  for (const Update& update : graph.updates) kept[static_cast<size_t>(update.value)] = true;
  const auto rounds = [&](ValueId reader) {
    const NodeKind kind = graph[reader].kind;
    return (kind == NodeKind::pointwise || kind == NodeKind::view) &&
           readers.rounded[static_cast<size_t>(reader)];
  };
  // Readers come behind what they read.
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const DType dtype = graph.nodes[i].dtype;
    const std::vector<ValueId>& of = readers.of[i];
    readers.rounded[i] = dtype == DType::f16 || dtype == DType::bf16 ||
                         (dtype == DType::f32 && !kept[i] && !of.empty() &&
                          std::all_of(of.begin(), of.end(), rounds));
  }
  return readers;
}

}  // namespace ingot
