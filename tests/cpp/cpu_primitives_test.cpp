// Accuracy of the vectorised elementary functions, over bit patterns of every magnitude.
#include "cpu/primitives.h"
#include "cpu/tiling.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu_levels.h"
#include "graph/graph.h"
#include "support/element.h"

namespace ingot::cpu {
namespace {

constexpr double kWrong = 1e9;

// Distance in units of the last place of the exact value.
double ulps(double exact, float found) {
  if (std::isnan(exact)) return std::isnan(found) ? 0 : kWrong;
  const float rounded = static_cast<float>(exact);
  if (rounded == found) return std::signbit(rounded) == std::signbit(found) ? 0 : kWrong;
  if (std::isinf(rounded) != std::isinf(found)) return 1;  // one side of the overflow threshold
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(static_cast<double>(found) - exact) /
         std::ldexp(1.0, std::max(exponent - 24, -149));
}

struct Function {
  PointwiseOp op;
  double (*exact)(double);
  double limit;
};

const Function kFunctions[] = {
    {PointwiseOp::exp_, std::exp, 1.5},   {PointwiseOp::expm1_, std::expm1, 1.5},
    {PointwiseOp::log_, std::log, 1.5},   {PointwiseOp::log1p_, std::log1p, 1.5},
    {PointwiseOp::sin_, std::sin, 1.5},   {PointwiseOp::cos_, std::cos, 1.5},
    {PointwiseOp::tanh_, std::tanh, 1.5}, {PointwiseOp::erf_, std::erf, 1.5},
    {PointwiseOp::sqrt_, std::sqrt, 0.5}, {PointwiseOp::floor_, std::floor, 0},
    {PointwiseOp::ceil_, std::ceil, 0},   {PointwiseOp::trunc_, std::trunc, 0},
    {PointwiseOp::round_, std::rint, 0},
};

TEST(CpuPrimitives, UnaryFunctionsAreAccurateEverywhere) {
  constexpr uint32_t kStep = 20011;  // prime: all exponents and many mantissas
  std::vector<float> in;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStep) {
    in.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  std::vector<float> out(in.size());
  for (const Level level : levels()) {
    for (const Function& function : kFunctions) {
      MapBlock<float> block{};
      block.out = out.data();
      block.in[0] = in.data();
      block.rows = 1;
      block.columns = static_cast<int64_t>(in.size());
      primitives<float>(level).map[static_cast<int>(function.op)][0](block);
      double worst = 0;
      float where = 0;
      for (size_t i = 0; i < in.size(); ++i) {
        const double error = ulps(function.exact(in[i]), out[i]);
        if (error > worst) {
          worst = error;
          where = in[i];
        }
      }
      EXPECT_LE(worst, function.limit)
          << name_of(function.op) << " at " << where << ", " << name_of(level);
    }
  }
}

TEST(CpuPrimitives, PowerFollowsIeee) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float values[] = {0.0f,        -0.0f,
                          1.0f,        -1.0f,
                          2.0f,        -2.0f,
                          3.0f,        -3.0f,
                          0.5f,        -0.5f,
                          2.5f,        kInfinity,
                          -kInfinity,  std::numeric_limits<float>::quiet_NaN(),
                          1e30f,       -1e30f,
                          1e-40f,      -1e-40f,
                          16777217.0f, 3e38f,
                          1.0000001f,  -7.25f,
                          1e-3f};
  std::vector<float> a, b;
  for (const float x : values) {
    for (const float y : values) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  std::vector<float> out(a.size());
  for (const Level level : levels()) {
    MapBlock<float> block{};
    block.out = out.data();
    block.in[0] = a.data();
    block.in[1] = b.data();
    block.rows = 1;
    block.columns = static_cast<int64_t>(a.size());
    primitives<float>(level).map[static_cast<int>(PointwiseOp::pow_)][0](block);
    for (size_t i = 0; i < a.size(); ++i) {
      const double exact = std::pow(static_cast<double>(a[i]), static_cast<double>(b[i]));
      EXPECT_LE(ulps(exact, out[i]), 1.0) << a[i] << " ^ " << b[i] << ", " << name_of(level);
    }
  }
}

TEST(CpuPrimitives, TransposesEverySizeAndTouchesNothingElse) {
  constexpr int64_t kRowStride = 53, kColumnStride = 59;
  for (const Level level : levels()) {
    for (const int64_t rows : {1, 7, 16, 33, 50}) {
      for (const int64_t columns : {1, 3, 16, 31, 48}) {
        // One float off, since the caller's memory may lie anywhere.
        std::vector<float> in(1 + rows * kRowStride), out(1 + columns * kColumnStride, -1.0f);
        for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
        primitives<float>(level).transpose(out.data() + 1, kColumnStride, in.data() + 1, kRowStride,
                                           rows, columns);
        for (int64_t j = 0; j < columns; ++j) {
          for (int64_t i = 0; i < kColumnStride; ++i) {
            const float found = out[static_cast<size_t>(1 + j * kColumnStride + i)];
            const float wanted = i < rows ? in[static_cast<size_t>(1 + i * kRowStride + j)] : -1.0f;
            ASSERT_EQ(found, wanted) << rows << "x" << columns << ", " << name_of(level);
          }
        }
      }
    }
  }
}

TEST(CpuPrimitives, ExtremesOfARunLetNaNThroughWhereverItStands) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Level level : levels()) {
    const auto reduce = [&](ReduceMonoid monoid, const std::vector<float>& x) {
      double first = monoid == ReduceMonoid::max ? -INFINITY : INFINITY, second = 0;
      primitives<float>(level).reduce_run[static_cast<int>(monoid)](
          x.data(), static_cast<int64_t>(x.size()), {&first, &second, 0, 0});
      return first;
    };
    for (const size_t n : {1u, 15u, 16u, 17u, 64u, 95u, 131u}) {
      for (size_t at = 0; at < n; ++at) {
        std::vector<float> x(n, 1.0f);
        x[at] = 5.0f;
        ASSERT_EQ(reduce(ReduceMonoid::max, x), 5.0) << at << " of " << n;
        x[at] = -5.0f;
        ASSERT_EQ(reduce(ReduceMonoid::min, x), -5.0) << at << " of " << n;
        x[at] = kNan;
        ASSERT_TRUE(std::isnan(reduce(ReduceMonoid::max, x))) << at << " of " << n;
        ASSERT_TRUE(std::isnan(reduce(ReduceMonoid::min, x))) << at << " of " << n;
      }
    }
  }
}

