// How a run of elements is factored into rows, groups and features, and when several factorings
// can be seen in one: the arithmetic that lets a view be free inside a sweep.
#pragma once

#include <optional>
#include <set>

#include "graph/graph.h"

namespace ingot {

// The element distances at which a static shape is cut, 1 and the total left out: [r, g, f] has
// {f, g·f}. A factoring splits another where its cuts include the other's.
class Factoring {
 public:
  Factoring() = default;
  explicit Factoring(const Shape& shape);

  bool splits(const Factoring& other) const;
  // The coarsest factoring that splits both; nothing where three axes cannot express it.
  static std::optional<Factoring> common(const Factoring& a, const Factoring& b, int64_t total);
  // The shape with these cuts; `preferred` itself where it has them already.
  Shape shape(int64_t total, bool batched, const Shape& preferred) const;

  friend bool operator==(const Factoring&, const Factoring&) = default;

 private:
  std::set<int64_t> cuts_;
};

// `inner` is a value of shape `shape` seen as `seen` in some sweep; returns how an operand of shape
// `arg`, which broadcasts to `shape`, is seen there.
Shape seen_through_broadcast(const Shape& shape, const Shape& seen, const Shape& arg);

}  // namespace ingot
