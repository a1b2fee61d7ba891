// Σ over samples b and places n of v = Σ_b (Σₙ v), and so for means, maxima and minima: where v
// follows a reduction within a sample (a softmax, a norm over features), one sweep then computes v
// and reduces it while it has the sample at hand. Else v would lie in memory for a second sweep.
//
// Sums in another order, where none was promised; extrema are equal. What lies between the two is
// not rounded to 16 bits.
#include <vector>

#include "rewrite/rules.h"

namespace ingot {
namespace {

constexpr AxisMask kBatchAxis = axis_bit(kBatch);

bool may_be_taken_apart(Finish finish) {
  return finish == Finish::sum || finish == Finish::mean || finish == Finish::max ||
         finish == Finish::min;
}

// Of each value of a growing graph the axes within a sample of which reductions were made that it
// is computed from, operator by operator. Behind a view axes are others.
class Followed {
 public:
  AxisMask of(const Graph& graph, ValueId value) {
    while (axes_.size() < graph.nodes.size()) axes_.push_back(axes(graph, axes_.size()));
    return axes_[static_cast<size_t>(value)];
  }

 private:
  AxisMask axes(const Graph& graph, size_t value) const {
    const Node& node = graph.nodes[value];
    const bool within = node.kind == NodeKind::reduce && !(node.axes & kBatchAxis);
    if (!within && node.kind != NodeKind::pointwise) return 0;
    AxisMask found = within ? node.axes : AxisMask{0};
    for (const ValueId argument : node.args) {
      found = static_cast<AxisMask>(found | axes_[static_cast<size_t>(argument)]);
    }
    return found;
  }

  std::vector<AxisMask> axes_;
};

ValueId reduced_within_first(NodeEdit& edit, Followed& followed) {
  const Node node = edit.node();
  if (node.kind != NodeKind::reduce || !may_be_taken_apart(node.finish)) return kNoValue;
  const Node& reduced = edit[node.args[0]];
  const bool exact = reduced.dtype == DType::f32 || reduced.dtype == DType::f64;
  if (!exact || !(node.axes & kBatchAxis) || !reduced.shape.batched) return kNoValue;
  // Along the same axes: teams that have a row at hand have no more of a sample.
  const auto within = static_cast<AxisMask>(node.axes & ~kBatchAxis &
                                            followed.of(edit.builder().graph(), node.args[0]));
  if (reduced.shape.only(within).static_elements() == 1) return kNoValue;
  const ValueId first = edit.builder().reduce(node.finish, node.args[0], within);
  return edit.builder().reduce(node.finish, first, static_cast<AxisMask>(node.axes & ~within));
}

NodeRewrite within_first() {
  return [followed = Followed()](NodeEdit& edit) mutable {
    return reduced_within_first(edit, followed);
  };
}

}  // namespace

const Rule& within_samples_first() {
  static const Rule rule = {"within-samples-first", "Σ_bn v = Σ_b (Σₙ v)", RewriteLevel::ieee,
                            within_first};
  return rule;
}

}  // namespace ingot
