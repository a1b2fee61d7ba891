#include "graph/evaluate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "graph_support.h"
#include "not_finite.h"

namespace ingot {
namespace {

using testing::dense_tensor;
using ::testing::ElementsAre;
using testing::evaluate_graph;
using testing::evaluate_on;
using testing::graph_of;
using ::testing::HasSubstr;
using ::testing::NanSensitiveDoubleEq;

std::vector<double> reduce(const std::string& finish, const std::string& axes,
                           const std::string& shape, int64_t batch, std::vector<double> x) {
  return evaluate_on(graph_of(shape,
                              R"({"op": "reduce", "args": [0], "attributes": {"finish": ")" +
                                  finish + R"(", "axes": )" + axes + "}}",
                              1),
                     batch, std::move(x));
}

TEST(Evaluate, Linear) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 3]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 2, 1, 3]},
    {"op": "parameter", "name": "b", "dtype": "f32", "shape": [1, 1, 1, 2]},
    {"op": "linear", "args": [0, 1, 2]}], "results": [{"value": 3, "name": "y"}]})");
  std::map<std::string, std::vector<double>> leaves = {
      {"x", {1, 2, 3, 4, 5, 6}}, {"w", {1, 0, -1, 2, 2, 2}}, {"b", {10, 20}}};
  EXPECT_THAT(evaluate_graph(graph, 2, leaves)[0], ElementsAre(8, 32, 8, 50));
}

TEST(Evaluate, MatmulOfBatches) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "a", "dtype": "f64", "shape": ["B", 2, 1, 2]},
    {"op": "input", "name": "b", "dtype": "f64", "shape": ["B", 2, 1, 1]},
    {"op": "input", "name": "c", "dtype": "f64", "shape": [1, 1, 1, 2]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": false}},
    {"op": "matmul", "args": [2, 1]}],
    "results": [{"value": 3, "name": "ab"}, {"value": 4, "name": "cb"}]})");
  std::map<std::string, std::vector<double>> leaves = {
      {"a", {1, 2, 3, 4, 5, 6, 7, 8}}, {"b", {1, 10, 2, 20}}, {"c", {1, -1}}};
  const auto results = evaluate_graph(graph, 2, leaves);
  EXPECT_THAT(results[0], ElementsAre(21, 43, 130, 174));
  EXPECT_THAT(results[1], ElementsAre(-9, -18));
}

// The blocked, threaded product against the definition, at sizes that are multiples of nothing.
TEST(Evaluate, LargeMatmulMatchesTheDefinition) {
  const int64_t m = 37, k = 301, n = 1531;
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "a", "dtype": "f64", "shape": ["B", 1, 1, 301]},
    {"op": "input", "name": "b", "dtype": "f64", "shape": [1, 301, 1, 1531]},
    {"op": "matmul", "args": [0, 1]}], "results": [{"value": 2, "name": "y"}]})");
  std::map<std::string, std::vector<double>> leaves;
  for (int64_t i = 0; i < m * k; ++i) leaves["a"].push_back(double(i * 7919 % 101 - 50));
  for (int64_t i = 0; i < k * n; ++i) leaves["b"].push_back(double(i * 104729 % 97 - 48));
  const std::vector<double> y = evaluate_graph(graph, m, leaves)[0];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double expected = 0;  // small integers: exact in any order
      for (int64_t l = 0; l < k; ++l) {
        expected += leaves["a"][size_t(i * k + l)] * leaves["b"][size_t(l * n + j)];
      }
      ASSERT_EQ(y[size_t(i * n + j)], expected) << i << ", " << j;
    }
  }
}

