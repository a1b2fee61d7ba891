#include "verify/measures.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/error.h"

namespace ingot {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

ErrorMeasures measure(const std::vector<double>& truth, const std::vector<float>& candidate,
                      int64_t rows) {
  const auto columns = static_cast<int64_t>(truth.size()) / rows;
  return measure_error(truth.data(), candidate.data(), INGOT_F32, rows, columns);
}

TEST(Measures, HandComputed) {
  // Rows of norms 5 and 50; errors of norms 0.5 and 1.
  const ErrorMeasures m = measure({3, 4, 30, 40}, {3.5f, 4, 30, 41}, 2);
  EXPECT_DOUBLE_EQ(m.frobenius, std::sqrt(1.25) / std::sqrt(2525));
  EXPECT_DOUBLE_EQ(m.worst_row, 0.1);
  EXPECT_DOUBLE_EQ(m.largest, 1.0 / 40);
  EXPECT_EQ(m.mismatches, 2);
  EXPECT_EQ(m.non_finite_differs, 0);
}

TEST(Measures, ToleranceIsAbsolutePlusRelative) {
  EXPECT_EQ(measure({0, 1000}, {0.99e-4f, 1000.09f}, 1).mismatches, 0);
  EXPECT_EQ(measure({0, 1000}, {1.01e-4f, 1000.11f}, 1).mismatches, 2);
}

TEST(Measures, NonFiniteAlikeIsEqualAndLeftOut) {
  const auto inf = static_cast<float>(kInf);
  const ErrorMeasures m = measure({kNan, kInf, -kInf, 1}, {std::nanf(""), inf, -inf, 1}, 1);
  EXPECT_EQ(m.frobenius, 0);
  EXPECT_EQ(m.worst_row, 0);
  EXPECT_EQ(m.largest, 0);
  EXPECT_EQ(m.mismatches, 0);
  EXPECT_EQ(m.non_finite_differs, 0);
}

TEST(Measures, NonFiniteThatDiffersIsNeverAveragedAway) {
  const auto inf = static_cast<float>(kInf);
  const float nan = std::nanf("");
  for (const auto& [truth, candidate] : std::vector<std::pair<double, float>>{
           {1, nan}, {1, inf}, {kNan, 1.f}, {kInf, -inf}, {kInf, nan}, {kNan, inf}}) {
    const ErrorMeasures m = measure({2, truth, 2, 2}, {2, candidate, 2, 2}, 2);
    EXPECT_EQ(m.non_finite_differs, 1) << truth << " against " << candidate;
    EXPECT_EQ(m.mismatches, 1);
    EXPECT_EQ(m.frobenius, kInf);
    EXPECT_EQ(m.worst_row, kInf);
    EXPECT_EQ(m.largest, kInf);
  }
}

TEST(Measures, ZeroTruth) {
  EXPECT_EQ(measure({0, 0}, {0, 0}, 1).frobenius, 0);
  EXPECT_EQ(measure({0, 0}, {1e-30f, 0}, 1).frobenius, kInf);
  // One exact row of zeros does not spoil the others.
  EXPECT_EQ(measure({0, 0, 1, 1}, {0, 0, 1, 1}, 2).worst_row, 0);
}

TEST(Measures, RangeOfSquaresDoesNotOverflow) {
  const std::vector<double> truth = {1e200, 1e-200}, candidate = {1.5e200, 1e-200};
  const ErrorMeasures m = measure_error(truth.data(), candidate.data(), INGOT_F64, 1, 2);
  EXPECT_DOUBLE_EQ(m.frobenius, 0.5);
}

TEST(Measures, ReadsNarrowDtypes) {
  const std::vector<double> truth = {1, -2};
  const std::vector<uint16_t> half = {0x3c00, 0xc000}, bfloat = {0x3f80, 0xc000};
  EXPECT_EQ(measure_error(truth.data(), half.data(), INGOT_F16, 1, 2).largest, 0);
  EXPECT_EQ(measure_error(truth.data(), bfloat.data(), INGOT_BF16, 1, 2).largest, 0);
}

TEST(Measures, RefusesWhatItCannotMeasure) {
  const double one = 1;
  EXPECT_THROW(measure_error(&one, &one, 17, 1, 1), Error);
  EXPECT_THROW(measure_error(&one, &one, INGOT_F64, -1, 1), Error);
  EXPECT_THROW(measure_error(nullptr, &one, INGOT_F64, 1, 1), Error);
  EXPECT_EQ(measure_error(nullptr, nullptr, INGOT_F64, 0, 5).frobenius, 0);
}

}  // namespace
}  // namespace ingot
