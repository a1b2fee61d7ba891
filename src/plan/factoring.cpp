#include "plan/factoring.h"

#include <algorithm>

namespace ingot {

Factoring::Factoring(const Shape& shape) {
  const int64_t total = shape.static_elements();
  for (const int64_t cut : {shape.features, shape.groups * shape.features}) {
    if (cut != 1 && cut != total) cuts_.insert(cut);
  }
}

bool Factoring::splits(const Factoring& other) const {
  return std::includes(cuts_.begin(), cuts_.end(), other.cuts_.begin(), other.cuts_.end());
}

std::optional<Factoring> Factoring::common(const Factoring& a, const Factoring& b, int64_t total) {
  Factoring both = a;
  both.cuts_.insert(b.cuts_.begin(), b.cuts_.end());
  if (both.cuts_.size() > 2) return std::nullopt;
  int64_t previous = 1;
  for (const int64_t cut : both.cuts_) {
    if (cut % previous != 0) return std::nullopt;
    previous = cut;
  }
  if (total % previous != 0) return std::nullopt;
  return both;
}

Shape Factoring::shape(int64_t total, bool batched, const Shape& preferred) const {
  if (preferred.static_elements() == total && Factoring(preferred) == *this) {
    Shape shape = preferred;
    shape.batched = batched;
    return shape;
  }
  if (cuts_.empty()) return {batched, 1, 1, total};
  const int64_t inner = *cuts_.begin(), outer = *cuts_.rbegin();
  if (cuts_.size() == 1) return {batched, 1, total / inner, inner};
  return {batched, total / outer, outer / inner, inner};
}

Shape seen_through_broadcast(const Shape& shape, const Shape& seen, const Shape& arg) {
  Shape result = seen;
  result.batched = arg.batched;
  int64_t* const extents[] = {&result.features, &result.groups, &result.rows};
  const int64_t whole[] = {shape.features, shape.groups, shape.rows};
  const int64_t part[] = {arg.features, arg.groups, arg.rows};
  size_t axis = 0;  // walks shape's axes, innermost first
  int64_t covered = 1;
  for (int64_t* extent : extents) {
    if (*extent == 1) continue;
    while (axis < 3 && covered == whole[axis]) {
      ++axis;
      covered = 1;
    }
    if (axis == 3) break;
    covered *= *extent;
    if (part[axis] == 1) *extent = 1;
  }
  return result;
}

}  // namespace ingot
