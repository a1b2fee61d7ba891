// What is known of values by interval arithmetic.
#include "graph/value_range.h"

#include <gtest/gtest.h>

#include <cmath>

#include "graph/builder.h"

namespace ingot {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Values {
  GraphBuilder builder;
  ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 8});

  ValueId of(PointwiseOp op, std::vector<ValueId> args) { return builder.pointwise(op, args); }
  ValueId constant(double value) { return builder.constant(value); }
  ValueRange range(ValueId value) {
    builder.result(value, "y");
    const Graph graph = builder.take();
    return ValueRanges(graph).of(graph.results[0].value);
  }
};

void expect_range(const ValueRange& found, double low, double high) {
  EXPECT_DOUBLE_EQ(found.low, low);
  EXPECT_DOUBLE_EQ(found.high, high);
}

TEST(ValueRange, NothingIsKnownOfAnInput) {
  Values v;
  expect_range(v.range(v.of(PointwiseOp::mul_, {v.x, v.x})), -kInfinity, kInfinity);
}

TEST(ValueRange, TheDenominatorOfMishIsModerate) {
  Values v;
  const ValueId e = v.of(PointwiseOp::exp_, {v.of(PointwiseOp::minimum_, {v.x, v.constant(20)})});
  const ValueId n = v.of(PointwiseOp::mul_, {e, v.of(PointwiseOp::add_, {e, v.constant(2)})});
  const double top = std::exp(20.0);
  expect_range(v.range(v.of(PointwiseOp::add_, {n, v.constant(2)})), 2, top * (top + 2) + 2);
}

TEST(ValueRange, SignsCrossInProductsAndDifferences) {
  Values v;
  const ValueId t = v.of(PointwiseOp::tanh_, {v.x});
  const ValueId scaled = v.of(PointwiseOp::mul_, {t, v.constant(-3)});
  expect_range(v.range(v.of(PointwiseOp::sub_, {v.constant(1), scaled})), -2, 4);
}

TEST(ValueRange, ZeroTimesUnboundedIsStillAnInterval) {
  Values v;
  const ValueId r = v.of(PointwiseOp::relu_, {v.x});
  expect_range(v.range(v.of(PointwiseOp::mul_, {r, v.of(PointwiseOp::sigmoid_, {v.x})})), 0,
               kInfinity);
}

TEST(ValueRange, UnboundedDifferencesAreUnknownRatherThanNaN) {
  Values v;
  const ValueId r = v.of(PointwiseOp::relu_, {v.x});
  expect_range(v.range(v.of(PointwiseOp::sub_, {r, r})), -kInfinity, kInfinity);
}

}  // namespace
}  // namespace ingot
