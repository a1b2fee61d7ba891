// Shapes and dtypes of nodes from their arguments, and the invariants of a graph.
#include <algorithm>
#include <cmath>

#include "graph/limits.h"
#include "graph/pointwise.h"
#include "support/error.h"

namespace ingot {
namespace {

bool is_integral_constant(const Node& node) {
  return node.kind == NodeKind::constant && std::trunc(node.constant) == node.constant;
}

// The wider of two floating dtypes; f16 and bf16 have f32 as their common one.
DType wider_floating(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::f64 || b == DType::f64) return DType::f64;
  return DType::f32;
}

DType promote(DType a, DType b) {
  if (is_floating(a) && is_floating(b)) return wider_floating(a, b);
  if (is_floating(a)) return a;
  if (is_floating(b)) return b;
  return a == DType::i64 || b == DType::i64 ? DType::i64 : DType::boolean;
}

// Common dtype of arguments. Constants are weak, as Python's numbers are in PyTorch: they adopt the
// others' dtype, except that a fraction among integers gives f32.
DType common_dtype(const Graph& graph, const ValueId* first, const ValueId* last) {
  bool any_strong = false, fraction = false;
  DType strong = DType::boolean, weak = DType::boolean;
  for (const ValueId* id = first; id != last; ++id) {
    const Node& arg = graph[*id];
    if (arg.kind == NodeKind::constant) {
      weak = promote(weak, arg.dtype);
      fraction = fraction || !is_integral_constant(arg);
    } else {
      strong = promote(strong, arg.dtype);
      any_strong = true;
    }
  }
  if (!any_strong) return weak;
  if (first + 1 == last || is_floating(strong)) return strong;
  if (fraction) return DType::f32;
  // An integer beside a bool makes an integer; without constants, `strong` is the answer already.
  const bool any_weak =
      std::any_of(first, last, [&](ValueId id) { return graph[id].kind == NodeKind::constant; });
  return any_weak ? DType::i64 : strong;
}

DType pointwise_dtype(const Graph& graph, const Node& node) {
  const ValueId* first = node.args.data();
  const ValueId* last = first + node.args.size();
  const DTypeRule rule = pointwise_row(node.op).dtype;
  if (rule == DTypeRule::given) return node.dtype;
  if (rule == DTypeRule::truth) return DType::boolean;
  const DType dtype = common_dtype(graph, rule == DTypeRule::chosen ? first + 1 : first, last);
  if (rule == DTypeRule::numeric && dtype == DType::boolean) {
    fail(INGOT_INVALID_ARGUMENT,
         "{} is not defined on bool: cast to a number first, or use the logical operators",
         name_of(node.op));
  }
  return rule == DTypeRule::real && !is_floating(dtype) ? DType::f32 : dtype;
}

DType reduce_dtype(const Graph& graph, const Node& node) {
  const DType dtype = graph[node.args[0]].dtype;
  switch (node.finish) {
    case Finish::sum:
      return is_floating(dtype) ? dtype : DType::i64;
    case Finish::max:
    case Finish::min:
      return dtype;
    case Finish::argmax:
      return DType::i64;
    default:
      break;
  }
  if (!is_floating(dtype)) {
    fail(INGOT_INVALID_ARGUMENT, "{} needs a floating dtype, got {}: cast first",
         name_of(node.finish), name_of(dtype));
  }
  return dtype;
}

Shape matmul_shape(const Graph& graph, const Node& node) {
  const Shape& a = graph[node.args[0]].shape;
  const Shape& b = graph[node.args[1]].shape;
  const int64_t inner = node.transpose_b ? b.features : b.rows;
  if (a.groups != 1 || b.groups != 1) {
    fail(INGOT_INVALID_ARGUMENT, "matmul takes operands with one group, got {} and {}",
         to_string(a), to_string(b));
  }
  if (a.features != inner) {
    fail(INGOT_INVALID_ARGUMENT, "matmul of {} with {}{}: inner extents {} and {} differ",
         to_string(a), to_string(b), node.transpose_b ? " (transposed)" : "", a.features, inner);
  }
  return {a.batched || b.batched, a.rows, 1, node.transpose_b ? b.rows : b.features};
}

size_t expected_arguments(const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
    case NodeKind::constant:
      return 0;
    case NodeKind::matmul:
      return 2;
    case NodeKind::pointwise:
      return static_cast<size_t>(arity_of(node.op));
    case NodeKind::reduce:
    case NodeKind::view:
    case NodeKind::scan:
      return 1;
  }
  return 0;
}

void check_extents(const Shape& shape) {
  if (shape.rows < 1 || shape.groups < 1 || shape.features < 1) {
    fail(INGOT_INVALID_ARGUMENT, "shape {} has an extent below 1", to_string(shape));
  }
  int64_t elements = 0;
  if (__builtin_mul_overflow(shape.rows, shape.groups, &elements) ||
      __builtin_mul_overflow(elements, shape.features, &elements) || elements > kMostElements) {
    fail(INGOT_INVALID_ARGUMENT, "shape {} has too many elements", to_string(shape));
  }
}

