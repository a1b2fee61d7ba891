// Products of libingot_blas.so whose operands lie anywhere: who multiplies on a GPU, in how much
// memory; and what lies apart from the result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "api/program.h"
#include "blas/programs.h"
#include "blas_testing.h"
#include "cuda/compiler.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"

namespace ingot {
namespace {

using namespace blas_testing;
using blas::Activation;
using blas::graph_of;
using blas::GraphKey;

// A product on a GPU that is not there: how far each matrix begins from a multiple of 16 bytes, and
// how much wider than dense its rows are.
struct Case {
  int64_t m, n, k;  // features, samples
  bool w_along_k = true, x_along_k = true;
  int64_t w_bytes = 0, x_bytes = 0, y_bytes = 0;
  int64_t w_gap = 0, x_gap = 0, y_gap = 0;
};

std::string text(const Case& c) {
  std::string found = std::to_string(c.n) + "x" + std::to_string(c.k) + "->" + std::to_string(c.m);
  for (const int64_t value : {int64_t{c.w_along_k}, int64_t{c.x_along_k}, c.w_bytes, c.x_bytes,
                              c.y_bytes, c.w_gap, c.x_gap, c.y_gap}) {
    found += " " + std::to_string(value);
  }
  return found;
}

std::vector<ingot_tensor> tensors_of(const Case& c) {
  const auto at = [](int64_t bytes) { return reinterpret_cast<float*>((1 << 20) + bytes); };
  const int64_t x_leading = (c.x_along_k ? c.k : c.n) + c.x_gap;
  const int64_t w_leading = (c.w_along_k ? c.k : c.m) + c.w_gap;
  std::vector<ingot_tensor> tensors = {
      tensor(at(c.x_bytes), {c.n, 1, 1, c.k},
             {c.x_along_k ? x_leading : 1, 0, 0, c.x_along_k ? 1 : x_leading}),
      c.w_along_k ? tensor(at(c.w_bytes), {1, c.m, 1, c.k}, {0, w_leading, 0, 1})
                  : tensor(at(c.w_bytes), {1, c.k, 1, c.m}, {0, w_leading, 0, 1}),
      tensor(at(c.y_bytes), {c.n, 1, 1, c.m}, {c.m + c.y_gap, 0, 0, 1})};
  for (ingot_tensor& t : tensors) t.device = 0;
  return tensors;
}

std::unique_ptr<abi::Program> planned(const Case& c, int sm = 90) {
  GraphKey key;
  key.features = c.m;
  key.k = c.k;
  key.w_along_k = c.w_along_k;
  const std::string options = R"({"device": "cuda", "streamed": true, "sm": )" + std::to_string(sm);
  return abi::make_program(graph_of(key), options + "}");
}

bool is_taken(const Case& c, int sm = 90) {
  return !planned(c, sm)->executable->uses_library(c.n, tensors_of(c));
}

class BlasLayouts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  }
};

// The head of GPT-2, whose 50257 words are no multiple of four: the logits, the gradient of their
// input and that of the weight, stored either way.
TEST_F(BlasLayouts, LanguageModelsWithOddVocabulariesAreTaken) {
  constexpr int64_t kWords = 50257, kTokens = 4096, kWidth = 768;
  for (const int sm : {80, 90}) {
    for (const bool w_along_k : {false, true}) {
      for (const bool x_along_k : {false, true}) {
        for (const Case& c : {Case{kWords, kTokens, kWidth},
                              {kWidth, kTokens, kWords},
                              {kWidth, kWords, kTokens},
                              {kWords, kWidth, kTokens}}) {
          Case layout = c;
          layout.w_along_k = w_along_k;
          layout.x_along_k = x_along_k;
          EXPECT_TRUE(is_taken(layout, sm)) << sm << ": " << text(layout);
        }
      }
    }
  }
}

TEST_F(BlasLayouts, OperandsAtAnyAddressAndOfAnyWidthAreTaken) {
  const auto with = [](Case c, int64_t Case::*what, int64_t value) {
    c.*what = value;
    return c;
  };
  for (const Case& size :
       {Case{4096, 4096, 4096}, {50256, 4096, 768}, {1023, 1025, 1027}, {768, 4096, 3072}}) {
    for (const bool w_along_k : {false, true}) {
      Case c = size;
      c.w_along_k = w_along_k;
      for (const auto what : {&Case::w_bytes, &Case::x_bytes, &Case::y_bytes}) {
        for (const int64_t bytes : {4, 8}) {
          EXPECT_TRUE(is_taken(with(c, what, bytes))) << text(with(c, what, bytes));
        }
      }
      for (const auto what : {&Case::w_gap, &Case::x_gap, &Case::y_gap}) {
        EXPECT_TRUE(is_taken(with(c, what, 1))) << text(with(c, what, 1));
      }
    }
  }
}

// Packing a weight for few samples costs more than it gains.
TEST_F(BlasLayouts, WhatDoesNotPayOffItsAddressIsTheLibrarys) {
  EXPECT_TRUE(is_taken({.m = 4096, .n = 16, .k = 4096}));
  EXPECT_FALSE(is_taken({.m = 4096, .n = 16, .k = 4096, .w_bytes = 4}));
}

// A weight that the product splits as it lies in memory takes none; one that it cannot read so is
// packed first. What no layout needs more than is what a program asks for without seeing one
// (test_cuda_calls.py asks what each takes).
TEST_F(BlasLayouts, AProgramHasMemoryForEveryLayout) {
  constexpr int64_t kSize = 4096, kPacked = kSize * kSize * 4 + kSize * 4;
  for (const bool w_along_k : {false, true}) {
    const Case aligned = {.m = kSize, .n = kSize, .k = kSize, .w_along_k = w_along_k};
    EXPECT_GE(planned(aligned)->executable->workspace_size(kSize), size_t{2 * kPacked});
  }
}

