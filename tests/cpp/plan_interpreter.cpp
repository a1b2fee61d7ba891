#include "plan_interpreter.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>

#include "graph/builder.h"
#include "graph/evaluate.h"

namespace ingot::testing {
namespace {

using Values = std::vector<double>;
using Strides = std::array<int64_t, kAxes>;

struct Memory {
  double* data;
  Strides strides;
};

template <class Visit>
void for_each_element(const Shape& shape, int64_t batch, const Strides& strides, Visit visit) {
  for (int64_t b = 0; b < shape.extent(kBatch, batch); ++b) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t g = 0; g < shape.groups; ++g) {
        for (int64_t f = 0; f < shape.features; ++f) {
          visit(b * strides[0] + r * strides[1] + g * strides[2] + f * strides[3]);
        }
      }
    }
  }
}

// Evaluates one node on values of the given shapes, by the graph evaluator's own functions.
class NodeRunner {
 public:
  NodeRunner(const Graph& graph, int64_t batch) : graph_(graph), batch_(batch) {}

  ValueId add(ValueId id, const Shape& shape, const Values& values) {
    tensors_.push_back(tensor(const_cast<double*>(values.data()), shape));
    return builder_.leaf(LeafRole::input, "a", graph_[id].dtype, shape);
  }
  GraphBuilder& builder() { return builder_; }

  Values run(ValueId value) {
    builder_.result(value, "y");
    const Graph graph = builder_.take();
    const Shape shape = graph[value].shape;
    Values result(static_cast<size_t>(shape.elements(batch_)));
    tensors_.push_back(tensor(result.data(), shape));
    evaluate(graph, batch_, tensors_);
    return result;
  }

 private:
  ingot_tensor tensor(double* data, const Shape& shape) const {
    const Strides strides = dense_strides(shape);
    ingot_tensor result{data, {}, {}, INGOT_F64, -1};
    for (int axis = 0; axis < kAxes; ++axis) {
      result.sizes[axis] = shape.extent(static_cast<Axis>(axis), batch_);
      result.strides[axis] = strides[static_cast<size_t>(axis)];
    }
    return result;
  }

  const Graph& graph_;
  int64_t batch_;
  GraphBuilder builder_;
  std::vector<ingot_tensor> tensors_;
};

class Interpreter {
 public:
  Interpreter(const Plan& plan, int64_t batch, std::span<const ingot_tensor> tensors,
              std::span<const int> hosts)
      : plan_(plan), graph_(plan.graph), batch_(batch), tensors_(tensors), hosts_(hosts) {
    size_t bytes = 0;
    offsets_ = plan.workspace_layout(batch, &bytes);
    // One double a byte: whatever the dtype, a buffer has room for its elements.
    workspace_.assign(bytes, std::numeric_limits<double>::quiet_NaN());
  }

  void run() {
    for (const Sweep& sweep : plan_.sweeps) run_sweep(sweep);
  }

 private:
  Memory caller_memory(const ingot_tensor& tensor, const Shape& own, const Shape& seen) const {
    const Strides strides = {tensor.strides[0], tensor.strides[1], tensor.strides[2],
                             tensor.strides[3]};
    return {static_cast<double*>(tensor.data), strides_in(own, strides, seen)};
  }

  Memory memory_of(ValueId id, const Shape& seen) {
    const Placement& placement = plan_.placements[static_cast<size_t>(id)];
    const size_t index = static_cast<size_t>(placement.index);
    const std::vector<ValueId> leaves = graph_.leaves();
    const Shape& own = graph_[id].shape;
    switch (placement.kind) {
      case Placement::Kind::leaf:
        return caller_memory(tensors_[index], own, seen);
      case Placement::Kind::result:
        return caller_memory(tensors_[leaves.size() + index], own, seen);
      case Placement::Kind::update: {
        const ValueId buffer = graph_.updates[index].buffer;
        const auto at = std::find(leaves.begin(), leaves.end(), buffer) - leaves.begin();
        return caller_memory(tensors_[static_cast<size_t>(at)], own, seen);
      }
      case Placement::Kind::workspace:
        if (!hosts_.empty() && hosts_[index] >= 0) {
          const auto host = leaves.size() + static_cast<size_t>(hosts_[index]);
          return {static_cast<double*>(tensors_[host].data), dense_strides(seen)};
        }
        return {workspace_.data() + offsets_[index], dense_strides(seen)};
      case Placement::Kind::none:
        break;
    }
    throw std::logic_error("a value without a place");
  }