TEST(Evaluate, BroadcastsEveryAxis) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "batch", "dtype": "f64", "shape": ["B", 1, 1, 1]},
    {"op": "input", "name": "rows", "dtype": "f64", "shape": [1, 2, 1, 1]},
    {"op": "input", "name": "groups", "dtype": "f64", "shape": [1, 1, 2, 1]},
    {"op": "input", "name": "features", "dtype": "f64", "shape": [1, 1, 1, 2]},
    {"op": "add", "args": [0, 1]}, {"op": "add", "args": [2, 3]}, {"op": "add", "args": [4, 5]}],
    "results": [{"value": 6, "name": "y"}]})");
  std::map<std::string, std::vector<double>> leaves = {
      {"batch", {1000, 2000}}, {"rows", {100, 200}}, {"groups", {10, 20}}, {"features", {1, 2}}};
  EXPECT_THAT(evaluate_graph(graph, 2, leaves)[0],
              ElementsAre(1111, 1112, 1121, 1122, 1211, 1212, 1221, 1222,  //
                          2111, 2112, 2121, 2122, 2211, 2212, 2221, 2222));
}

TEST(Evaluate, ReducesOverAnyAxes) {
  const std::vector<double> x = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const std::string shape = R"(["B", 2, 1, 3])";
  EXPECT_THAT(reduce("sum", R"(["features"])", shape, 2, x), ElementsAre(6, 15, 24, 33));
  EXPECT_THAT(reduce("sum", R"(["rows"])", shape, 2, x), ElementsAre(5, 7, 9, 17, 19, 21));
  EXPECT_THAT(reduce("sum", R"(["batch"])", shape, 2, x), ElementsAre(8, 10, 12, 14, 16, 18));
  EXPECT_THAT(reduce("sum", R"(["batch", "features"])", shape, 2, x), ElementsAre(30, 48));
  EXPECT_THAT(reduce("sum", R"(["batch", "rows", "groups", "features"])", shape, 2, x),
              ElementsAre(78));
}

TEST(Evaluate, EveryFinish) {
  const std::vector<double> x = {1, 4, 4, 3};
  const auto of = [&](const std::string& finish) {
    return reduce(finish, R"(["features"])", R"(["B", 1, 1, 4])", 1, x)[0];
  };
  EXPECT_EQ(of("sum"), 12);
  EXPECT_EQ(of("max"), 4);
  EXPECT_EQ(of("min"), 1);
  EXPECT_EQ(of("argmax"), 1);
  EXPECT_EQ(of("mean"), 3);
  EXPECT_EQ(of("variance"), 1.5);
  EXPECT_EQ(of("variance_unbiased"), 2);
  EXPECT_EQ(of("max_exponent"), 4);
  EXPECT_DOUBLE_EQ(of("sum_exp"), 2 + std::exp(-1) + std::exp(-3));
  EXPECT_DOUBLE_EQ(of("log_sum_exp"), 4 + std::log(2 + std::exp(-1) + std::exp(-3)));
}

TEST(Evaluate, RunningSumsBeginAnewWithEachRow) {
  const Graph graph = graph_of(R"(["B", 2, 1, 3])", R"({"op": "cumsum", "args": [0]})", 1);
  EXPECT_THAT(evaluate_on(graph, 2, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}),
              ElementsAre(1, 3, 6, 4, 9, 15, 7, 15, 24, 10, 21, 33));
}

TEST(Evaluate, VarianceUnderALargeMean) {
  EXPECT_EQ(reduce("variance", R"(["batch"])", R"(["B", 1, 1, 1])", 4,
                   {1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 4})[0],
            1.25);
}

TEST(Evaluate, EmptyBatchesAndSingleSamples) {
  const std::string column = R"(["B", 1, 1, 1])", batch = R"(["batch"])";
  EXPECT_THAT(reduce("sum", batch, column, 0, {}), ElementsAre(0));
  EXPECT_THAT(reduce("mean", batch, column, 0, {}), ElementsAre(NanSensitiveDoubleEq(kNan)));
  EXPECT_THAT(reduce("variance_unbiased", batch, column, 1, {3}),
              ElementsAre(NanSensitiveDoubleEq(kNan)));
  EXPECT_TRUE(reduce("sum", R"(["features"])", column, 0, {}).empty());
}

