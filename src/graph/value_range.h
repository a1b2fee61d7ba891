// What is known of a value's elements whatever the inputs are: an interval, found by interval
// arithmetic on the graph. Kernels divide in fewer steps where the operands cannot be extreme.
#pragma once

#include <limits>
#include <map>

#include "graph/graph.h"

namespace ingot {

// Of every element that is not NaN. Rounding may exceed it by some units in the last place.
struct ValueRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();

  bool within(double least, double most) const { return low >= least && high <= most; }
};

// Remembers what it has found.
class ValueRanges {
 public:
  explicit ValueRanges(const Graph& graph) : graph_(graph) {}
  ValueRange of(ValueId value);

 private:
  ValueRange find(const Node& node);

  const Graph& graph_;
  std::map<ValueId, ValueRange> known_;
};

}  // namespace ingot