  Values load(ValueId id, const Shape& seen) {
    const Memory memory = memory_of(id, seen);
    Values values;
    for_each_element(seen, batch_, memory.strides,
                     [&](int64_t offset) { values.push_back(memory.data[offset]); });
    return values;
  }

  void store(ValueId id, const Shape& seen, const Values& values) {
    const Memory memory = memory_of(id, seen);
    size_t next = 0;
    for_each_element(seen, batch_, memory.strides,
                     [&](int64_t offset) { memory.data[offset] = values[next++]; });
  }

  Values run_product(const Sweep& sweep) {
    const Node& matmul = graph_[sweep.matmul];
    NodeRunner runner(graph_, batch_);
    std::array<ValueId, 2> operands;
    std::array<Values, 2> values;
    for (size_t i = 0; i < 2; ++i) {
      const Shape& shape = graph_[matmul.args[i]].shape;
      values[i] = load(product_operand(graph_, sweep, static_cast<int>(i)), shape);
      operands[i] = runner.add(matmul.args[i], shape, values[i]);
    }
    return runner.run(runner.builder().matmul(operands[0], operands[1], matmul.transpose_b));
  }

  Values run_node(const Sweep& sweep, ValueId id) {
    const Node& node = graph_[id];
    if (node.kind == NodeKind::view) return values_.at(node.args[0]);
    NodeRunner runner(graph_, batch_);
    std::vector<ValueId> args;
    for (const ValueId arg : node.args) {
      args.push_back(graph_[arg].kind == NodeKind::constant
                         ? runner.builder().constant(graph_[arg].constant, graph_[arg].dtype)
                         : runner.add(arg, sweep.shapes.at(arg), values_.at(arg)));
    }
    GraphBuilder& builder = runner.builder();
    if (node.kind == NodeKind::reduce) {
      return runner.run(builder.reduce(node.finish, args[0], reduced_axes(graph_, sweep, id)));
    }
    if (node.kind == NodeKind::scan) return runner.run(builder.scan(args[0]));
    const ValueId value = node.op == PointwiseOp::cast_ ? builder.cast(args[0], node.dtype)
                                                        : builder.pointwise(node.op, args);
    if (builder.graph()[value].shape != sweep.shapes.at(id)) {
      throw std::logic_error("shapes of a sweep do not follow from one another");
    }
    return runner.run(value);
  }

  void run_sweep(const Sweep& sweep) {
    values_.clear();
    for (const ValueId id : sweep.loads) {
      // Operands of the product are read by it alone.
      if (sweep.shapes.contains(id)) values_[id] = load(id, sweep.shapes.at(id));
    }
    if (sweep.matmul != kNoValue) values_[sweep.matmul] = run_product(sweep);
    for (const auto* list : {&sweep.body, &sweep.statistics, &sweep.tail}) {
      for (const ValueId id : *list) values_[id] = run_node(sweep, id);
    }
    for (const ValueId id : sweep.stores) store(id, sweep.shapes.at(id), values_.at(id));
  }

  const Plan& plan_;
  const Graph& graph_;
  int64_t batch_;
  std::span<const ingot_tensor> tensors_;
  std::span<const int> hosts_;
  std::vector<size_t> offsets_;
  Values workspace_;
  std::map<ValueId, Values> values_;  // of the sweep at hand
};

}  // namespace

void interpret(const Plan& plan, int64_t batch, std::span<const ingot_tensor> tensors,
               std::span<const int> hosts) {
  Interpreter(plan, batch, tensors, hosts).run();
}

}  // namespace ingot::testing
