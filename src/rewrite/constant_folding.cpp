// f(c₁, c₂) = c: an operator whose arguments are all constants is evaluated once, in fp64, and
// rounded to the node's dtype where it is used. No values of the caller are involved.
#include <array>
#include <cmath>

#include "rewrite/edit.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

double evaluate_constant(PointwiseOp op, DType dtype, const std::array<double, 3>& x) {
  switch (op) {
#define INGOT_APPLY_1(name) pointwise::name(x[0])
#define INGOT_APPLY_2(name) pointwise::name(x[0], x[1])
#define INGOT_APPLY_3(name) pointwise::name(x[0], x[1], x[2])
#define INGOT_APPLY(name, arity, expression) \
  case PointwiseOp::name##_:                 \
    return INGOT_APPLY_##arity(name);
    INGOT_POINTWISE_OPERATORS(INGOT_APPLY)
#undef INGOT_APPLY
#undef INGOT_APPLY_3
#undef INGOT_APPLY_2
#undef INGOT_APPLY_1
    case PointwiseOp::cast_:
      if (dtype == DType::boolean) return x[0] != 0 ? 1 : 0;
      return dtype == DType::i64 ? std::trunc(x[0]) : x[0];
  }
  return 0;
}

int apply(Graph& graph, std::vector<std::string>& where) {
  return rewrite_nodes(graph, where, [](NodeEdit& edit) {
    const Node& node = edit.node();
    if (node.kind != NodeKind::pointwise) return kNoValue;
    std::array<double, 3> x{};
    for (size_t i = 0; i < node.args.size(); ++i) {
      if (!edit.is_constant(node.args[i])) return kNoValue;
      x[i] = edit[node.args[i]].constant;
    }
    const double value = evaluate_constant(node.op, node.dtype, x);
    // Integers outside what a double holds exactly stay as they are.
    if (node.dtype == DType::i64 && !(std::abs(value) <= 0x1p53)) return kNoValue;
    return edit.builder().constant(value, node.dtype);
  });
}

}  // namespace

const Rule& constant_folding() {
  static const Rule rule = {"constant-folding", "f(c₁, c₂) = c", RewriteLevel::ieee, apply};
  return rule;
}

}  // namespace ingot
