// A sweep as the writers of its functor see it.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "codegen/device_functions.h"
#include "codegen/kernel_source.h"
#include "codegen/type_names.h"

namespace ingot {

// The coordinate along an axis of `extent`, of a flat index over axes within and around it.
std::string position(std::string index, int64_t inner, int64_t extent, int64_t outer);

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
  // The monoid of reductions that share a state, of values of this type.
  std::string monoid(const SharedState& state, const std::string& value_type) const;
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
  // It is the first of its thread's in a piece of one feature after another, and a distance.
  void index_in_pieces();
  // Vectors are addressed as such: their features lie side by side, which saves a multiplication.
  void address_vectors() { addresses_vectors_ = true; }
  bool addresses_vectors() const { return addresses_vectors_; }
  // The type of an element's index in the functor, and its coordinates where that is no number.
  const std::string& index_type() const { return index_type_; }
  const std::map<Axis, std::string>& coordinates() const { return coordinates_; }

  // Vectors of 16 bits that a functor holds as they are read: half of the registers.
  void hold_as_read(ValueId value) { held_as_read_.insert(value); }
  bool is_held_as_read(ValueId value) const { return held_as_read_.contains(value); }
  std::string held_as_read(ValueId value) const;  // an element of it

  // Results are written past the cache.
  void stream_results() { streams_ = true; }
  bool streams_results() const { return streams_; }

  // Of less than 2^31 elements.
  void index_in_32_bits();

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
  std::set<ValueId> held_as_read_;
  bool streams_ = false;
  bool across_rows_ = false;
  bool addresses_vectors_ = false;

  int widest() const;
  int widest_of(int64_t elements) const;  // that divides them
};

}  // namespace ingot
