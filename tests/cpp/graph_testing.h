// Graphs and data for tests of plans and rewrites.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <span>

#include "graph/builder.h"
#include "ingot/ingot.h"

namespace ingot::testing {

// Storage for every leaf and result of a graph, in f64; leaves are random in [-1, 1) (buffers and
// inputs of dtype i64: small integers; bool: 0 or 1), results NaN.
class Bindings {
 public:
  // strided: with gaps between rows and elements, as slices of larger tensors have.
  Bindings(const Graph& graph, int64_t batch, uint64_t seed, bool strided = false);

  std::span<const ingot_tensor> tensors() const { return tensors_; }
  // Everything that can be read, leaves included (updates show there).
  const std::vector<std::vector<double>>& data() const { return data_; }
  std::vector<double>& leaf(size_t i) { return data_[i]; }

 private:
  std::vector<std::vector<double>> data_;
  std::vector<ingot_tensor> tensors_;
};

// Results and updated buffers of the two agree to `tolerance` relative to the larger magnitude of
// either element or 1; NaN equals NaN, and an infinity itself.
::testing::AssertionResult agree(const Bindings& a, const Bindings& b, double tolerance = 1e-8);

// A random valid graph: linears, pointwise operators with all kinds of broadcasting, reductions
// over any axes, views, several results, updates.
Graph random_graph(uint64_t seed);

}  // namespace ingot::testing
