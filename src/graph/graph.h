// The intermediate representation: a DAG of typed values over the axes
// [batch, rows, groups, features], of which only the batch has a symbolic extent.
//
// Nodes are few: leaf, constant, matrix product, pointwise, reduction (a monoid over some axes),
// view (the same elements under another factoring of rows, groups and features) and scan (running
// sums along the features). Everything else is defined by these in graph/operators.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/pointwise.cuh"

namespace ingot {

enum class DType : uint8_t { f32, f64, f16, bf16, i64, boolean };
// Names as in the graph format: "f32", ..., "bool". The *_from functions throw Error, listing what
// exists, where there is no such name.
std::string_view name_of(DType dtype);
DType dtype_from(std::string_view name);
constexpr bool is_floating(DType dtype) {
  return dtype < DType::i64;
}
// Bytes of one element.
constexpr size_t size_of(DType dtype) {
  constexpr size_t kSizes[] = {4, 8, 2, 2, 8, 1};
  return kSizes[static_cast<size_t>(dtype)];
}

enum Axis : int { kBatch = 0, kRows = 1, kGroups = 2, kFeatures = 3 };
inline constexpr int kAxes = 4;

// A set of axes, one bit each.
using AxisMask = uint8_t;
constexpr AxisMask axis_bit(Axis axis) {
  return static_cast<AxisMask>(1u << axis);
}
std::string_view name_of(Axis axis);
Axis axis_from(std::string_view name);

// Extents of a value. The batch extent is the symbolic B where `batched`, else 1. An extent of 1
// broadcasts against any other.
struct Shape {
  bool batched = false;
  int64_t rows = 1, groups = 1, features = 1;

  int64_t extent(Axis axis, int64_t batch) const;
  int64_t elements(int64_t batch) const;
  // Elements per batch entry.
  int64_t static_elements() const { return rows * groups * features; }
  // Those other than the batch along which it extends.
  AxisMask static_axes() const;
  // With extent 1 along these axes; along all others.
  Shape without(AxisMask axes) const;
  Shape only(AxisMask axes) const { return without(static_cast<AxisMask>(~axes)); }
  bool is_scalar() const { return !batched && static_elements() == 1; }
  friend bool operator==(const Shape&, const Shape&) = default;
};
std::string to_string(const Shape& shape);
// Common shape under broadcasting; throws Error naming both where there is none.
Shape broadcast(const Shape& a, const Shape& b);

enum class PointwiseOp : uint8_t {
#define INGOT_POINTWISE_ENUM(name, arity, ...) name##_,
  INGOT_POINTWISE_OPERATORS(INGOT_POINTWISE_ENUM)
#undef INGOT_POINTWISE_ENUM
      cast_  // to the node's dtype
};
std::string_view name_of(PointwiseOp op);
int arity_of(PointwiseOp op);
// False where the table has no such row; `cast` is not one.
bool find_pointwise(std::string_view name, PointwiseOp* op);

// Which monoid of common/monoid.cuh, and what is read off its final state.
enum class Finish : uint8_t {
  sum,
  max,
  min,
  argmax,
  mean,
  variance,
  variance_unbiased,  // of Moments
  max_exponent,
  sum_exp,
  log_sum_exp  // of LogSumExp: max, Σ exp(x − max), log Σ exp(x)
};
enum class MonoidKind : uint8_t {
  sum,
  max,
  min,
  argmax,
  moments,
  log_sum_exp,
  average  // of which both the sum and the mean are read
};
MonoidKind monoid_of(Finish finish);
std::string_view name_of(Finish finish);
Finish finish_from(std::string_view name);
std::string_view name_of(MonoidKind monoid);

using ValueId = int32_t;
inline constexpr ValueId kNoValue = -1;
inline bool contains(const std::vector<ValueId>& values, ValueId value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

enum class NodeKind : uint8_t { leaf, constant, matmul, pointwise, reduce, view, scan };
enum class LeafRole : uint8_t { input, parameter, buffer };

struct Node {
  NodeKind kind = NodeKind::leaf;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<ValueId> args;

  std::string name;  // leaf: its binding's name; otherwise where it came from ("bn"), may be empty
  std::string source;  // "model.py:14", may be empty

  LeafRole role = LeafRole::input;     // leaf
  bool positions = false;              // leaf: holds 0, 1, 2, … along its features
  double constant = 0;                 // constant
  bool transpose_b = false;            // matmul: a[m,k]·b[n,k] rather than a[m,k]·b[k,n]
  PointwiseOp op = PointwiseOp::add_;  // pointwise
  Finish finish = Finish::sum;         // reduce
  AxisMask axes = 0;                   // reduce: the axes that disappear (extent becomes 1)
};

// A value handed back to the caller, or written into a buffer leaf after everything has read it.
struct Result {
  ValueId value = kNoValue;
  std::string name;
};
struct Update {
  ValueId value = kNoValue;
  ValueId buffer = kNoValue;  // the leaf that is overwritten
};

// Nodes are in topological order: args precede their users. Ids are indices into `nodes`.
struct Graph {
  std::string name = "graph";
  std::vector<Node> nodes;
  std::vector<Result> results;
  std::vector<Update> updates;

  const Node& operator[](ValueId id) const { return nodes[static_cast<size_t>(id)]; }
  Node& operator[](ValueId id) { return nodes[static_cast<size_t>(id)]; }

  // Leaves in the order in which a run binds them.
  std::vector<ValueId> leaves() const;
  // Users of each node; results and updates do not count as users.
  std::vector<std::vector<ValueId>> users() const;
  // Throws Error where an invariant does not hold: order, arity, shapes, dtypes, roles.
  void validate() const;
};
std::string to_string(const Graph& graph);

// What a node's arguments make of it: the rules that the builder applies and validate() checks.
// Both throw Error where the arguments do not fit.
Shape infer_shape(const Graph& graph, const Node& node);
DType infer_dtype(const Graph& graph, const Node& node);

}  // namespace ingot