TEST(Evaluate, NonFiniteElements) {
  const std::string row = R"(["B", 1, 1, 3])", features = R"(["features"])";
  EXPECT_EQ(reduce("mean", features, row, 1, {1, kInf, 2})[0], kInf);
  EXPECT_TRUE(std::isnan(reduce("max", features, row, 1, {1, kNan, 2})[0]));
  EXPECT_EQ(reduce("argmax", features, row, 1, {kInf, kNan, 2})[0], 1);
  EXPECT_EQ(reduce("log_sum_exp", features, row, 1, {-kInf, -kInf, -kInf})[0], -kInf);
  // 0 · Inf within a product is NaN.
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f64", "shape": ["B", 1, 1, 2]},
    {"op": "parameter", "name": "w", "dtype": "f64", "shape": [1, 1, 1, 2]},
    {"op": "linear", "args": [0, 1]}], "results": [{"value": 2, "name": "y"}]})");
  std::map<std::string, std::vector<double>> leaves = {{"x", {0, 1}}, {"w", {kInf, 1}}};
  EXPECT_TRUE(std::isnan(evaluate_graph(graph, 1, leaves)[0][0]));
}

TEST(Evaluate, ViewsKeepTheOrderOfElements) {
  const Graph graph =
      graph_of(R"(["B", 1, 1, 6])",
               R"({"op": "view", "args": [0], "attributes": {"shape": ["B", 1, 2, 3]}},
         {"op": "reduce", "args": [1], "attributes": {"finish": "sum", "axes": ["features"]}})",
               2);
  EXPECT_THAT(evaluate_on(graph, 2, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}),
              ElementsAre(6, 15, 24, 33));
}

TEST(Evaluate, CastsTruncateToIntegersAndTestForBooleans) {
  const auto cast = [](const std::string& dtype, double x) {
    return evaluate_on(
        graph_of("[1, 1, 1, 1]",
                 R"({"op": "cast", "args": [0], "attributes": {"dtype": ")" + dtype + R"("}})", 1),
        1, {x})[0];
  };
  EXPECT_EQ(cast("i64", -2.7), -2);
  EXPECT_EQ(cast("bool", 0.25), 1);
  EXPECT_EQ(cast("f16", 1e-9), 1e-9);  // the truth rounds nothing
}

TEST(Evaluate, ReadsAnyStridesAndDtypes) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 3]},
    {"op": "parameter", "name": "s", "dtype": "f16", "shape": [1, 1, 1, 3]},
    {"op": "mul", "args": [0, 1]}], "results": [{"value": 2, "name": "y"}]})");
  float x[] = {1, 4, 2, 5, 3, 6};  // stored by columns
  uint16_t s[] = {0x4000};         // 2 in f16, broadcast by a stride of 0
  double y[12];                    // every second element
  std::fill(std::begin(y), std::end(y), -1);
  ingot_tensor tensors[3] = {dense_tensor({true, 1, 1, 3}, 2, x, INGOT_F32),
                             dense_tensor({false, 1, 1, 3}, 2, s, INGOT_F16),
                             dense_tensor({true, 1, 1, 3}, 2, y)};
  tensors[0].strides[0] = 1;
  tensors[0].strides[3] = 2;
  tensors[1].strides[3] = 0;
  tensors[2].strides[0] = 6;
  tensors[2].strides[3] = 2;
  evaluate(graph, 2, tensors);
  EXPECT_THAT(y, ElementsAre(2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1));
}