TEST(CpuPrimitives, ShortRunsAreTurnedAndLongOnesNot) {
  const AxisMask features = axis_bit(kFeatures);
  EXPECT_EQ(register_order({512, 1, 1, 16}, features),
            (AxisOrder{kRows, kGroups, kFeatures, kBatch}));
  EXPECT_EQ(register_order({1, 1, 512, 16}, features),
            (AxisOrder{kBatch, kRows, kFeatures, kGroups}));
  EXPECT_EQ(register_order({8, 1, 1, 1000}, features), kNaturalOrder);
  EXPECT_EQ(register_order({512, 1, 1, 16}, 0), kNaturalOrder);
  EXPECT_EQ(register_order({2, 1, 1, 16}, features), kNaturalOrder);
  // The innermost axis is kept: its vectors are full as they lie.
  EXPECT_EQ(register_order({16, 1, 16, 32}, axis_bit(kGroups)), kNaturalOrder);
}

TEST(CpuPrimitives, MemoryFormatsRoundAsTheScalarOnes) {
  std::vector<float> in;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 65521) {
    in.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  const auto n = static_cast<int64_t>(in.size());
  for (const Level level : levels()) {
    for (const int dtype : {INGOT_F32, INGOT_F64, INGOT_F16, INGOT_BF16, INGOT_I64, INGOT_BOOL}) {
      for (const int64_t stride : {1, 3}) {
        const auto bytes = static_cast<size_t>(element_size(dtype) * n * stride);
        std::vector<std::byte> found(bytes + 1), expected(bytes);
        std::byte* misaligned = found.data() + 1;
        primitives<float>(level).store[dtype](misaligned, stride, in.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          store_element(expected.data(), dtype, i * stride, in[static_cast<size_t>(i)]);
        }
        std::vector<float> back(in.size());
        primitives<float>(level).load[dtype](back.data(), misaligned, stride, n);
        if (const auto round = primitives<float>(level).round[dtype]; round != nullptr) {
          std::vector<float> rounded = in;
          MapBlock<float> block{};
          block.out = rounded.data();
          block.in[0] = rounded.data();
          block.rows = 1;
          block.columns = n;
          round(block);
          ASSERT_EQ(std::memcmp(rounded.data(), back.data(), in.size() * sizeof(float)), 0);
        }
        for (int64_t i = 0; i < n; ++i) {
          const auto truth = static_cast<float>(load_element(expected.data(), dtype, i * stride));
          const float value = back[static_cast<size_t>(i)];
          ASSERT_TRUE(value == truth || (std::isnan(value) && std::isnan(truth)))
              << in[static_cast<size_t>(i)] << " as dtype " << dtype << " gives " << value
              << ", not " << truth << ", " << name_of(level);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ingot::cpu
