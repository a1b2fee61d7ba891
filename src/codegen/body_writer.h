// Writes the expressions of a functor: the values of a sweep at one element, in readable C++.
//
// An element is (b, e): the sample and the flat index within it. Every value of a sweep is seen in
// the sweep's own factoring, so its index is the element's coordinates with those axes left out
// along which its extent is 1. A value that varies along features has V lanes in a vector kernel:
// an array in loops over i; everything else is a scalar.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "codegen/device_functions.h"
#include "codegen/kernel_source.h"

namespace ingot {

// The C++ type that values of a dtype are computed in: "float", "double" or "i64".
std::string compute_type(DType dtype);
// The storage type in kernels/common/scalar.cuh: "f32", "bf16", "boolean", ...
std::string storage_type(DType dtype);
std::string identifier(std::string_view text);
// "Moments<float>"; the type of a reduction's argument is the monoid's.
std::string monoid_type(MonoidKind monoid, const std::string& value_type);
// What a reduction reads off `state`, an expression of the monoid's state.
std::string finish_expression(Finish finish, MonoidKind monoid, const std::string& value_type,
                              const std::string& state);
// ".first", ".others.first", ...: the i-th of `count` states of Together<...>.
std::string together_member(size_t index);
// Upper bound of the bytes of a state.
int64_t state_bytes(MonoidKind monoid, const std::string& value_type);

// The sweep as its writers see it, and the operands that they have asked for so far.
class SweepContext {
 public:
  SweepContext(const Plan& plan, int sweep);

  const Plan& plan() const { return plan_; }
  const Graph& graph() const { return plan_.graph; }
  const Sweep& sweep() const { return sweep_; }
  const Shape& space() const { return sweep_.space; }
  const Node& node(ValueId value) const { return plan_.graph[value]; }
  const Shape& seen(ValueId value) const;

  // Whether the sweep computes the value itself (body, statistics or tail), rather than loading it.
  bool computes(ValueId value) const { return computed_.contains(value); }
  bool is_constant(ValueId value) const { return node(value).kind == NodeKind::constant; }
  // Whether it is the number of the element along the features, which need not be read.
  bool counts(ValueId value) const;
  // The value behind views that the sweep computes: they are other names of their argument.
  ValueId resolve(ValueId value) const;
  DType dtype_in_memory(ValueId value) const;
  std::string type_of(ValueId value) const { return compute_type(node(value).dtype); }
  DeviceFunctions& functions() { return functions_; }
  // v7_sub, v3_gemm_weight
  std::string name_of(ValueId value) const;

  // The field of Operands for a value that is read or written.
  std::string operand(ValueId value, bool written, bool vector);
  const std::vector<KernelOperand>& operands() const { return operands_; }
  std::string operands_struct() const;
  // For rows_turned.cuh. Operands, by value and whether they are written, whose features lie apart:
  // a kernel of vectors moves them element by element. row: the axes of what it takes for a row.
  using Apart = std::set<std::pair<ValueId, bool>>;
  void turn(Apart apart, AxisMask row);
  // An element's index is its row, of these axes, and its place there.
  void index_in_rows(AxisMask row);
  bool is_apart(ValueId value, bool written) const { return apart_.contains({value, written}); }
  void move_apart(ValueId value, bool written) { apart_.insert({value, written}); }
  // The type of an element's index in the functor, and its coordinates where that is no number.
  const std::string& index_type() const { return index_type_; }
  const std::map<Axis, std::string>& coordinates() const { return coordinates_; }

  // Results are written past the cache.
  void stream_results() { streams_ = true; }
  bool streams_results() const { return streams_; }

  // Of less than 2^31 elements.
  void index_in_32_bits() { index_type_ = "u32"; }

  // Largest vector width that the sweep's feature extent and dtypes suit (1, 2, 4 or 8).
  int width() const;
  // That of rows of so many elements which the widest vector does not divide, moved as
  // sweeps/odd_rows.cuh says; 0: it divides them, or the results do not lie in such rows.
  int odd_width(int64_t row) const;
  // Whether an operand of several features has not the space's extents: its rows, or what it has in
  // their place, begin elsewhere.
  bool lies_otherwise(ValueId value) const;

  // Vectors that go on from one row of a sample into the next: of as many elements, where rows are
  // no whole vectors but samples are, and all that is moved has the sample's extents or is one
  // value a row. 0: there are none.
  int width_across_rows() const;
  // Moves such vectors: what is one value a row has lanes, too.
  void go_across_rows() { across_rows_ = true; }
  // Whether the elements of a vector have values of their own.
  bool has_lanes(ValueId value) const;
  // Of those, values that are gathered, one by one.
  bool is_of_rows(ValueId value) const { return across_rows_ && seen(value).features == 1; }

 private:
  const Plan& plan_;
  const Sweep& sweep_;
  DeviceFunctions functions_;
  std::set<ValueId> computed_;
  std::vector<KernelOperand> operands_;
  std::map<std::pair<ValueId, bool>, size_t> index_;
  Apart apart_;
  std::string index_type_ = "i64";
  std::map<Axis, std::string> coordinates_;
  bool streams_ = false;
  bool across_rows_ = false;

  int widest() const;
};

// An expression of a value at the current element.
struct Reference {
  std::string text;
  std::string type;  // compute type
};

// One device function's text, growing as values are asked for.
class FunctionWriter {
 public:
  // Answers for values that the function does not compute (held, shared, reduced); nullopt:
  // compute.
  using Delegate = std::function<std::optional<Reference>(ValueId)>;

  enum class Lanes { vector, scalar };  // scalar: the function handles one element
  // mask: the axes along which `e` runs (the others are 0 in every index).
  FunctionWriter(SweepContext& context, Delegate delegate, Lanes lanes = Lanes::vector,
                 AxisMask mask = 0xf);

  // An expression for the element's coordinate along an axis, where there is a shorter one than by
  // dividing `e`.
  void give_coordinate(Axis axis, std::string text) { coordinates_[axis] = std::move(text); }
  // The value at this element; in a lane loop if it has lanes.
  Reference value(ValueId value);
  // A statement inside the loop over lanes, or before it.
  void lane_statement(const std::string& text) { lanes_.push_back(text); }
  void statement(const std::string& text) { head_.push_back(text); }
  // target[i] = value, or target = value where the value has no lanes.
  void assign(const std::string& target, ValueId value);
  // Writes the value to its tensor, once per element of its own.
  void store(ValueId value);
  bool has_lanes(ValueId value) const;
  // Where the current element of an operand is, or is written.
  std::string address(ValueId value, bool written = false);
  // "ingot::load(address, ", or load_apart() with the stride of the operand's features.
  std::string access(const char* function, ValueId value, bool written);
  // The current element's position in a dense array of these static extents.
  std::string flat_index(const Shape& extents);

  // The function's body, indented.
  std::string text(int indent) const;

 private:
  std::string index_arguments(const Shape& seen);
  std::string row_value(ValueId value);
  std::string coordinate(Axis axis);
  ValueId before_rounding(ValueId value) const;
  Reference load(ValueId value);
  std::optional<std::string> composition(ValueId value);
  Reference compute(ValueId value);
  Reference converted(ValueId value, const std::string& type);

  SweepContext& context_;
  Delegate delegate_;
  Lanes lanes_kind_;
  AxisMask mask_;
  std::map<Axis, std::string> coordinates_;
  std::string index_ = "e";
  std::map<ValueId, Reference> known_;
  std::vector<std::string> head_, lanes_, end_;
};

}  // namespace ingot
