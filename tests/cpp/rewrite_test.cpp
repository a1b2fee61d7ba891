#include "rewrite/rewrite.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "graph/builder.h"
#include "graph/evaluate.h"
#include "graph_testing.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

constexpr Shape kFull{true, 1, 1, 6}, kPerFeature{false, 1, 1, 6}, kPerRow{true, 1, 1, 1};
constexpr AxisMask kOverBatch = axis_bit(kBatch), kOverFeatures = axis_bit(kFeatures);

class RewriteTest : public ::testing::Test {
 protected:
  GraphBuilder builder_;
  ValueId x_ = builder_.leaf(LeafRole::input, "x", DType::f32, kFull);
  ValueId vector_ = builder_.leaf(LeafRole::parameter, "v", DType::f32, kPerFeature);
  ValueId row_ = builder_.leaf(LeafRole::input, "r", DType::f32, kPerRow);

  ValueId op(PointwiseOp op, std::vector<ValueId> args) {
    return builder_.pointwise(op, std::move(args));
  }
  ValueId number(double value) { return builder_.constant(value); }

  // Rewrites at the level, checks that the meaning stays, and returns the names of the rules used.
  std::vector<std::string> rewritten(ValueId result, RewriteLevel level,
                                     const std::vector<double>& specials = {}) {
    builder_.result(result, "y");
    before_ = builder_.take();
    std::vector<AppliedRewrite> applied;
    after_ = rewrite(before_, level, &applied);
    testing::Bindings expected(before_, 4, 1), actual(before_, 4, 1);
    for (size_t i = 0; i < specials.size(); ++i) {
      expected.leaf(0)[3 * i] = actual.leaf(0)[3 * i] = specials[i];
    }
    evaluate(before_, 4, expected.tensors());
    evaluate(after_, 4, actual.tensors());
    EXPECT_TRUE(testing::agree(expected, actual)) << to_string(before_) << to_string(after_);
    std::vector<std::string> names;
    for (const AppliedRewrite& rewrite : applied) names.push_back(rewrite.rule);
    return names;
  }

  size_t count(NodeKind kind) const {
    return static_cast<size_t>(std::count_if(after_.nodes.begin(), after_.nodes.end(),
                                             [&](const Node& node) { return node.kind == kind; }));
  }

  Graph before_, after_;
  const std::vector<double> specials_ = {INFINITY, -INFINITY, NAN, 0.0, -0.0};
};

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;

TEST_F(RewriteTest, CommonSubexpressionsBecomeOneValue) {
  const ValueId sum =
      op(PointwiseOp::add_, {op(PointwiseOp::exp_, {x_}), op(PointwiseOp::exp_, {x_})});
  EXPECT_THAT(rewritten(sum, RewriteLevel::ieee, specials_), Contains("common-subexpressions"));
  EXPECT_EQ(count(NodeKind::pointwise), 2u);
}

TEST_F(RewriteTest, AProductWithAMatrixIsNotOneWithItsTranspose) {
  const ValueId square = builder_.leaf(LeafRole::parameter, "w", DType::f32, {false, 6, 1, 6});
  const ValueId both = op(PointwiseOp::sub_,
                          {builder_.matmul(x_, square, true), builder_.matmul(x_, square, false)});
  EXPECT_THAT(rewritten(both, RewriteLevel::ieee), IsEmpty());
  EXPECT_EQ(count(NodeKind::matmul), 2u);
}

TEST_F(RewriteTest, ZerosOfDifferentSignsStayApart) {
  const ValueId a = op(PointwiseOp::div_, {number(1), number(0.0)});
  const ValueId b = op(PointwiseOp::div_, {number(1), number(-0.0)});
  const ValueId sum = op(PointwiseOp::add_,
                         {op(PointwiseOp::maximum_, {x_, a}), op(PointwiseOp::minimum_, {x_, b})});
  rewritten(sum, RewriteLevel::ieee);
}

