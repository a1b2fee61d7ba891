// Σₙ (x·Wᵀ)ₙ = x·(Σₙ wₙ): the sum (or mean) of a linear's outputs is one dot product a row, K
// multiplications instead of K·N.  Σₙ (yₙ + bₙ) = Σₙ yₙ + Σₙ bₙ brings a bias out of the way.
//
// Equal in real arithmetic only: partial sums of W can overflow or cancel where those of the
// products do not, and 0·Inf appears in other places.
#include "rewrite/patterns.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

bool sums_features(const Node& node) {
  return node.kind == NodeKind::reduce && node.axes == axis_bit(kFeatures) &&
         (node.finish == Finish::sum || node.finish == Finish::mean);
}

// The weights, summed over their output features.
ValueId sum_weights(NodeEdit& edit, const Node& matmul, Finish finish) {
  const AxisMask axis = axis_bit(matmul.transpose_b ? kRows : kFeatures);
  return edit.builder().reduce(finish, matmul.args[1], axis);
}

ValueId sum_linear(NodeEdit& edit) {
  const Node node = edit.node();
  if (!sums_features(node) || !edit.used_once(node.args[0])) return kNoValue;
  const Node inner = edit[node.args[0]];
  if (inner.shape.features == 1) return kNoValue;
  if (inner.kind == NodeKind::matmul) {
    const ValueId weights = sum_weights(edit, inner, node.finish);
    return edit.builder().matmul(inner.args[0], weights, inner.transpose_b);
  }
  if (inner.kind != NodeKind::pointwise || inner.op != PointwiseOp::add_) return kNoValue;
  const auto terms = operands_where(edit, inner, [&](ValueId id) {
    return !edit[id].shape.batched && edit[id].shape.features == inner.shape.features;
  });
  if (!terms || edit[terms->main].kind != NodeKind::matmul || !edit.used_once(terms->main) ||
      edit[terms->main].shape != inner.shape) {
    return kNoValue;
  }
  const ValueId left = edit.builder().reduce(node.finish, terms->main, node.axes);
  const ValueId right = edit.builder().reduce(node.finish, terms->other, node.axes);
  return edit.builder().pointwise(PointwiseOp::add_, {left, right});
}

}  // namespace

const Rule& sum_of_linear() {
  static const Rule rule = {"sum-of-linear", "Σₙ (x·Wᵀ + b)ₙ = x·(Σₙ wₙ) + Σₙ bₙ",
                            RewriteLevel::real, stateless<sum_linear>};
  return rule;
}

}  // namespace ingot
