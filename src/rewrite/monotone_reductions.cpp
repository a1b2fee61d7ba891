// max(x·c) = max(x)·c  for c > 0,  max(x·c) = min(x)·c  for c < 0,  max(x + c) = max(x) + c, and
// the same for min: a monotone operator moves behind the reduction, where it runs once per row.
//
// Exact: rounding is monotone, so the rounded image of the largest element is the largest rounded
// image, whether or not it overflows. c is a finite constant other than 0, so no new NaN arises
// (0·Inf, Inf − Inf) and NaN passes through either way.
#include "rewrite/patterns.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

bool is_extremum(Finish finish) {
  return finish == Finish::max || finish == Finish::min;
}

ValueId move_behind_extremum(NodeEdit& edit) {
  const Node node = edit.node();
  if (node.kind != NodeKind::reduce || !is_extremum(node.finish)) return kNoValue;
  if (!edit.used_once(node.args[0])) return kNoValue;
  const Node inner = edit[node.args[0]];
  const auto pair =
      operands_where(edit, inner, [&](ValueId id) { return is_finite_constant(edit, id); });
  if (!pair || inner.dtype != edit[pair->main].dtype || !is_floating(inner.dtype)) return kNoValue;
  const double c = edit[pair->other].constant;
  const bool scale = inner.op == PointwiseOp::mul_ || inner.op == PointwiseOp::div_;
  const bool shift = inner.op == PointwiseOp::add_ || inner.op == PointwiseOp::sub_;
  if (!(shift || (scale && c != 0))) return kNoValue;
  const Finish turned = node.finish == Finish::max ? Finish::min : Finish::max;
  const ValueId reduced =
      edit.builder().reduce(scale && c < 0 ? turned : node.finish, pair->main, node.axes);
  return edit.builder().pointwise(inner.op, {reduced, pair->other});
}

}  // namespace

const Rule& monotone_reductions() {
  static const Rule rule = {"monotone-reductions", "max(x·c + d) = max(x)·c + d for c > 0",
                            RewriteLevel::ieee, stateless<move_behind_extremum>};
  return rule;
}

}  // namespace ingot
