#include "common/monoid.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "not_finite.h"

namespace ingot {
namespace {

// Left to right, and as a tree whose leaves are single elements.
template <class Monoid, class T>
typename Monoid::State fold(const std::vector<T>& values) {
  auto state = Monoid::identity();
  for (const T x : values) state = Monoid::merge(state, Monoid::lift(x));
  return state;
}

template <class Monoid, class T>
typename Monoid::State tree(const std::vector<T>& values, size_t first, size_t last) {
  if (last - first == 1) return Monoid::lift(values[first]);
  const size_t middle = (first + last) / 2;
  return Monoid::merge(tree<Monoid>(values, first, middle), tree<Monoid>(values, middle, last));
}

std::vector<double> normal_values(size_t count, double mean, double deviation) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> distribution(mean, deviation);
  std::vector<double> values(count);
  for (double& x : values) x = distribution(random);
  return values;
}

TEST(Average, IsTheSumAndTheMean) {
  const std::vector<double> values = normal_values(1000, 3, 10);
  const double sum = fold<Sum<double>>(values).value;
  for (const auto state : {fold<Average<double>>(values), tree<Average<double>>(values, 0, 1000)}) {
    EXPECT_NEAR(Average<double>::value(state), sum, 1e-9);
    EXPECT_NEAR(Average<double>::mean(state), sum / 1000, 1e-12);
  }
  const auto one = Average<float>::lift(7);
  EXPECT_EQ(Average<float>::mean(Average<float>::merge(Average<float>::identity(), one)), 7);
  EXPECT_TRUE(std::isnan(Average<float>::mean(Average<float>::identity()))) << "as 0/0";
}

TEST(Moments, MatchesTwoPassesUnderALargeMean) {
  const std::vector<double> values = normal_values(1000, 1e6, 1e-2);
  double mean = 0, m2 = 0;
  for (const double x : values) mean += x / 1000;
  for (const double x : values) m2 += (x - mean) * (x - mean);
  for (const auto state : {fold<Moments<double>>(values), tree<Moments<double>>(values, 0, 1000)}) {
    EXPECT_NEAR(Moments<double>::mean(state), mean, 1e-8);
    EXPECT_NEAR(Moments<double>::variance(state), m2 / 1000, 1e-9 * m2);
    EXPECT_NEAR(Moments<double>::variance_unbiased(state), m2 / 999, 1e-9 * m2);
  }
}

TEST(Moments, InfiniteElementsHaveAMeanButNoVariance) {
  for (const auto& values : {std::vector<double>{1, kInf, 2, 3}, {kInf, kInf, 1}, {kInf}}) {
    const auto state = fold<Moments<double>>(values);
    EXPECT_EQ(Moments<double>::mean(state), kInf);
    EXPECT_TRUE(std::isnan(Moments<double>::variance(state)));
  }
  EXPECT_TRUE(std::isnan(Moments<double>::mean(fold<Moments<double>>(std::vector{kInf, -kInf}))));
  EXPECT_TRUE(std::isnan(Moments<double>::mean(fold<Moments<double>>(std::vector{1., kNan}))));
}

TEST(Moments, DifferencesThatOverflowKeepTheMean) {
  const std::vector<float> values = {3e38f, -3e38f};
  EXPECT_EQ(Moments<float>::mean(fold<Moments<float>>(values)), 0.0f);
}

TEST(Moments, IdentityIsNeutral) {
  using M = Moments<double>;
  const auto state = fold<M>(std::vector<double>{1, 2, kInf});
  for (const auto merged : {M::merge(M::identity(), state), M::merge(state, M::identity())}) {
    EXPECT_EQ(merged.count, 3);
    EXPECT_EQ(merged.mean, kInf);
  }
}

TEST(LogSumExp, IsStableAndIndependentOfOrder) {
  using L = LogSumExp<double>;
  const std::vector<double> values = {1000, 999, -1000, 1000};
  const double expected = 1000 + std::log(2 + std::exp(-1));
  EXPECT_DOUBLE_EQ(L::value(fold<L>(values)), expected);
  EXPECT_DOUBLE_EQ(L::value(tree<L>(values, 0, 4)), expected);
}

TEST(LogSumExp, InfinitiesGoWherePyTorchSendsThem) {
  using L = LogSumExp<double>;
  EXPECT_EQ(L::value(fold<L>(std::vector<double>{1, kInf})), kInf);
  EXPECT_EQ(L::value(fold<L>(std::vector<double>{-kInf, -kInf})), -kInf);
  EXPECT_TRUE(std::isnan(L::value(fold<L>(std::vector<double>{1, kNan, 2}))));
  // Softmax divides by this sum: with an infinite maximum every element of the row is NaN.
  EXPECT_TRUE(std::isnan(L::sum_exp(fold<L>(std::vector<double>{1, kInf}))));
  EXPECT_TRUE(std::isnan(L::sum_exp(fold<L>(std::vector<double>{-kInf, -kInf}))));
  EXPECT_EQ(L::sum_exp(fold<L>(std::vector<double>{-kInf, 3})), 1);
}

TEST(MaxAndMin, LetNanThrough) {
  EXPECT_TRUE(std::isnan(fold<Max<double>>(std::vector<double>{1, kNan, 2}).value));
  EXPECT_TRUE(std::isnan(fold<Min<double>>(std::vector<double>{kNan, 1, 2}).value));
  EXPECT_EQ(fold<Max<double>>(std::vector<double>{-kInf}).value, -kInf);
}

TEST(ArgMax, FirstOfEqualsAndNanAboveAll) {
  using A = ArgMax<double>;
  const auto index = [](const std::vector<double>& values) {
    auto state = A::identity();
    for (size_t i = values.size(); i-- > 0;) {  // backwards: the order must not matter
      state = A::merge(state, A::lift(values[i], static_cast<i64>(i)));
    }
    return A::index(state);
  };
  EXPECT_EQ(index({1, 3, 3, 2}), 1);
  EXPECT_EQ(index({1, kNan, kInf, kNan}), 1);
  EXPECT_EQ(index({-kInf, -kInf}), 0);
}

}  // namespace
}  // namespace ingot