void check_node(const Graph& graph, size_t id) {
  const Node& node = graph.nodes[id];
  if (node.args.size() != expected_arguments(node)) {
    fail(INGOT_INVALID_ARGUMENT, "takes {} arguments, got {}", expected_arguments(node),
         node.args.size());
  }
  for (const ValueId arg : node.args) {
    if (arg < 0 || static_cast<size_t>(arg) >= id) {
      fail(INGOT_INVALID_ARGUMENT, "argument {} is not an earlier value", arg);
    }
  }
  if (node.kind == NodeKind::constant && !node.shape.is_scalar()) {
    fail(INGOT_INVALID_ARGUMENT, "a constant has one element, not {}", to_string(node.shape));
  }
  const Shape shape = infer_shape(graph, node);
  if (shape != node.shape) {
    fail(INGOT_INVALID_ARGUMENT, "has shape {} where its arguments give {}", to_string(node.shape),
         to_string(shape));
  }
  const DType dtype = infer_dtype(graph, node);
  if (dtype != node.dtype) {
    fail(INGOT_INVALID_ARGUMENT, "has dtype {} where its arguments give {}", name_of(node.dtype),
         name_of(dtype));
  }
}

void check_value(const Graph& graph, ValueId value, std::string_view what) {
  if (value < 0 || static_cast<size_t>(value) >= graph.nodes.size()) {
    fail(INGOT_INVALID_ARGUMENT, "{} names value {}, which does not exist", what, value);
  }
}

void check_update(const Graph& graph, const Update& update) {
  check_value(graph, update.value, "an update");
  check_value(graph, update.buffer, "an update");
  const Node& value = graph[update.value];
  const Node& buffer = graph[update.buffer];
  if (buffer.kind != NodeKind::leaf || buffer.role != LeafRole::buffer) {
    fail(INGOT_INVALID_ARGUMENT, "an update writes value {}, which is not a buffer", update.buffer);
  }
  if (value.shape != buffer.shape || value.dtype != buffer.dtype) {
    fail(INGOT_INVALID_ARGUMENT, "buffer '{}' is {}{}, but its update is {}{}", buffer.name,
         name_of(buffer.dtype), to_string(buffer.shape), name_of(value.dtype),
         to_string(value.shape));
  }
}

DType scan_dtype(const Graph& graph, const Node& node) {
  const DType dtype = graph[node.args[0]].dtype;
  if (!is_floating(dtype)) {
    fail(INGOT_INVALID_ARGUMENT, "running sums are of floating dtypes, got {}", name_of(dtype));
  }
  return dtype;
}

}  // namespace

namespace {

Shape shape_of(const Graph& graph, const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
    case NodeKind::constant:
      return node.shape;
    case NodeKind::matmul:
      return matmul_shape(graph, node);
    case NodeKind::pointwise: {
      Shape shape = graph[node.args[0]].shape;
      for (size_t i = 1; i < node.args.size(); ++i) {
        shape = broadcast(shape, graph[node.args[i]].shape);
      }
      return shape;
    }
    case NodeKind::reduce:
      if (node.axes == 0 || node.axes >= (1u << kAxes)) {
        fail(INGOT_INVALID_ARGUMENT,
             "a reduction needs at least one of the axes batch, rows, "
             "groups, features");
      }
      return graph[node.args[0]].shape.without(node.axes);
    case NodeKind::view: {
      const Shape& from = graph[node.args[0]].shape;
      if (from.batched != node.shape.batched ||
          from.static_elements() != node.shape.static_elements()) {
        fail(INGOT_INVALID_ARGUMENT,
             "{} cannot be viewed as {}: the batch axis and the number of elements must stay",
             to_string(from), to_string(node.shape));
      }
      return node.shape;
    }
    case NodeKind::scan:
      return graph[node.args[0]].shape;
  }
  return {};
}

}  // namespace

Shape infer_shape(const Graph& graph, const Node& node) {
  // Before and after: a view's own shape must be sound before its elements are counted.
  check_extents(node.shape);
  const Shape shape = shape_of(graph, node);
  check_extents(shape);
  return shape;
}

DType infer_dtype(const Graph& graph, const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
    case NodeKind::constant:
      return node.dtype;
    case NodeKind::matmul: {
      const DType dtype = promote(graph[node.args[0]].dtype, graph[node.args[1]].dtype);
      if (!is_floating(dtype)) {
        fail(INGOT_INVALID_ARGUMENT, "matmul needs floating dtypes, got {} and {}",
             name_of(graph[node.args[0]].dtype), name_of(graph[node.args[1]].dtype));
      }
      return dtype;
    }
    case NodeKind::pointwise:
      return pointwise_dtype(graph, node);
    case NodeKind::reduce:
      return reduce_dtype(graph, node);
    case NodeKind::view:
      return graph[node.args[0]].dtype;
    case NodeKind::scan:
      return scan_dtype(graph, node);
  }
  return DType::f32;
}

void Graph::validate() const {
  for (size_t id = 0; id < nodes.size(); ++id) {
    try {
      check_node(*this, id);
    } catch (const Error& error) {
      const Node& node = nodes[id];
      const std::string_view separator = node.name.empty() || node.source.empty() ? "" : ", ";
      fail(error.status(), "value {} ({}{}{}): {}", id, node.name, separator, node.source,
           error.what());
    }
  }
  if (results.empty() && updates.empty()) {
    fail(INGOT_INVALID_ARGUMENT, "graph '{}' has no results", name);
  }
  for (const Result& result : results) check_value(*this, result.value, "a result");
  for (size_t i = 0; i < updates.size(); ++i) {
    check_update(*this, updates[i]);
    for (size_t j = 0; j < i; ++j) {
      if (updates[j].buffer == updates[i].buffer) {
        fail(INGOT_INVALID_ARGUMENT, "buffer '{}' is updated twice",
             (*this)[updates[i].buffer].name);
      }
    }
  }
}

}  // namespace ingot
