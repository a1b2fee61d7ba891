// Writes the expressions of a functor: the values of a sweep at one element, in readable C++.
//
// An element is (b, e): the sample and the flat index within it. Every value of a sweep is seen in
// the sweep's own factoring, so its index is the element's coordinates with those axes left out
// along which its extent is 1. A value that varies along features has V lanes in a vector kernel:
// an array in loops over i; so has what is one value a row, where vectors go on from one row into
// the next. Everything else is a scalar.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "codegen/sweep_context.h"

namespace ingot {

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
