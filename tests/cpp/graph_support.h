// Graphs and tensors for tests: a graph from a few lines of JSON, values in and out as vectors.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/evaluate.h"
#include "graph/importer.h"
#include "support/error.h"

namespace ingot::testing {

// A contiguous f64 tensor for a leaf or result of this shape, over `data`.
inline ingot_tensor dense_tensor(const Shape& shape, int64_t batch, void* data,
                                 int32_t dtype = INGOT_F64) {
  const int64_t sizes[] = {shape.batched ? batch : 1, shape.rows, shape.groups, shape.features};
  ingot_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.device = -1;
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    tensor.sizes[axis] = sizes[axis];
    tensor.strides[axis] = stride;
    stride *= sizes[axis];
  }
  return tensor;
}

// Evaluates in fp64. leaves: by name, in f64 (integers too); buffers of updates are rewritten.
// Returns the results in order.
inline std::vector<std::vector<double>> evaluate_graph(
    const Graph& graph, int64_t batch, std::map<std::string, std::vector<double>>& leaves) {
  std::vector<ingot_tensor> tensors;
  for (const ValueId id : graph.leaves()) {
    std::vector<double>& data = leaves.at(graph[id].name);
    const auto expected = static_cast<size_t>(graph[id].shape.elements(batch));
    if (data.size() != expected) throw std::logic_error("wrong size for " + graph[id].name);
    tensors.push_back(dense_tensor(graph[id].shape, batch, data.data()));
  }
  std::vector<std::vector<double>> results;
  for (const Result& result : graph.results) {
    const Shape& shape = graph[result.value].shape;
    results.emplace_back(static_cast<size_t>(shape.elements(batch)), -12345.0);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const Shape& shape = graph[graph.results[i].value].shape;
    tensors.push_back(dense_tensor(shape, batch, results[i].data()));
  }
  evaluate(graph, batch, tensors);
  return results;
}

// One operator on x of the given JSON shape; `rest` is "," and further values, whose ids start at 1
// (none: an empty text). The graph's result is value `result`.
inline Graph graph_of(const std::string& x_shape, const std::string& rest, int result) {
  return import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f64", "shape": )" +
                      x_shape + "}" + (rest.empty() ? "" : ", " + rest) +
                      R"(], "results": [{"value": )" + std::to_string(result) +
                      R"(, "name": "y"}]})");
}

// What one graph of a single input gives.
inline std::vector<double> evaluate_on(const Graph& graph, int64_t batch, std::vector<double> x) {
  std::map<std::string, std::vector<double>> leaves = {{"x", std::move(x)}};
  return evaluate_graph(graph, batch, leaves).at(0);
}

}  // namespace ingot::testing
