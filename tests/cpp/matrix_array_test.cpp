// Matrices by an array of their addresses: what ingot.h promises of them, and their kernels.
#include "cuda/matrix_array.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/nvrtc.h"
#include "ingot/ingot.h"

namespace ingot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Matrices {
  // Two of two lines of three, the second first; lines five apart, and four in dense memory.
  float memory[20] = {1, 2, 3, 0, 0, 4, 5, 6, 0, 0, 7, 8, 9, 0, 0, 10, 11, 12, 0, 0};
  float* addresses[2] = {memory + 10, memory};
  float dense[16] = {};
  ingot_matrix_array array = {addresses, 5, dense, 4, 2, 2, 3};
};

TEST(MatrixArray, IsGatheredLineByLine) {
  Matrices m;
  ASSERT_EQ(ingot_matrix_array_gather(&m.array, -1, nullptr), INGOT_OK) << ingot_last_error();
  EXPECT_THAT(m.dense, ::testing::ElementsAre(7, 8, 9, 0, 10, 11, 12, 0, 1, 2, 3, 0, 4, 5, 6, 0));
}

TEST(MatrixArray, IsScatteredAsBlasCountsZeros) {
  const float nan = std::nanf(""), zero = 0, half = 0.5f;
  const auto scattered = [](float product, float added, float alpha, float beta,
                            const float* alpha_at = nullptr, const float* beta_at = nullptr) {
    Matrices m;
    m.dense[9] = product;
    m.memory[1] = added;
    EXPECT_EQ(ingot_matrix_array_scatter(&m.array, alpha, beta, alpha_at, beta_at, -1, nullptr),
              INGOT_OK);
    EXPECT_EQ(m.memory[3], 0);  // between the lines
    return m.memory[1];
  };
  EXPECT_EQ(scattered(3, 4, 2, 0.5f), 8);
  EXPECT_EQ(scattered(3, nan, 2, 0), 6);
  EXPECT_EQ(scattered(nan, 4, 0, 0.5f), 2);
  EXPECT_EQ(scattered(3, 4, nan, nan, &half, &half), 3.5f);
  EXPECT_EQ(scattered(nan, nan, 1, 1, &zero, &zero), 0);
  EXPECT_TRUE(std::isnan(scattered(nan, 4, 2, 0)));
  EXPECT_TRUE(std::isnan(scattered(3, nan, 2, 0.5f)));
}

TEST(MatrixArray, RefusesWhatIsNone) {
  const auto refused = [](auto change) {
    Matrices m;
    change(m.array);
    return ingot_matrix_array_gather(&m.array, -1, nullptr) == INGOT_INVALID_ARGUMENT;
  };
  EXPECT_FALSE(refused([](ingot_matrix_array&) {}));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.matrices = nullptr; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.dense = nullptr; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.count = 0; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.leading = 2; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.dense_leading = 2; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.lines = int64_t{1} << 31; }));
  EXPECT_TRUE(refused([](ingot_matrix_array& a) { a.count = int64_t{1} << 31; }));
  EXPECT_EQ(ingot_matrix_array_gather(nullptr, -1, nullptr), INGOT_INVALID_ARGUMENT);
}

// A warp has 256 elements of a line, a block eight warps.
TEST(MatrixArray, HasAWarpForEveryPieceOfALine) {
  const auto blocks = [](int64_t count, int lines, int length) {
    return matrix_array_blocks({nullptr, length, nullptr, length, count, lines, length});
  };
  EXPECT_EQ(blocks(1, 1, 1), 1);
  EXPECT_EQ(blocks(1, 8, 256), 1);
  EXPECT_EQ(blocks(1, 8, 257), 2);
  EXPECT_EQ(blocks(3, 3, 256), 2);
  EXPECT_EQ(blocks(1 << 20, 1 << 10, 512), 1 << 28);
}

TEST(MatrixArray, HasKernelsThatCompileWithoutSpills) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  const cuda::Unit unit = cuda::matrix_array_unit();
  for (const int sm : {80, 90}) {
    std::vector<std::string> options = cuda::compile_options(cuda::nvrtc_architecture(sm));
    options.emplace_back("--ptxas-options=-v");
    const cuda::Compilation result = cuda::nvrtc_compile(
        unit.source.name, unit.source.text, cuda::headers_of(unit.source.text), options);
    ASSERT_THAT(result.log, HasSubstr("scatter_products")) << result.log;
    EXPECT_THAT(result.log, Not(HasSubstr("warning")));
    EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes spill")));
    EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame")));
  }
}

}  // namespace
}  // namespace ingot
