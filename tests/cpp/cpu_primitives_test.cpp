// Accuracy of the vectorised elementary functions, over bit patterns of every magnitude.
#include "cpu/primitives.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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

std::vector<Level> levels() {
  const Level widest = detect_isa(nlohmann::json::object()).level;
  std::vector<Level> found;
  for (const Level level : {Level::baseline, Level::avx2, Level::avx512}) {
    if (level <= widest) found.push_back(level);
  }
  return found;
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
