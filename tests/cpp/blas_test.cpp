// What of libingot_blas.so needs no cuBLAS: arguments, decisions, graphs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "blas/policy.h"
#include "blas/product.h"
#include "blas/programs.h"
#include "blas_testing.h"
#include "cuda/driver.h"

namespace ingot {
namespace {

using namespace blas_testing;
using blas::Activation;
using blas::graph_of;
using blas::Outcome;
using blas::Product;
using ::testing::HasSubstr;

struct Problem {
  Product product;
  std::vector<float> a, b, c;
};

// Leading dimensions are `gap` wider than they need be.
Problem problem(int operation_a, int operation_b, int64_t m, int64_t n, int64_t k, int64_t gap) {
  Problem p;
  const int64_t lda = (operation_a == 0 ? m : k) + gap, ldb = (operation_b == 0 ? k : n) + 2 * gap;
  const int64_t ldc = m + 3 * gap;
  p.a = random_values(lda * (operation_a == 0 ? k : m), 1);
  p.b = random_values(ldb * (operation_b == 0 ? n : k), 2);
  p.c = random_values(ldc * n, 3);
  p.product = {operation_a, operation_b, m, n,          k,   p.a.data(), lda, 0,
               p.b.data(),  ldb,         0, p.c.data(), ldc, 0,          1};
  return p;
}

// By BLAS's own words, on column-major storage.
double element(const Problem& p, int64_t i, int64_t j) {
  const Product& q = p.product;
  double sum = 0;
  for (int64_t l = 0; l < q.k; ++l) {
    const float a = q.operation_a == 0 ? q.a[i + l * q.lda] : q.a[l + i * q.lda];
    const float b = q.operation_b == 0 ? q.b[l + j * q.ldb] : q.b[j + l * q.ldb];
    sum += static_cast<double>(a) * b;
  }
  return sum;
}

TEST(BlasProduct, MatricesAreTheTransposedProduct) {
  for (const int ta : {0, 1, 2}) {
    for (const int tb : {0, 1, 2}) {
      for (const auto& [m, n, k] :
           {std::array{1, 1, 1}, {3, 5, 7}, {8, 2, 1}, {1, 6, 4}, {17, 9, 33}}) {
        for (const int gap : {0, 3}) {
          const Problem p = problem(ta, tb, m, n, k, gap);
          const blas::Matrices found = matrices_of(p.product);
          ASSERT_EQ(found.samples, n);
          ASSERT_EQ(found.features, m);
          ASSERT_EQ(found.y, p.c.data());
          ASSERT_EQ(found.y_stride, m + 3 * gap);
          for (int64_t s = 0; s < n; ++s) {
            for (int64_t f = 0; f < m; ++f) {
              double sum = 0;
              for (int64_t l = 0; l < k; ++l) {
                sum += static_cast<double>(
                           found.x.data[s * found.x.row_stride + l * found.x.k_stride]) *
                       found.w.data[f * found.w.row_stride + l * found.w.k_stride];
              }
              ASSERT_EQ(sum, element(p, f, s)) << ta << tb << " at " << f << ", " << s;
            }
          }
        }
      }
    }
  }
}

TEST(BlasProduct, KnowsWhatBlasDefines) {
  const Problem p = problem(0, 1, 4, 5, 6, 0);
  EXPECT_TRUE(is_sound(p.product));
  const auto without = [&](auto change) {
    Product q = p.product;
    change(q);
    return is_sound(q);
  };
  EXPECT_FALSE(without([](Product& q) { q.m = 0; }));
  EXPECT_FALSE(without([](Product& q) { q.n = -1; }));
  EXPECT_FALSE(without([](Product& q) { q.k = 0; }));
  EXPECT_FALSE(without([](Product& q) { q.k = int64_t{1} << 31; }));
  EXPECT_FALSE(without([](Product& q) { q.batches = 0; }));
  EXPECT_FALSE(without([](Product& q) { q.operation_a = 3; }));
  EXPECT_FALSE(without([](Product& q) { q.operation_b = -1; }));
  EXPECT_FALSE(without([](Product& q) { q.lda = 3; }));  // m is 4
  EXPECT_FALSE(without([](Product& q) { q.ldb = 4; }));  // transposed, n is 5
  EXPECT_FALSE(without([](Product& q) { q.ldc = 3; }));
  EXPECT_FALSE(without([](Product& q) { q.a = nullptr; }));
  EXPECT_FALSE(without([](Product& q) { q.c = nullptr; }));
  EXPECT_TRUE(without([](Product& q) { q.added = {q.c, 4, 0}; }));
  EXPECT_FALSE(without([](Product& q) { q.added = {q.c, 3, 0}; }));
}

TEST(BlasProduct, MergesABatchThatSharesAAndOnlyThat) {
  Product p = problem(1, 0, 4, 5, 6, 1).product;
  p.batches = 3;
  p.stride_b = 5 * p.ldb;
  p.stride_c = 5 * p.ldc;
  Product merged = p;
  merge_batches(merged);
  EXPECT_EQ(merged.n, 15);
  EXPECT_EQ(merged.batches, 1);
  const auto stays = [&](auto change) {
    Product q = p;
    change(q);
    merge_batches(q);
    return q.batches == 3 && q.n == 5;
  };
  EXPECT_TRUE(stays([](Product& q) { q.stride_a = 24; }));
  EXPECT_TRUE(stays([](Product& q) { q.stride_b += 1; }));
  EXPECT_TRUE(stays([](Product& q) { q.stride_c += 1; }));
  EXPECT_TRUE(stays([](Product& q) { q.operation_b = 1; }));
  // What is added must follow as C does.
  p.added = {p.b, 7, 5 * 7};
  merged = p;
  merge_batches(merged);
  EXPECT_EQ(merged.n, 15);
  EXPECT_TRUE(stays([](Product& q) { q.added.stride = 36; }));
  EXPECT_EQ(entry_of(p, 2).added.data, p.b + 70);
}

TEST(BlasProduct, FindsAnEntryOfABatch) {
  Product p = problem(0, 0, 4, 5, 6, 0).product;
  p.batches = 3;
  p.stride_a = 24;
  p.stride_b = 0;
  p.stride_c = 20;
  const Product second = entry_of(p, 2);
  EXPECT_EQ(second.a, p.a + 48);
  EXPECT_EQ(second.b, p.b);
  EXPECT_EQ(second.c, p.c + 40);
  EXPECT_EQ(second.batches, 1);
}

TEST(BlasPolicy, FollowsMathModeAndComputeType) {
  const blas::Settings usual;
  EXPECT_EQ(precision_of(68, 0, usual), Outcome::taken_fp32);
  EXPECT_EQ(precision_of(68, 3, usual), Outcome::taken_tf32);
  EXPECT_EQ(precision_of(77, 0, usual), Outcome::taken_tf32);
  EXPECT_EQ(precision_of(68, 16, usual), Outcome::taken_fp32);  // a flag that is not of fp32
  EXPECT_EQ(precision_of(68, 16 | 3, usual), Outcome::taken_tf32);
  for (const int mode : {1, 2, 4, 8}) EXPECT_EQ(precision_of(68, mode, usual), Outcome::math_mode);
  for (const int compute : {0, 64, 69, 70, 74, 75, 78}) {
    EXPECT_EQ(precision_of(compute, 0, usual), Outcome::math_mode);
  }
  blas::Settings no_tf32;
  no_tf32.tf32 = false;
  EXPECT_EQ(precision_of(68, 3, no_tf32), Outcome::taken_fp32);
  EXPECT_EQ(precision_of(77, 0, no_tf32), Outcome::taken_fp32);
}

TEST(BlasPolicy, RefusesWhatIsSmallOrThin) {
  const auto judged = [](int64_t m, int64_t n, int64_t k, int64_t batches = 1) {
    Product p;
    p.m = m;
    p.n = n;
    p.k = k;
    p.batches = batches;
    return refuses(p);
  };
  EXPECT_EQ(judged(1024, 1024, 1024), std::nullopt);
  EXPECT_EQ(judged(INT32_MAX, INT32_MAX, INT32_MAX), std::nullopt);
  EXPECT_EQ(judged(100000, 32, 32), std::nullopt);
  EXPECT_EQ(judged(10, 100000, 784), std::nullopt);
  EXPECT_EQ(judged(256, 256, 256), std::nullopt);
  EXPECT_EQ(judged(127, 128, 128), Outcome::small);
  EXPECT_EQ(judged(4096, 1, 4096), Outcome::small);
  EXPECT_EQ(judged(4096, 4096, 16), Outcome::small);
  EXPECT_EQ(judged(64, 64, 64, 4096), std::nullopt);
  EXPECT_EQ(judged(64, 64, 64, 7), Outcome::small_batch);
  EXPECT_EQ(judged(32, 256, 256, 4096), Outcome::small_batch);
  EXPECT_EQ(judged(INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX), std::nullopt);
}

TEST(BlasPolicy, RunsFewLargeProductsOfABatchOneByOne) {
  const auto may = [](int64_t size, int64_t batches) {
    Product p;
    p.m = p.n = p.k = size;
    p.batches = batches;
    return may_run_one_by_one(p);
  };
  EXPECT_TRUE(may(1024, 8));
  EXPECT_TRUE(may(2048, 64));
  EXPECT_FALSE(may(2048, 65));
  EXPECT_FALSE(may(1000, 8));
}

// What is copied grows with the square of a product's extents, what is gained with their cube.
TEST(BlasPolicy, TakesBatchesByPointersThatGainMoreThanTheirCopiesTake) {
  const auto pays = [](int64_t m, int64_t n, int64_t k, int64_t batches,
                       Outcome precision = Outcome::taken_fp32) {
    Product p;
    p.m = m, p.n = n, p.k = k, p.batches = batches;
    return blas::pays_by_pointers(p, precision);
  };
  EXPECT_FALSE(pays(256, 256, 256, 64));
  EXPECT_FALSE(pays(64, 64, 64, 4096));
  EXPECT_TRUE(pays(1024, 1024, 1024, 16));
  EXPECT_TRUE(pays(2048, 2048, 2048, 1));
  EXPECT_FALSE(pays(2048, 64, 2048, 16));
  EXPECT_FALSE(pays(1024, 1024, 1024, 16, Outcome::taken_tf32));
  EXPECT_FALSE(pays(1 << 20, 1 << 20, 1 << 20, 64));  // more than there is
}

// The graph computes what its scalars and epilogue say, in place where beta is not zero.
TEST(BlasGraph, ComputesScaledProductsWithTheirEpilogue) {
  const Problem p = problem(1, 0, 24, 10, 16, 0);
  const blas::Matrices m = matrices_of(p.product);
  const std::vector<float> bias = random_values(24, 4);
  for (const bool in_memory : {false, true}) {
    for (const auto& [alpha, beta] : {std::pair{1.0f, 0.0f}, {0.5f, 1.0f}, {-2.25f, 1e-3f}}) {
      for (const bool biased : {false, true}) {
        const std::string graph =
            graph_of({24,
                      16,
                      0,
                      true,
                      beta != 0,
                      in_memory,
                      {alpha, beta},
                      biased,
                      biased ? blas::Activation::relu : blas::Activation::none});
        std::vector<float> y = p.c;
        std::vector<ingot_tensor> tensors = {
            tensor(m.x.data, {10, 1, 1, 16}, {m.x.row_stride, 0, 0, 1}),
            tensor(m.w.data, {1, 24, 1, 16}, {0, m.w.row_stride, 0, 1})};
        const ingot_tensor result = tensor(y.data(), {10, 1, 1, 24}, {24, 0, 0, 1});
        if (beta != 0) tensors.push_back(result);
        if (in_memory) tensors.push_back(tensor(&alpha, {1, 1, 1, 1}, {0, 0, 0, 0}));
        if (in_memory && beta != 0) tensors.push_back(tensor(&beta, {1, 1, 1, 1}, {0, 0, 0, 0}));
        if (biased) tensors.push_back(tensor(bias.data(), {1, 1, 1, 24}, {0, 0, 0, 1}));
        if (beta == 0) tensors.push_back(result);
        run(graph, 10, tensors);
        for (int64_t j = 0; j < 10; ++j) {
          for (int64_t i = 0; i < 24; ++i) {
            const auto at = static_cast<size_t>(i + j * 24);
            double expected = alpha * element(p, i, j) + beta * static_cast<double>(p.c[at]);
            if (biased) expected = std::max(0.0, expected + bias[static_cast<size_t>(i)]);
            ASSERT_NEAR(y[at], expected, 1e-5) << graph;
          }
        }
      }
    }
  }
}

// Where alpha is zero the operands do not count, where beta is, C does not: also NaN.
TEST(BlasGraph, ZerosInMemoryCountAsBlasHasIt) {
  const float nan = std::nanf(""), zero = 0, half = 0.5f;
  const std::string graph = graph_of({8, 8, 0, true, true, true, {}, false});
  const std::vector<float> finite(64, 2), unknown(64, nan);
  const auto result = [&](const std::vector<float>& x, float c, const float* alpha,
                          const float* beta) {
    std::vector<float> y(64, c);
    run(graph, 8,
        {tensor(x.data(), {8, 1, 1, 8}, {8, 0, 0, 1}),
         tensor(finite.data(), {1, 8, 1, 8}, {0, 8, 0, 1}),
         tensor(y.data(), {8, 1, 1, 8}, {8, 0, 0, 1}), tensor(alpha, {1, 1, 1, 1}, {0, 0, 0, 0}),
         tensor(beta, {1, 1, 1, 1}, {0, 0, 0, 0})});
    return y[9];
  };
  EXPECT_EQ(result(finite, nan, &half, &zero), 16);
  EXPECT_EQ(result(unknown, 6, &zero, &half), 3);
  EXPECT_TRUE(std::isnan(result(finite, nan, &half, &half)));
  EXPECT_TRUE(std::isnan(result(unknown, 6, &half, &half)));
}

// A batch in one run; with an operand that all its products share, and rows further apart.
TEST(BlasGraph, MultipliesABatch) {
  const int64_t m = 12, n = 10, k = 16, batches = 3, ldy = 15;
  for (const bool along_k : {false, true}) {
    for (const int64_t stride : {int64_t{0}, m * k + 4}) {
      const std::vector<float> a = random_values(batches * (m * k + 4), 1);
      const std::vector<float> b = random_values(batches * n * k, 2);
      std::vector<float> y(static_cast<size_t>(batches * n * ldy), -7);
      const ingot_tensor w = along_k ? tensor(a.data(), {batches, m, 1, k}, {stride, k, 0, 1})
                                     : tensor(a.data(), {batches, k, 1, m}, {stride, m, 0, 1});
      run(graph_of({m, k, n, along_k, false, false, {}, false}), batches,
          {tensor(b.data(), {batches, n, 1, k}, {n * k, k, 0, 1}), w,
           tensor(y.data(), {batches, n, 1, m}, {n * ldy, ldy, 0, 1})});
      for (int64_t e = 0; e < batches; ++e) {
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t i = 0; i < ldy; ++i) {
            double sum = i < m ? 0 : -7;
            for (int64_t l = 0; i < m && l < k; ++l) {
              const int64_t at = along_k ? i * k + l : l * m + i;
              sum += static_cast<double>(a[static_cast<size_t>(e * stride + at)]) *
                     b[static_cast<size_t>((e * n + j) * k + l)];
            }
            ASSERT_NEAR(y[static_cast<size_t>((e * n + j) * ldy + i)], sum, 1e-5);
          }
        }
      }
    }
  }
}

