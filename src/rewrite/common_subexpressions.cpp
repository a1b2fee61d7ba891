// f(a, b) = f(a, b): two nodes with the same operator, attributes and arguments are one value. Bit
// for bit equal, so nothing is asked of the values.
#include <map>

#include "rewrite/edit.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

// -0.0 and 0.0 compare equal but are different constants; NaN differs from itself but is one.
bool same_bits(double a, double b) {
  return __builtin_bit_cast(u64, a) == __builtin_bit_cast(u64, b);
}

bool same_constant(const Node& a, const Node& b) {
  return a.kind == NodeKind::constant && b.kind == NodeKind::constant && a.dtype == b.dtype &&
         same_bits(a.constant, b.constant);
}

// Constants cost nothing: two equal ones stay two, but count as one argument.
bool same_value(const Graph& graph, const Node& a, const Node& b) {
  if (a.kind != b.kind || a.dtype != b.dtype || a.shape != b.shape ||
      a.args.size() != b.args.size() || a.transpose_b != b.transpose_b || a.op != b.op ||
      a.finish != b.finish || a.axes != b.axes) {
    return false;
  }
  for (size_t i = 0; i < a.args.size(); ++i) {
    if (a.args[i] != b.args[i] && !same_constant(graph[a.args[i]], graph[b.args[i]])) return false;
  }
  return true;
}

int apply(Graph& graph, std::vector<std::string>& where) {
  return rewrite_nodes(graph, where, [&](NodeEdit& edit) {
    const Graph& so_far = edit.builder().graph();
    if (edit.node().kind == NodeKind::constant) return kNoValue;
    for (size_t i = 0; i < so_far.nodes.size(); ++i) {
      if (so_far.nodes[i].kind != NodeKind::leaf &&
          same_value(so_far, so_far.nodes[i], edit.node())) {
        return static_cast<ValueId>(i);
      }
    }
    return kNoValue;
  });
}

}  // namespace

const Rule& common_subexpressions() {
  static const Rule rule = {"common-subexpressions",
                            "equal operators on equal arguments have one value", RewriteLevel::ieee,
                            apply};
  return rule;
}

}  // namespace ingot