double gelu(double v) {
  return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
}

// Of a batch, where C lies apart from the result, with rows of its own width, and each product has
// a bias of its own or all share one.
TEST(BlasEpilogues, AddWhatLiesApartAndABiasAndApplyGelu) {
  const int64_t m = 12, n = 10, k = 16, ldc = 14;
  for (const int64_t batches : {1, 3}) {
    for (const bool own_bias : {false, true}) {
      const std::vector<float> a = random_values(batches * m * k, 1);
      const std::vector<float> b = random_values(batches * n * k, 2);
      const std::vector<float> c = random_values(batches * n * ldc, 3);
      const std::vector<float> bias = random_values(batches * (m + 3), 4);
      std::vector<float> y(static_cast<size_t>(batches * n * m), -7);
      const int64_t stride = own_bias ? m + 3 : 0;
      run(graph_of({.features = m,
                    .k = k,
                    .batch_rows = n,
                    .w_along_k = true,
                    .adds = true,
                    .scalars = {0.5f, -2},
                    .bias = true,
                    .activation = Activation::gelu,
                    .own_bias = own_bias,
                    .apart = true}),
          batches,
          {tensor(b.data(), {batches, n, 1, k}, {n * k, k, 0, 1}),
           tensor(a.data(), {batches, m, 1, k}, {m * k, k, 0, 1}),
           tensor(c.data(), {batches, n, 1, m}, {n * ldc, ldc, 0, 1}),
           tensor(bias.data(), {own_bias ? batches : 1, 1, 1, m}, {stride, 0, 0, 1}),
           tensor(y.data(), {batches, n, 1, m}, {n * m, m, 0, 1})});
      for (int64_t e = 0; e < batches; ++e) {
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t i = 0; i < m; ++i) {
            double sum = 0;
            for (int64_t l = 0; l < k; ++l) {
              sum += static_cast<double>(a[static_cast<size_t>((e * m + i) * k + l)]) *
                     b[static_cast<size_t>((e * n + j) * k + l)];
            }
            const double added = c[static_cast<size_t>((e * n + j) * ldc + i)];
            const double biased = 0.5 * sum - 2 * added + bias[static_cast<size_t>(e * stride + i)];
            ASSERT_NEAR(y[static_cast<size_t>((e * n + j) * m + i)], gelu(biased), 1e-5);
          }
        }
      }
    }
  }
}

// Ingot's own kernel has all of them in its epilogue, for one product and for a batch.
TEST_F(BlasLayouts, EpiloguesStayWithTheProduct) {
  for (const int64_t batches : {1, 8}) {
    for (const bool own_bias : {false, true}) {
      if (own_bias && batches == 1) continue;
      const int64_t size = 1024;
      const GraphKey key = {.features = size,
                            .k = size,
                            .batch_rows = batches == 1 ? 0 : size,
                            .w_along_k = true,
                            .adds = true,
                            .scalars = {1, 0.5f},
                            .bias = true,
                            .activation = Activation::gelu,
                            .own_bias = own_bias,
                            .apart = true};
      const auto program =
          abi::make_program(graph_of(key), R"({"device": "cuda", "streamed": true, "sm": 90})");
      const auto matrix = [&](int64_t rows) {
        auto* const data = reinterpret_cast<float*>(1 << 20);
        ingot_tensor t = batches == 1
                             ? tensor(data, {rows, 1, 1, size}, {size, 0, 0, 1})
                             : tensor(data, {batches, rows, 1, size}, {rows * size, size, 0, 1});
        t.device = 0;
        return t;
      };
      ingot_tensor w = matrix(size), bias = matrix(1);
      if (batches == 1) w.sizes[0] = 1, w.sizes[1] = size, std::swap(w.strides[0], w.strides[1]);
      if (!own_bias) bias.sizes[0] = 1;
      const std::vector<ingot_tensor> tensors = {matrix(size), w, matrix(size), bias, matrix(size)};
      const int64_t batch = batches == 1 ? size : batches;
      EXPECT_FALSE(program->executable->uses_library(batch, tensors)) << batches << own_bias;
    }
  }
}

// Where rows of the result are not whole pieces of 16 bytes, so that threads store it themselves,
// and the epilogue reads as many values as the tile has.
TEST_F(BlasLayouts, KernelsCompileWithoutSpills) {
  using ::testing::HasSubstr;
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  GraphKey key = {.features = 50257, .k = 768, .w_along_k = true, .adds = true};
  key.scalars = {1, 0.5f};
  for (const bool all : {false, true}) {
    key.bias = key.apart = all;
    key.activation = all ? Activation::gelu : Activation::none;
    for (const int sm : {80, 90}) {
      const std::string options =
          R"({"device": "cuda", "streamed": true, "sm": )" + std::to_string(sm) + "}";
      const auto program = abi::make_program(graph_of(key), options);
      const nlohmann::json sweep = program->executable->describe(8192)["sweeps"][0];
      const nlohmann::json& kernel = sweep["kernels"].back();
      const std::string source = kernel["text"], name = kernel["name"];
      std::vector<std::string> flags = cuda::compile_options(cuda::nvrtc_architecture(sm));
      flags.emplace_back("--ptxas-options=-v");
      const cuda::Compilation result =
          cuda::nvrtc_compile(name, source, cuda::headers_of(source), flags);
      EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << sm << sweep["config"];
    }
  }
}

}  // namespace
}  // namespace ingot
