#include "graph/pointwise.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace ingot {
namespace {

namespace ranges {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

ValueRange unknown(ValueRange, ValueRange) {
  return {};
}
ValueRange sum(ValueRange a, ValueRange b) {
  return {a.low + b.low, a.high + b.high};
}
ValueRange difference(ValueRange a, ValueRange b) {
  return {a.low - b.high, a.high - b.low};
}
// 0 · ∞ counts as 0: elements that are themselves infinite have a product of NaN, those that come
// near have one near 0.
ValueRange product(ValueRange a, ValueRange b) {
  const auto times = [](double x, double y) { return x == 0 || y == 0 ? 0 : x * y; };
  const auto [low, high] = std::minmax(
      {times(a.low, b.low), times(a.low, b.high), times(a.high, b.low), times(a.high, b.high)});
  return {low, high};
}
ValueRange negated(ValueRange a, ValueRange) {
  return {-a.high, -a.low};
}
ValueRange not_negative(ValueRange, ValueRange) {
  return {0, kInfinity};
}
ValueRange zero_to_one(ValueRange, ValueRange) {
  return {0, 1};
}
ValueRange within_one(ValueRange, ValueRange) {
  return {-1, 1};
}
ValueRange exponential(ValueRange a, ValueRange) {
  return {std::exp(a.low), std::exp(a.high)};
}
ValueRange rectified(ValueRange a, ValueRange) {
  return {std::max(a.low, 0.0), std::max(a.high, 0.0)};
}
ValueRange larger(ValueRange a, ValueRange b) {
  return {std::max(a.low, b.low), std::max(a.high, b.high)};
}
ValueRange smaller(ValueRange a, ValueRange b) {
  return {std::min(a.low, b.low), std::min(a.high, b.high)};
}

}  // namespace ranges

constexpr PointwiseRow kTable[] = {
#define INGOT_POINTWISE_ROW(name, arity, dtype, cost, range, expression) \
  {#name, arity, DTypeRule::dtype, cost, ranges::range},
    INGOT_POINTWISE_OPERATORS(INGOT_POINTWISE_ROW)
#undef INGOT_POINTWISE_ROW
        {"cast", 1, DTypeRule::given, 1, ranges::unknown}};

}  // namespace

const PointwiseRow& pointwise_row(PointwiseOp op) {
  return kTable[static_cast<size_t>(op)];
}
std::string_view name_of(PointwiseOp op) {
  return pointwise_row(op).name;
}
int arity_of(PointwiseOp op) {
  return pointwise_row(op).arity;
}

bool find_pointwise(std::string_view name, PointwiseOp* op) {
  const auto end = std::end(kTable) - 1;  // without cast
  const auto found = std::find_if(std::begin(kTable), end,
                                  [&](const PointwiseRow& row) { return row.name == name; });
  if (found == end) return false;
  *op = static_cast<PointwiseOp>(found - std::begin(kTable));
  return true;
}

}  // namespace ingot
