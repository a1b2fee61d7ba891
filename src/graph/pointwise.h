// The table of kernels/common/pointwise.cuh, as data.
#pragma once

#include "graph/value_range.h"

namespace ingot {

// What the arguments' dtypes make of the result's.
enum class DTypeRule : uint8_t {
  same,     // their common one
  numeric,  // the same, which may not be bool
  real,     // a function of real numbers: integers become f32, as in PyTorch
  truth,    // bool
  chosen,   // the common one of the second and third
  given     // the node's own
};

struct PointwiseRow {
  std::string_view name;
  int arity;
  DTypeRule dtype;
  double cost;  // of an element, in multiplications
  ValueRange (*range)(ValueRange a, ValueRange b);
};
const PointwiseRow& pointwise_row(PointwiseOp op);

}  // namespace ingot
