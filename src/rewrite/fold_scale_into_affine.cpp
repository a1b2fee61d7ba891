// (u·a)·s = u·(a·s)  and  (u·a + b)·s = u·(a·s) + b·s, for vectors a, b, s and a batched u: one
// multiplication per element becomes one or two per column. With u = x − μ the form (x − μ)·a + b
// stays, so nothing cancels that did not cancel before.
//
// Equal in real arithmetic only: a·s can overflow where (u·a)·s does not, and with s infinite the
// right-hand side adds infinities of both signs.
#include "rewrite/patterns.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

struct Product {
  ValueId u = kNoValue, a = kNoValue;
};

// A product of something batched with a vector.
std::optional<Product> vector_product(const NodeEdit& edit, ValueId id) {
  const Node& node = edit[id];
  if (!edit.is_pointwise(id, PointwiseOp::mul_) || !edit.used_once(id)) return std::nullopt;
  const auto pair =
      operands_where(edit, node, [&](ValueId arg) { return !edit[arg].shape.batched; });
  if (!pair || !edit[pair->main].shape.batched || edit[pair->main].shape != node.shape) {
    return std::nullopt;
  }
  return Product{pair->main, pair->other};
}

ValueId multiply(NodeEdit& edit, ValueId a, ValueId b) {
  return edit.builder().pointwise(PointwiseOp::mul_, {a, b});
}

ValueId fold_scale(NodeEdit& edit) {
  const Node node = edit.node();
  if (node.kind != NodeKind::pointwise || node.op != PointwiseOp::mul_) return kNoValue;
  const auto outer =
      operands_where(edit, node, [&](ValueId id) { return !edit[id].shape.batched; });
  if (!outer || edit[outer->main].shape != node.shape || !node.shape.batched ||
      !all_f32(edit, {outer->main, outer->other})) {
    return kNoValue;
  }
  const ValueId s = outer->other;
  if (const auto product = vector_product(edit, outer->main)) {
    if (!all_f32(edit, {product->u, product->a})) return kNoValue;
    return multiply(edit, product->u, multiply(edit, product->a, s));
  }
  const Node sum = edit[outer->main];
  if (!edit.is_pointwise(outer->main, PointwiseOp::add_) || !edit.used_once(outer->main)) {
    return kNoValue;
  }
  const auto terms = operands_where(edit, sum, [&](ValueId id) { return !edit[id].shape.batched; });
  if (!terms) return kNoValue;
  const auto product = vector_product(edit, terms->main);
  if (!product || edit[terms->main].shape != node.shape ||
      !all_f32(edit, {product->u, product->a, terms->other})) {
    return kNoValue;
  }
  const ValueId scaled = multiply(edit, product->u, multiply(edit, product->a, s));
  return edit.builder().pointwise(PointwiseOp::add_, {scaled, multiply(edit, terms->other, s)});
}

}  // namespace

const Rule& fold_scale_into_affine() {
  static const Rule rule = {"fold-scale-into-affine", "((x − μ)·a + b)·s = (x − μ)·(a·s) + b·s",
                            RewriteLevel::real, stateless<fold_scale>};
  return rule;
}

}  // namespace ingot