TEST_F(RewriteTest, ConstantsAreFoldedAndNeutralOnesVanish) {
  const ValueId one = op(PointwiseOp::sub_, {number(3), number(2)});
  const ValueId y = op(PointwiseOp::mul_, {op(PointwiseOp::relu_, {x_}), one});
  EXPECT_THAT(rewritten(y, RewriteLevel::ieee, specials_),
              AllOf(Contains("constant-folding"), Contains("neutral-operands")));
  EXPECT_EQ(count(NodeKind::pointwise), 1u);
}

TEST_F(RewriteTest, AddingZeroStays) {
  EXPECT_THAT(rewritten(op(PointwiseOp::add_, {x_, number(0)}), RewriteLevel::ieee), IsEmpty());
}

TEST_F(RewriteTest, SubtractingZeroVanishesUnlessItIsNegative) {
  EXPECT_THAT(rewritten(op(PointwiseOp::sub_, {x_, number(0.0)}), RewriteLevel::ieee, specials_),
              Contains("neutral-operands"));
}

TEST_F(RewriteTest, SubtractingNegativeZeroStays) {
  EXPECT_THAT(rewritten(op(PointwiseOp::sub_, {x_, number(-0.0)}), RewriteLevel::ieee), IsEmpty());
}

TEST_F(RewriteTest, FactorsMergeWhereNeitherOverflowsFirst) {
  const ValueId grown = op(PointwiseOp::mul_, {op(PointwiseOp::mul_, {x_, number(2)}), number(3)});
  EXPECT_THAT(rewritten(grown, RewriteLevel::ieee, specials_), Contains("merge-constants"));
  EXPECT_EQ(count(NodeKind::pointwise), 1u);
}

TEST_F(RewriteTest, DivisionsByPowersOfTwoAreProducts) {
  const ValueId quotient = op(PointwiseOp::div_, {x_, number(8)});
  EXPECT_THAT(rewritten(quotient, RewriteLevel::ieee, specials_), Contains("merge-constants"));
}

TEST_F(RewriteTest, OtherDivisionsStay) {
  EXPECT_THAT(rewritten(op(PointwiseOp::div_, {x_, number(3)}), RewriteLevel::ieee), IsEmpty());
}

TEST_F(RewriteTest, FactorsOfBothKindsStay) {
  const ValueId mixed =
      op(PointwiseOp::mul_, {op(PointwiseOp::mul_, {x_, number(1e30)}), number(1e-30)});
  EXPECT_THAT(rewritten(mixed, RewriteLevel::ieee), IsEmpty());
}

TEST_F(RewriteTest, ProductsThatUnderflowStay) {
  const ValueId tiny =
      op(PointwiseOp::mul_, {op(PointwiseOp::mul_, {x_, number(1e-30)}), number(1e-30)});
  EXPECT_THAT(rewritten(tiny, RewriteLevel::ieee), Not(Contains("merge-constants")));
}

TEST_F(RewriteTest, MonotoneOperatorsMoveBehindExtrema) {
  const ValueId scaled = op(PointwiseOp::mul_, {x_, number(-2)});
  const ValueId top = builder_.reduce(Finish::max, scaled, kOverFeatures);
  EXPECT_THAT(rewritten(top, RewriteLevel::ieee, specials_), Contains("monotone-reductions"));
}

TEST_F(RewriteTest, ANegativeShiftKeepsAMaximum) {
  const ValueId shifted = op(PointwiseOp::add_, {x_, number(-2)});
  const ValueId top = builder_.reduce(Finish::max, shifted, kOverFeatures);
  EXPECT_THAT(rewritten(top, RewriteLevel::ieee, specials_), Contains("monotone-reductions"));
}

TEST_F(RewriteTest, AZeroFactorStaysBeforeAnExtremum) {
  const ValueId scaled = op(PointwiseOp::mul_, {x_, number(0)});
  const ValueId top = builder_.reduce(Finish::max, scaled, kOverFeatures);
  EXPECT_THAT(rewritten(top, RewriteLevel::ieee, specials_), Not(Contains("monotone-reductions")));
}

