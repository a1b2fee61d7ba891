#include "plan/normalise.h"

#include <algorithm>
#include <set>

#include "graph/builder.h"
#include "plan/factoring.h"
#include "rewrite/edit.h"
#include "support/error.h"

namespace ingot {
namespace {

AxisMask reduced_extents(const Shape& from, AxisMask axes) {
  AxisMask real = 0;
  for (const Axis axis : {kBatch, kRows, kGroups, kFeatures}) {
    if ((axes & axis_bit(axis)) && from.extent(axis, 2) > 1) {
      real = static_cast<AxisMask>(real | axis_bit(axis));
    }
  }
  return real;
}

// What a reduction gives for one element x; x − x is 0, and NaN where x is not finite.
ValueId reduction_of_one(GraphBuilder& builder, Finish finish, ValueId x, DType dtype) {
  const auto zero = [&] { return builder.pointwise(PointwiseOp::sub_, {x, x}); };
  switch (finish) {
    case Finish::sum:
      return builder.cast(x, dtype);
    case Finish::max:
    case Finish::min:
    case Finish::mean:
    case Finish::max_exponent:
    case Finish::log_sum_exp:
      return x;
    case Finish::variance:
      return zero();
    case Finish::variance_unbiased: {  // Bessel's correction divides by 0
      const ValueId numerator = zero();
      return builder.pointwise(PointwiseOp::div_, {numerator, numerator});
    }
    case Finish::sum_exp:
      return builder.pointwise(PointwiseOp::exp_, {zero()});
    case Finish::argmax:
      break;
  }
  // The index is 0; spelled so that the value depends on x and keeps its shape.
  const ValueId equal = builder.pointwise(PointwiseOp::eq_, {x, x});
  const ValueId none =
      builder.pointwise(PointwiseOp::mul_, {equal, builder.constant(0, DType::boolean)});
  return builder.cast(none, dtype);
}

class Normaliser {
 public:
  explicit Normaliser(Graph graph) : old_(std::move(graph)), map_(old_.nodes.size(), kNoValue) {}

  Graph run() {
    for (size_t i = 0; i < old_.nodes.size(); ++i) map_[i] = translate(old_.nodes[i]);
    Graph graph = builder_.graph();
    graph.name = old_.name;
    std::vector<ValueId> taken;
    const auto own = [&](ValueId value) {
      const NodeKind kind = graph[value].kind;
      const bool shared = std::find(taken.begin(), taken.end(), value) != taken.end();
      if (kind == NodeKind::leaf || kind == NodeKind::constant || shared ||
          merged_by_view(graph, value)) {
        value = append_copy(graph, value);
      }
      taken.push_back(value);
      return value;
    };
    for (const Update& update : old_.updates) {
      graph.updates.push_back({own(mapped(update.value)), mapped(update.buffer)});
    }
    for (const Result& result : old_.results) {
      graph.results.push_back({own(mapped(result.value)), result.name});
    }
    return graph;
  }

 private:
  ValueId mapped(ValueId id) const { return map_[static_cast<size_t>(id)]; }

  // The caller's memory of a result may have any strides, so that no view may merge its axes.
  static bool merged_by_view(const Graph& graph, ValueId value) {
    return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
      return node.kind == NodeKind::view && node.args[0] == value &&
             !Factoring(node.shape).splits(Factoring(graph[value].shape));
    });
  }

  ValueId translate(Node node) {
    const ValueId old_arg = node.args.empty() ? kNoValue : node.args[0];
    for (ValueId& arg : node.args) arg = mapped(arg);
    builder_.set_origin(node.name, node.source);
    switch (node.kind) {
      case NodeKind::leaf:
        return builder_.leaf(node);
      case NodeKind::constant:
        return builder_.constant(node.constant, node.dtype);
      case NodeKind::matmul:
        return builder_.matmul(in_memory(node.args[0]), in_memory(node.args[1]), node.transpose_b);
      case NodeKind::pointwise:
        return node.op == PointwiseOp::cast_ ? builder_.cast(node.args[0], node.dtype)
                                             : builder_.pointwise(node.op, node.args);
      case NodeKind::view:
        return translate_view(node);
      case NodeKind::reduce:
        return translate_reduction(node, old_arg);
      case NodeKind::scan:
        return node.shape.features > 1 ? builder_.scan(node.args[0]) : node.args[0];
    }
    return kNoValue;
  }