TEST(Evaluate, BatchNormInTrainingModeUpdatesItsBuffers) {
  const auto graph = [](const std::string& momentum) {
    return import_graph(R"({"ingot_graph": 1, "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1]},
      {"op": "parameter", "name": "weight", "dtype": "f32", "shape": [1, 1, 1, 1]},
      {"op": "parameter", "name": "bias", "dtype": "f32", "shape": [1, 1, 1, 1]},
      {"op": "buffer", "name": "mean", "dtype": "f32", "shape": [1, 1, 1, 1]},
      {"op": "buffer", "name": "var", "dtype": "f32", "shape": [1, 1, 1, 1]},
      {"op": "buffer", "name": "count", "dtype": "i64", "shape": [1, 1, 1, 1]},
      {"op": "batch_norm", "args": [0, 1, 2, 3, 4, 5],
       "attributes": {"training": true, "eps": 0, "momentum": )" +
                        momentum + R"(}}], "results": [{"value": 6, "name": "y"}]})");
  };
  // Mean 4, biased variance 4, unbiased 8.
  std::map<std::string, std::vector<double>> leaves = {{"x", {2, 6}}, {"weight", {3}},
                                                       {"bias", {1}}, {"mean", {100}},
                                                       {"var", {10}}, {"count", {3}}};
  auto moved = leaves;
  EXPECT_THAT(evaluate_graph(graph("0.25"), 2, moved)[0], ElementsAre(-2, 4));
  EXPECT_DOUBLE_EQ(moved["mean"][0], 0.75 * 100 + 0.25 * 4);
  EXPECT_DOUBLE_EQ(moved["var"][0], 0.75 * 10 + 0.25 * 8);
  EXPECT_EQ(moved["count"][0], 4);
  auto averaged = leaves;
  evaluate_graph(graph("null"), 2, averaged);
  EXPECT_DOUBLE_EQ(averaged["mean"][0], 0.75 * 100 + 0.25 * 4);  // factor 1 / (3 + 1)
  EXPECT_EQ(averaged["count"][0], 4);
}

TEST(Evaluate, AModuleCalledTwiceSeesItsOwnUpdate) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1]},
    {"op": "buffer", "name": "mean", "dtype": "f32", "shape": [1, 1, 1, 1]},
    {"op": "buffer", "name": "var", "dtype": "f32", "shape": [1, 1, 1, 1]},
    {"op": "batch_norm", "args": [0, -1, -1, 1, 2],
     "attributes": {"training": true, "eps": 0, "momentum": 0.5}},
    {"op": "batch_norm", "args": [3, -1, -1, 1, 2],
     "attributes": {"training": true, "eps": 0, "momentum": 0.5}}],
    "results": [{"value": 4, "name": "y"}]})");
  ASSERT_EQ(graph.updates.size(), 2u);
  std::map<std::string, std::vector<double>> leaves = {{"x", {2, 6}}, {"mean", {0}}, {"var", {1}}};
  evaluate_graph(graph, 2, leaves);
  EXPECT_DOUBLE_EQ(leaves["mean"][0], 0.5 * (0.5 * 4) + 0.5 * 0);  // the second input has mean 0
  EXPECT_DOUBLE_EQ(leaves["var"][0], 0.5 * (0.5 * 1 + 0.5 * 8) + 0.5 * 2);
}

TEST(Evaluate, RefusesTensorsThatDoNotFit) {
  const Graph graph = graph_of(R"(["B", 1, 1, 2])", R"({"op": "exp", "args": [0]})", 1);
  double x[4] = {}, y[4] = {};
  const ingot_tensor good[2] = {dense_tensor({true, 1, 1, 2}, 2, x),
                                dense_tensor({true, 1, 1, 2}, 2, y)};
  const auto message = [&](auto change) {
    ingot_tensor tensors[2] = {good[0], good[1]};
    change(tensors);
    try {
      evaluate(graph, 2, tensors);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message([](ingot_tensor*) {}), "no error");
  EXPECT_THAT(message([](ingot_tensor* t) { t[0].sizes[0] = 3; }), HasSubstr("leaf 'x' has sizes"));
  EXPECT_THAT(message([](ingot_tensor* t) { t[1].dtype = INGOT_F32; }), HasSubstr("must be f64"));
  EXPECT_THAT(message([](ingot_tensor* t) { t[0].dtype = 9; }), HasSubstr("unknown dtype 9"));
  EXPECT_THAT(message([](ingot_tensor* t) { t[0].device = 0; }), HasSubstr("host memory"));
  EXPECT_THAT(message([](ingot_tensor* t) { t[0].data = nullptr; }), HasSubstr("no data"));
  EXPECT_THROW(evaluate(graph, 2, std::span(good, 1)), Error);
  EXPECT_THROW(evaluate(graph, -1, good), Error);
}

}  // namespace
}  // namespace ingot