TEST_F(RewriteTest, SamplesAreReducedWithinFirstBehindAReductionWithin) {
  for (const Finish finish : {Finish::sum, Finish::mean, Finish::max, Finish::min}) {
    builder_ = GraphBuilder();
    const ValueId x = builder_.leaf(LeafRole::input, "x", DType::f32, {true, 3, 1, 6});
    const ValueId top = builder_.reduce(Finish::max, x, kOverFeatures);
    const ValueId left = op(PointwiseOp::sub_, {x, top});
    const AxisMask all = kOverBatch | axis_bit(kRows) | kOverFeatures;
    EXPECT_THAT(rewritten(builder_.reduce(finish, left, all), RewriteLevel::ieee),
                Contains("within-samples-first"));
    const Node& last = after_[after_.results[0].value];
    EXPECT_EQ(last.axes, kOverBatch | axis_bit(kRows)) << "rows are not one another's";
    EXPECT_EQ(after_[last.args[0]].axes, kOverFeatures);
  }
}

TEST_F(RewriteTest, OtherReductionsOverSamplesStayWhole) {
  const auto over_all = [&](Finish finish, ValueId value) {
    return rewritten(builder_.reduce(finish, value, kOverBatch | kOverFeatures),
                     RewriteLevel::ieee);
  };
  const auto behind_a_row = [&](DType dtype) {
    builder_ = GraphBuilder();
    const ValueId x = builder_.leaf(LeafRole::input, "x", dtype, kFull);
    return op(PointwiseOp::sub_, {x, builder_.reduce(Finish::max, x, kOverFeatures)});
  };
  EXPECT_THAT(over_all(Finish::sum, op(PointwiseOp::exp_, {x_})), IsEmpty()) << "one sweep anyway";
  EXPECT_THAT(over_all(Finish::variance, behind_a_row(DType::f32)), IsEmpty()) << "no sum of them";
  EXPECT_THAT(over_all(Finish::sum, behind_a_row(DType::bf16)), IsEmpty()) << "rounded between";
  builder_ = GraphBuilder();
  const ValueId x = builder_.leaf(LeafRole::input, "x", DType::f32, kFull);
  const ValueId normal = op(PointwiseOp::sub_, {x, builder_.reduce(Finish::mean, x, kOverBatch)});
  EXPECT_THAT(over_all(Finish::sum, normal), IsEmpty()) << "of a reduction over samples";
}

TEST_F(RewriteTest, ABiasVanishesBeforeBatchStatistics) {
  const ValueId y = op(PointwiseOp::add_, {x_, vector_});
  const ValueId mean = builder_.reduce(Finish::mean, y, kOverBatch);
  const ValueId variance = builder_.reduce(Finish::variance, y, kOverBatch);
  const ValueId normal = op(PointwiseOp::mul_, {op(PointwiseOp::sub_, {y, mean}), variance});
  EXPECT_THAT(rewritten(normal, RewriteLevel::real), Contains("shift-invariance"));
  EXPECT_EQ(count(NodeKind::pointwise), 2u) << to_string(after_);
}

TEST_F(RewriteTest, ShiftsStayAtTheIeeeLevel) {
  const ValueId y = op(PointwiseOp::add_, {x_, vector_});
  const ValueId variance = builder_.reduce(Finish::variance, y, kOverBatch);
  EXPECT_THAT(rewritten(variance, RewriteLevel::ieee), IsEmpty());
}

TEST_F(RewriteTest, ARowShiftVanishesBeforeSoftmax) {
  const ValueId y = op(PointwiseOp::sub_, {x_, row_});
  const ValueId top = builder_.reduce(Finish::max_exponent, y, kOverFeatures);
  const ValueId sum = builder_.reduce(Finish::sum_exp, y, kOverFeatures);
  const ValueId exponential = op(PointwiseOp::exp_, {op(PointwiseOp::sub_, {y, top})});
  EXPECT_THAT(rewritten(op(PointwiseOp::div_, {exponential, sum}), RewriteLevel::real),
              Contains("shift-invariance"));
  EXPECT_EQ(count(NodeKind::pointwise), 3u) << to_string(after_);
}

