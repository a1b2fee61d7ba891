// x·1 = x,  x/1 = x,  x − 0 = x,  x¹ = x,  −(−x) = x,  cast of x to its own dtype = x,
// select(true, a, b) = a.
//
// Each is exact for every x, NaN, infinities and −0 included. x + 0 is not among them: it turns −0
// into 0. (A NaN may lose its payload, which no operator defines.)
#include "rewrite/edit.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

bool is_number(const NodeEdit& edit, ValueId id, double value) {
  return edit.is_constant(id) && edit[id].constant == value;
}

ValueId neutral(const NodeEdit& edit) {
  const Node& node = edit.node();
  if (node.kind != NodeKind::pointwise) return kNoValue;
  const ValueId a = node.args[0];
  const ValueId b = node.args.size() > 1 ? node.args[1] : kNoValue;
  switch (node.op) {
    case PointwiseOp::mul_:
      if (is_number(edit, b, 1)) return a;
      return is_number(edit, a, 1) ? b : kNoValue;
    case PointwiseOp::div_:
    case PointwiseOp::pow_:
      return is_number(edit, b, 1) ? a : kNoValue;
    case PointwiseOp::sub_:
      // x − (−0) is x + 0.
      return is_number(edit, b, 0) && !__builtin_signbit(edit[b].constant) ? a : kNoValue;
    case PointwiseOp::neg_:
      return edit.is_pointwise(a, PointwiseOp::neg_) ? edit[a].args[0] : kNoValue;
    case PointwiseOp::cast_:
      return a;
    case PointwiseOp::select_:
      if (!edit.is_constant(a)) return kNoValue;
      return edit[a].constant != 0 ? b : node.args[2];
    default:
      return kNoValue;
  }
}

ValueId other_operand(NodeEdit& edit) {
  const ValueId value = neutral(edit);
  if (value == kNoValue) return kNoValue;
  const Node& kept = edit[value];
  const bool same = kept.shape == edit.node().shape && kept.dtype == edit.node().dtype;
  return same && kept.kind != NodeKind::constant ? value : kNoValue;
}

}  // namespace

const Rule& neutral_operands() {
  static const Rule rule = {"neutral-operands", "x·1 = x/1 = x − 0 = x¹ = −(−x) = x",
                            RewriteLevel::ieee, stateless<other_operand>};
  return rule;
}

}  // namespace ingot
