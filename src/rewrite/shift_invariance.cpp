// For r constant along the reduced axes:
//   var(x + r) = var(x),  Σ exp((x + r) − max(x + r)) = Σ exp(x − max(x)),
//   f(x + r) = f(x) + r  for mean, max, min, max of an exponent and log-sum-exp,
//   (x + r) − (m + r) = x − m.
// So a linear's bias vanishes before batch statistics (the running mean still receives it), and a
// per-row shift before softmax or log-softmax.
//
// Equal in real arithmetic only: where r is Inf or NaN, or x + r overflows, the original gives NaN
// in places where the right-hand sides stay finite.
#include "rewrite/patterns.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

bool is_shift(const Node& node) {
  return node.kind == NodeKind::pointwise &&
         (node.op == PointwiseOp::add_ || node.op == PointwiseOp::sub_);
}

ValueId move_out_of_reduction(NodeEdit& edit) {
  const Node node = edit.node();
  const Node inner = edit[node.args[0]];
  if (!is_shift(inner)) return kNoValue;
  const auto pair = operands_where(edit, inner, [&](ValueId id) {
    return constant_along(edit[id].shape, inner.shape, node.axes);
  });
  if (!pair || edit[pair->main].shape != inner.shape || edit[pair->main].dtype != inner.dtype) {
    return kNoValue;
  }
  switch (node.finish) {
    case Finish::variance:
    case Finish::variance_unbiased:
    case Finish::sum_exp:
      return edit.builder().reduce(node.finish, pair->main, node.axes);
    case Finish::mean:
    case Finish::max:
    case Finish::min:
    case Finish::max_exponent:
    case Finish::log_sum_exp: {
      const ValueId reduced = edit.builder().reduce(node.finish, pair->main, node.axes);
      return edit.builder().pointwise(inner.op, {reduced, pair->other});
    }
    case Finish::sum:
    case Finish::argmax:
      break;
  }
  return kNoValue;
}

// (x ± r) − (m ± r), in any order of the sums' operands.
ValueId cancel(NodeEdit& edit) {
  const Node node = edit.node();
  const Node left = edit[node.args[0]], right = edit[node.args[1]];
  if (!is_shift(left) || !is_shift(right) || left.op != right.op) return kNoValue;
  for (const size_t i : {size_t{1}, size_t{0}}) {
    for (const size_t j : {size_t{1}, size_t{0}}) {
      if (left.op == PointwiseOp::sub_ && (i == 0 || j == 0)) continue;
      const ValueId x = left.args[1 - i], m = right.args[1 - j];
      if (left.args[i] != right.args[j]) continue;
      const bool same = broadcast(edit[x].shape, edit[m].shape) == node.shape &&
                        edit[x].dtype == node.dtype && edit[m].dtype == node.dtype;
      if (same) return edit.builder().pointwise(PointwiseOp::sub_, {x, m});
    }
  }
  return kNoValue;
}

ValueId remove_shift(NodeEdit& edit) {
  if (edit.node().kind == NodeKind::reduce) return move_out_of_reduction(edit);
  const bool difference =
      edit.node().kind == NodeKind::pointwise && edit.node().op == PointwiseOp::sub_;
  return difference ? cancel(edit) : kNoValue;
}

}  // namespace

const Rule& shift_invariance() {
  static const Rule rule = {"shift-invariance",
                            "(x + r) − mean(x + r) = x − mean(x), var(x + r) = var(x), "
                            "softmax(x + r) = softmax(x)",
                            RewriteLevel::real, stateless<remove_shift>};
  return rule;
}

}  // namespace ingot