TEST_F(RewriteTest, WhatIsTakenFromAShiftKeepsItsSign) {
  const ValueId left = op(PointwiseOp::sub_, {row_, x_});
  const ValueId right = op(PointwiseOp::sub_, {row_, op(PointwiseOp::exp_, {x_})});
  rewritten(op(PointwiseOp::sub_, {left, right}), RewriteLevel::real);
}

TEST_F(RewriteTest, AFeatureShiftBeforeARowReductionStays) {
  const ValueId y = op(PointwiseOp::add_, {x_, vector_});
  const ValueId sum = builder_.reduce(Finish::sum_exp, y, kOverFeatures);
  EXPECT_THAT(rewritten(sum, RewriteLevel::real), IsEmpty());
}

TEST_F(RewriteTest, AScaleFoldsIntoTheAffineForm) {
  const ValueId second = builder_.leaf(LeafRole::parameter, "b", DType::f32, kPerFeature);
  const ValueId scale = builder_.leaf(LeafRole::parameter, "s", DType::f32, Shape{});
  const ValueId affine = op(PointwiseOp::add_, {op(PointwiseOp::mul_, {x_, vector_}), second});
  EXPECT_THAT(rewritten(op(PointwiseOp::mul_, {scale, affine}), RewriteLevel::real),
              Contains("fold-scale-into-affine"));
  const auto wide = std::count_if(after_.nodes.begin(), after_.nodes.end(), [](const Node& node) {
    return node.kind == NodeKind::pointwise && node.shape.batched;
  });
  EXPECT_EQ(wide, 2);
}

TEST_F(RewriteTest, TheSumOfALinearIsOneDotProduct) {
  const ValueId weight = builder_.leaf(LeafRole::parameter, "w", DType::f32, {false, 5, 1, 6});
  const ValueId bias = builder_.leaf(LeafRole::parameter, "b", DType::f32, {false, 1, 1, 5});
  const ValueId y = op(PointwiseOp::add_, {builder_.matmul(x_, weight, true), bias});
  const ValueId sum = builder_.reduce(Finish::mean, y, kOverFeatures);
  EXPECT_THAT(rewritten(sum, RewriteLevel::real), Contains("sum-of-linear"));
  for (const Node& node : after_.nodes) {
    if (node.kind == NodeKind::matmul) {
      EXPECT_EQ(node.shape, kPerRow);
    }
  }
}

TEST_F(RewriteTest, NarrowConstantsKeepTheDtypesOfTheirUsers) {
  const ValueId half = builder_.leaf(LeafRole::input, "h", DType::f16, kFull);
  // f32 constant arithmetic is strong until folded, and the sum f32.
  const ValueId c = op(PointwiseOp::exp_, {number(1)});
  const ValueId y = op(PointwiseOp::add_, {half, c});
  ASSERT_EQ(builder_.graph()[y].dtype, DType::f32);
  rewritten(y, RewriteLevel::ieee);
  EXPECT_EQ(after_[after_.results[0].value].dtype, DType::f32);
}

TEST(Rewrite, EachRuleStatesItsIdentity) {
  for (const Rule& rule : rules()) {
    EXPECT_FALSE(rule.name.empty());
    EXPECT_FALSE(rule.identity.empty());
  }
}

TEST(Rewrite, RandomGraphsKeepTheirMeaning) {
  const char* wanted = std::getenv("INGOT_RANDOM_SEEDS");
  const uint64_t seeds = wanted == nullptr ? 1500 : std::strtoull(wanted, nullptr, 10);
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Graph before = testing::random_graph(seed);
    for (const RewriteLevel level : {RewriteLevel::ieee, RewriteLevel::real}) {
      const Graph after = rewrite(before, level, nullptr);
      testing::Bindings expected(before, 3, seed), actual(before, 3, seed);
      evaluate(before, 3, expected.tensors());
      evaluate(after, 3, actual.tensors());
      ASSERT_TRUE(testing::agree(expected, actual)) << "seed " << seed << "\n"
                                                    << to_string(before) << to_string(after);
    }
  }
}

}  // namespace
}  // namespace ingot