// With nothing but its shape to go by: Ingot's own kernel for a large product, and in place too;
// the library where it is estimated to be faster.
TEST(BlasGraph, SaysWhoMultipliesOnAGpu) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto uses_library = [](int64_t m, int64_t n, int64_t k, float beta, bool aligned = true) {
    const Program program(graph_of({m, k, 0, true, beta != 0, false, {1, beta}, false}),
                          R"({"device": "cuda", "sm": 90})");
    EXPECT_EQ(program.status(), INGOT_OK) << ingot_last_error();
    auto* const weight = reinterpret_cast<float*>(4096);
    auto* const other = reinterpret_cast<float*>(aligned ? 4096 : 4100);
    std::vector<ingot_tensor> tensors = {tensor(other, {n, 1, 1, k}, {k, 0, 0, 1}),
                                         tensor(weight, {1, m, 1, k}, {0, k, 0, 1}),
                                         tensor(other, {n, 1, 1, m}, {m + 32, 0, 0, 1})};
    for (ingot_tensor& t : tensors) t.device = 0;
    int uses = -1;
    EXPECT_EQ(ingot_program_uses_library(*program, n, tensors.data(), 3, &uses), INGOT_OK)
        << ingot_last_error();
    return uses;
  };
  EXPECT_EQ(uses_library(4096, 4096, 4096, 0), 0);
  EXPECT_EQ(uses_library(4096, 4096, 4096, 1), 0);
  EXPECT_EQ(uses_library(4096, 4096, 4096, 0, false), 0);  // x and y at any address
  EXPECT_EQ(uses_library(128, 1, 128, 0), 1);
  EXPECT_EQ(uses_library(128, 16, 16384, 0), 1);  // few results of long sums
}

