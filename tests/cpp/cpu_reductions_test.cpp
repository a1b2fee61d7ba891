// Reductions of many rows at once against those of one run after the other.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/interpreter.h"
#include "cpu/primitives.h"
#include "cpu_levels.h"

namespace ingot::cpu {
namespace {

constexpr ReduceMonoid kMonoids[] = {ReduceMonoid::sum, ReduceMonoid::max, ReduceMonoid::min,
                                     ReduceMonoid::moments, ReduceMonoid::log_sum_exp};
constexpr int64_t kRows = 37;

struct States {
  std::vector<double> first, second;
};

States cleared(ReduceMonoid monoid, int64_t n) {
  States states{std::vector<double>(static_cast<size_t>(n)),
                std::vector<double>(static_cast<size_t>(n))};
  clear_states(monoid, {states.first.data(), states.second.data()}, n);
  return states;
}

// `rows_at_a_time` rows a call; 0: by runs.
States reduce(Level level, ReduceMonoid monoid, const std::vector<float>& x, int64_t columns,
              int64_t stride, int64_t rows_at_a_time) {
  States states = cleared(monoid, kRows);
  const Primitives<float>& table = primitives<float>(level);
  const auto index = static_cast<size_t>(monoid);
  for (int64_t r = 0; r < kRows; r += std::max<int64_t>(1, rows_at_a_time)) {
    const StateBlock block{states.first.data() + r, states.second.data() + r, 0, 0};
    if (rows_at_a_time == 0) {
      table.reduce_run[index](x.data() + r * stride, columns, block);
    } else {
      table.reduce_rows[index](x.data() + r * stride, stride, std::min(rows_at_a_time, kRows - r),
                               columns, block);
    }
  }
  return states;
}

void expect_same(double found, double expected, double tolerance, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(found)) << what << ": " << found;
  } else if (std::isinf(expected)) {
    EXPECT_EQ(found, expected) << what;
  } else {
    EXPECT_NEAR(found, expected, tolerance) << what;
  }
}

std::string describe(Level level, ReduceMonoid monoid, int64_t columns, int64_t row) {
  return std::string(name_of(level)) + ", monoid " + std::to_string(static_cast<int>(monoid)) +
         ", " + std::to_string(columns) + " columns, row " + std::to_string(row);
}

void check(const std::vector<float>& x, int64_t columns, int64_t stride) {
  for (const Level level : levels()) {
    for (const ReduceMonoid monoid : kMonoids) {
      const States rows = reduce(level, monoid, x, columns, stride, kRows);
      const States alone = reduce(level, monoid, x, columns, stride, 1);
      const States runs = reduce(level, monoid, x, columns, stride, 0);
      const double scale = 1e-6 * static_cast<double>(columns);
      for (size_t r = 0; r < static_cast<size_t>(kRows); ++r) {
        const std::string what = describe(level, monoid, columns, static_cast<int64_t>(r));
        expect_same(rows.first[r], runs.first[r], scale, what + ", first");
        expect_same(rows.second[r], runs.second[r], 10 * scale, what + ", second");
        // A row's bits do not depend on those beside it.
        expect_same(rows.first[r], alone.first[r], 0, what + ", first alone");
        expect_same(rows.second[r], alone.second[r], 0, what + ", second alone");
      }
    }
  }
}

TEST(CpuReductions, RowsTogetherEqualRunsOfAnyLength) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  for (const int64_t columns : {1, 2, 7, 15, 16, 17, 33, 64, 79, 128, 333, 1000}) {
    const int64_t stride = columns + 3;
    std::vector<float> x(static_cast<size_t>(kRows * stride), 1e30f);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < columns; ++j)
        x[static_cast<size_t>(r * stride + j)] = normal(generator);
    }
    check(x, columns, stride);
  }
}

TEST(CpuReductions, NaNAndInfinityOfARowStayInIt) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t columns : {3, 16, 70}) {
    const int64_t stride = columns;
    std::vector<float> x(static_cast<size_t>(kRows * stride));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 11) * 0.25f;
    const auto at = [&](int64_t row, int64_t column) -> float& {
      return x[static_cast<size_t>(row * stride + column)];
    };
    at(1, 0) = NAN;
    at(2, columns - 1) = NAN;
    at(4, columns / 2) = kInfinity;
    at(6, 1) = -kInfinity;
    at(8, 0) = kInfinity;
    at(8, 1) = -kInfinity;
    for (int64_t j = 0; j < columns; ++j) at(20, j) = -kInfinity;
    for (int64_t j = 0; j < columns; ++j) at(21, j) = kInfinity;
    check(x, columns, stride);
  }
}

TEST(CpuReductions, AMeanFarFromZeroKeepsTheDigitsOfTheVariance) {
  constexpr int64_t kColumns = 75;
  std::vector<float> x(static_cast<size_t>(kRows * kColumns));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 1e6f + static_cast<float>(i % 2);
  for (const Level level : levels()) {
    const States states = reduce(level, ReduceMonoid::moments, x, kColumns, kColumns, kRows);
    for (size_t r = 0; r < static_cast<size_t>(kRows); ++r) {
      const double ones = static_cast<double>(r % 2 == 0 ? 37 : 38);
      const double mean = ones / 75;
      EXPECT_NEAR(states.first[r], 1e6 + mean, 1e-6) << name_of(level);
      EXPECT_NEAR(states.second[r], ones * (1 - mean), 1e-4) << name_of(level);
    }
  }
}

TEST(CpuReductions, NoSquaresAreNegativeWhereTheyAreTooSmallForTheType) {
  for (const int64_t columns : {int64_t{5}, int64_t{16}, int64_t{75}, int64_t{5000}}) {
    std::vector<float> x(static_cast<size_t>(kRows * columns));
    for (size_t i = 0; i < x.size(); ++i) x[i] = 1e-30f * static_cast<float>(i * 7 % 13);
    for (const Level level : levels()) {
      const States states = reduce(level, ReduceMonoid::moments, x, columns, columns, kRows);
      for (size_t r = 0; r < static_cast<size_t>(kRows); ++r) {
        EXPECT_FALSE(std::signbit(states.second[r])) << name_of(level) << " " << columns;
      }
    }
  }
}

}  // namespace
}  // namespace ingot::cpu
