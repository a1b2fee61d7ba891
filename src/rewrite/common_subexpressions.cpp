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

bool same_value(const Node& a, const Node& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.shape == b.shape && a.args == b.args &&
         same_bits(a.constant, b.constant) && a.transpose_b == b.transpose_b && a.op == b.op &&
         a.finish == b.finish && a.axes == b.axes;
}

int apply(Graph& graph, std::vector<std::string>& where) {
  return rewrite_nodes(graph, where, [&](NodeEdit& edit) {
    const Graph& so_far = edit.builder().graph();
    for (size_t i = 0; i < so_far.nodes.size(); ++i) {
      if (so_far.nodes[i].kind != NodeKind::leaf && same_value(so_far.nodes[i], edit.node())) {
        return static_cast<ValueId>(i);
      }
    }
    return kNoValue;
  });
}

}  // namespace

const Rule& common_subexpressions() {
  static const Rule rule = {"common-subexpressions", "f(a, b) = f(a, b)", RewriteLevel::ieee,
                            apply};
  return rule;
}

}  // namespace ingot
