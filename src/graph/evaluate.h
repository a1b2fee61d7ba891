// The meaning of a graph, in double precision: plain loops, node by node, nothing rewritten.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "graph/graph.h"
#include "ingot/ingot.h"

namespace ingot {

// Evaluates the graph on host tensors: its leaves in order, then its results in order. Leaves may
// have any dtype (not only the one that the graph declares) and any strides, 0 included; results
// must be f64. Every floating value is held in double precision whatever its dtype (a cast
// to a narrower floating dtype rounds nothing); casts to i64 truncate, casts to bool compare with
// 0. Buffers of updates are written, in their own dtype, after everything has been read.
// Integers beyond 2^53 lose their last bits.
// Throws Error (INGOT_INVALID_ARGUMENT) where a tensor does not fit its leaf or result.
void evaluate(const Graph& graph, int64_t batch, std::span<const ingot_tensor> tensors);

// One pointwise operator on numbers (as many as it takes); dtype: of a cast.
double apply_pointwise(PointwiseOp op, DType dtype, const std::array<double, 3>& x);

}  // namespace ingot
