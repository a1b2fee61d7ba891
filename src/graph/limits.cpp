#include "graph/limits.h"

#include <algorithm>

#include "support/error.h"

namespace ingot {
namespace {

const Node* widest(const Graph& graph) {
  const Node* found = nullptr;
  for (const Node& node : graph.nodes) {
    const bool wider =
        found == nullptr || node.shape.static_elements() > found->shape.static_elements();
    if (node.shape.batched && wider) found = &node;
  }
  return found;
}

}  // namespace

int64_t largest_batch(const Graph& graph) {
  const Node* node = widest(graph);
  return kMostElements / (node == nullptr ? 1 : node->shape.static_elements());
}

void check_batch(const Graph& graph, int64_t batch) {
  if (batch < 0) fail(INGOT_INVALID_ARGUMENT, "the batch size is {}", batch);
  const int64_t most = largest_batch(graph);
  if (batch <= most) return;
  const Node* node = widest(graph);
  const bool named = node != nullptr && !node->name.empty();
  fail(INGOT_INVALID_ARGUMENT,
       "the batch size is {}, and graph '{}' takes {} at most: {}{}{} would have more than 2^48 "
       "elements",
       batch, graph.name, most, named ? "'" : "", named ? node->name : "a value", named ? "'" : "");
}

}  // namespace ingot
