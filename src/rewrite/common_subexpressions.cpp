// f(a, b) = f(a, b): two nodes with the same operator, attributes and arguments are one value. Bit
// for bit equal, so nothing is asked of the values.
#include <functional>
#include <unordered_map>
#include <vector>

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

// Equal for what same_value() calls the same.
size_t hash_of(const Graph& graph, const Node& node) {
  size_t hash = 0;
  const auto mix = [&](u64 part) {
    hash ^= std::hash<u64>()(part) + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
  };
  for (const auto part : {static_cast<int>(node.kind), static_cast<int>(node.op),
                          static_cast<int>(node.finish), static_cast<int>(node.axes)}) {
    mix(static_cast<u64>(part));
  }
  for (const ValueId arg : node.args) {
    const bool constant = graph[arg].kind == NodeKind::constant;
    mix(constant ? __builtin_bit_cast(u64, graph[arg].constant) : static_cast<u64>(arg));
  }
  return hash;
}

// The values of a graph that grows, leaves apart.
class Values {
 public:
  // The first that is the same, or kNoValue.
  ValueId find(const Graph& graph, const Node& node) {
    for (; known_ < graph.nodes.size(); ++known_) {
      const Node& fresh = graph.nodes[known_];
      if (fresh.kind == NodeKind::leaf) continue;
      by_hash_[hash_of(graph, fresh)].push_back(static_cast<ValueId>(known_));
    }
    const auto found = by_hash_.find(hash_of(graph, node));
    if (found == by_hash_.end()) return kNoValue;
    for (const ValueId id : found->second) {
      if (same_value(graph, graph[id], node)) return id;
    }
    return kNoValue;
  }

 private:
  size_t known_ = 0;
  std::unordered_map<size_t, std::vector<ValueId>> by_hash_;
};

NodeRewrite one_value_for_equals() {
  return [values = Values()](NodeEdit& edit) mutable {
    if (edit.node().kind == NodeKind::constant) return kNoValue;
    return values.find(edit.builder().graph(), edit.node());
  };
}

}  // namespace

const Rule& common_subexpressions() {
  static const Rule rule = {"common-subexpressions",
                            "equal operators on equal arguments have one value", RewriteLevel::ieee,
                            one_value_for_equals};
  return rule;
}

}  // namespace ingot