// One launch for the whole batch, also with rows of the result further apart and scalars in memory.
TEST(BlasGraph, SaysWhoMultipliesBatchesOnAGpu) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto uses_library = [](int64_t m, int64_t n, int64_t k, int64_t batches, int64_t gap = 0,
                               bool shared_b = false, bool in_memory = false) {
    const Program program(graph_of({m, k, n, true, in_memory, in_memory, {}, false}),
                          R"({"device": "cuda", "sm": 90})");
    EXPECT_EQ(program.status(), INGOT_OK) << ingot_last_error();
    auto* const data = reinterpret_cast<float*>(4096);
    const ingot_tensor scalar = tensor(data, {1, 1, 1, 1}, {0, 0, 0, 0});
    std::vector<ingot_tensor> tensors = {
        tensor(data, {batches, n, 1, k}, {shared_b ? 0 : n * k, k, 0, 1}),
        tensor(data, {batches, m, 1, k}, {m * k, k, 0, 1}),
        tensor(data, {batches, n, 1, m}, {n * (m + gap), m + gap, 0, 1})};
    if (in_memory) tensors.insert(tensors.end(), {scalar, scalar});
    for (ingot_tensor& t : tensors) t.device = 0;
    int uses = -1;
    EXPECT_EQ(ingot_program_uses_library(*program, batches, tensors.data(),
                                         static_cast<int>(tensors.size()), &uses),
              INGOT_OK)
        << ingot_last_error();
    return uses;
  };
  EXPECT_EQ(uses_library(1024, 1024, 1024, 8), 0);
  EXPECT_EQ(uses_library(1024, 1024, 1024, 8, 32), 0);
  EXPECT_EQ(uses_library(1024, 1024, 1024, 8, 0, true), 0);
  EXPECT_EQ(uses_library(1024, 1024, 1024, 8, 32, true, true), 0);
  EXPECT_EQ(uses_library(512, 512, 512, 96), 0);
}

TEST(BlasGraph, NumbersHaveAPointInEveryLocale) {
  EXPECT_THAT(graph_of({8, 8, 0, false, false, false, {0.5f, 0}, false}),
              HasSubstr("\"value\": 0.5}"));
}

}  // namespace
}  // namespace ingot
