// f(c₁, c₂) = c: an operator whose arguments are all constants is evaluated once, in fp64, and
// rounded to the node's dtype where it is used. No values of the caller are involved.
#include <array>
#include <cmath>

#include "graph/evaluate.h"
#include "rewrite/edit.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

ValueId fold_constant(NodeEdit& edit) {
  const Node& node = edit.node();
  if (node.kind != NodeKind::pointwise) return kNoValue;
  std::array<double, 3> x{};
  for (size_t i = 0; i < node.args.size(); ++i) {
    if (!edit.is_constant(node.args[i])) return kNoValue;
    x[i] = edit[node.args[i]].constant;
  }
  const double value = apply_pointwise(node.op, node.dtype, x);
  // Integers outside what a double holds exactly stay as they are.
  if (node.dtype == DType::i64 && !(std::abs(value) <= 0x1p53)) return kNoValue;
  return edit.builder().constant(value, node.dtype);
}

}  // namespace

const Rule& constant_folding() {
  static const Rule rule = {"constant-folding", "f(c₁, c₂) = c", RewriteLevel::ieee,
                            stateless<fold_constant>};
  return rule;
}

}  // namespace ingot
