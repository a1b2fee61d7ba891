#include "support/element.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "not_finite.h"

namespace ingot {
namespace {

uint16_t stored_bits(double value, int32_t dtype) {
  uint16_t bits = 0;
  store_element(&bits, dtype, 0, value);
  return bits;
}

class Narrow : public ::testing::TestWithParam<int32_t> {};

TEST_P(Narrow, EveryPatternSurvivesARoundTrip) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const double value = load_element(&bits, GetParam(), 0);
    if (std::isnan(value)) {
      const uint16_t again = stored_bits(value, GetParam());
      EXPECT_TRUE(std::isnan(load_element(&again, GetParam(), 0)));
    } else {
      EXPECT_EQ(stored_bits(value, GetParam()), bits);
    }
  }
}

// Between each pair of neighbours: below, at and above the middle; ties go to the even pattern.
TEST_P(Narrow, RoundsToNearestEven) {
  const uint16_t infinity = stored_bits(kInf, GetParam());
  for (uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const auto next = static_cast<uint16_t>(bits + 1);
    const double low = load_element(&bits, GetParam(), 0);
    const double high = load_element(&next, GetParam(), 0);
    const double middle = (low + high) / 2;
    ASSERT_EQ(stored_bits(std::nextafter(middle, 0), GetParam()), bits);
    ASSERT_EQ(stored_bits(std::nextafter(middle, kInf), GetParam()), next);
    ASSERT_EQ(stored_bits(middle, GetParam()), bits % 2 == 0 ? bits : next);
  }
}

TEST_P(Narrow, OverflowsToInfinityAndKeepsTheSignOfZero) {
  const uint16_t infinity = stored_bits(kInf, GetParam());
  EXPECT_EQ(stored_bits(1e300, GetParam()), infinity);
  EXPECT_EQ(stored_bits(-1e300, GetParam()), infinity | 0x8000);
  EXPECT_EQ(stored_bits(-0.0, GetParam()), 0x8000);
  EXPECT_EQ(stored_bits(-1e-300, GetParam()), 0x8000);
}

INSTANTIATE_TEST_SUITE_P(Element, Narrow, ::testing::Values(INGOT_F16, INGOT_BF16));

#ifdef __FLT16_MAX__
TEST(Element, HalfAgreesWithTheCompiler) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 200000; ++i) {
    const double value =
        std::ldexp(static_cast<double>(random()) - 0x1p63, int(random() % 60) - 90);
    EXPECT_EQ(stored_bits(value, INGOT_F16), std::bit_cast<uint16_t>(static_cast<_Float16>(value)));
  }
}
#endif

TEST(Element, IntegersAndBooleans) {
  int64_t integer = 0;
  store_element(&integer, INGOT_I64, 0, -7.9);
  EXPECT_EQ(integer, -7);
  store_element(&integer, INGOT_I64, 0, std::nan(""));
  EXPECT_EQ(integer, std::numeric_limits<int64_t>::min());
  uint8_t flag = 7;
  EXPECT_EQ(load_element(&flag, INGOT_BOOL, 0), 1);
  store_element(&flag, INGOT_BOOL, 0, 0);
  EXPECT_EQ(flag, 0);
}

TEST(Element, MisalignedDataIsRead) {
  char bytes[16] = {};
  const float value = 2.5f;
  std::memcpy(bytes + 1, &value, sizeof value);
  EXPECT_EQ(load_element(bytes + 1, INGOT_F32, 0), 2.5);
}

}  // namespace
}  // namespace ingot