  // A product loads its operands, and constants are not loaded.
  ValueId in_memory(ValueId id) {
    const Node& node = builder_.graph()[id];
    return node.kind == NodeKind::constant ? builder_.cast(id, node.dtype) : id;
  }

  ValueId translate_view(const Node& node) {
    const ValueId base = behind_any_view(node.args[0]);
    const Node& from = builder_.graph()[base];
    if (from.shape == node.shape || from.kind == NodeKind::constant) return base;
    return builder_.view(base, node.shape);
  }

  ValueId translate_reduction(const Node& node, ValueId old_arg) {
    const ValueId arg = node.args[0];
    const Node from = builder_.graph()[arg];
    const AxisMask axes = reduced_extents(from.shape, node.axes);
    if (node.finish == Finish::sum && joins_statistics(old_arg, axes)) {
      const ValueId columns = builder_.reduce(Finish::sum, arg, axis_bit(kBatch));
      return builder_.reduce(Finish::sum, columns, static_cast<AxisMask>(axes & ~axis_bit(kBatch)));
    }
    if (axes != 0) return builder_.reduce(node.finish, arg, axes);
    return reduction_of_one(builder_, node.finish, arg, node.dtype);
  }

  // Of a sum over the batch and a row, in the old graph: whether what is summed follows from a
  // reduction of such rows, and so do statistics of columns. Their sweep, which reads what the
  // rows' sweep stores, then sums its columns with them, and nothing is stored for it.
  bool joins_statistics(ValueId arg, AxisMask axes) const {
    const auto row = static_cast<AxisMask>(axes & ~axis_bit(kBatch));
    if (row == axes || row == 0 || !follows_from_row(arg, row)) return false;
    return std::any_of(old_.nodes.begin(), old_.nodes.end(), [&](const Node& node) {
      return node.kind == NodeKind::reduce && old_[node.args[0]].shape == old_[arg].shape &&
             reduced_extents(old_[node.args[0]].shape, node.axes) == axis_bit(kBatch) &&
             follows_from_row(node.args[0], row);
    });
  }

  bool follows_from_row(ValueId id, AxisMask row) const {
    std::vector<ValueId> ahead = {id};
    std::set<ValueId> seen;
    while (!ahead.empty()) {
      const ValueId value = ahead.back();
      ahead.pop_back();
      const Node& node = old_[value];
      if (!seen.insert(value).second) continue;
      if (node.kind == NodeKind::reduce) {
        if (reduced_extents(old_[node.args[0]].shape, node.axes) == row) return true;
      } else if (node.kind == NodeKind::pointwise || node.kind == NodeKind::view) {
        ahead.insert(ahead.end(), node.args.begin(), node.args.end());
      }
    }
    return false;
  }

  ValueId behind_any_view(ValueId id) const {
    while (builder_.graph()[id].kind == NodeKind::view) id = builder_.graph()[id].args[0];
    return id;
  }

  const Graph old_;
  std::vector<ValueId> map_;
  GraphBuilder builder_;
};

}  // namespace

ValueId append_copy(Graph& graph, ValueId value) {
  GraphBuilder builder(std::move(graph));
  const Node from = builder.graph()[value];
  builder.set_origin(from.kind == NodeKind::leaf ? "" : from.name, from.source);
  const ValueId copy = builder.cast(value, from.dtype);
  graph = builder.graph();
  return copy;
}

Graph normalise_for_planning(const Graph& graph) {
  return Normaliser(graph).run();
}

}  // namespace ingot
