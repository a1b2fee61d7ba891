// Properties of the high-level operators' definitions that need no PyTorch.
#include "graph/operators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "graph_support.h"

namespace ingot {
namespace {

using testing::evaluate_on;
using testing::graph_of;
using ::testing::HasSubstr;

std::string call(const std::string& op, const std::string& attributes = "{}") {
  return R"({"op": ")" + op + R"(", "args": [0], "attributes": )" + attributes + "}";
}

std::vector<double> random_values(size_t count, double mean = 0) {
  std::mt19937_64 random(count);
  std::normal_distribution<double> distribution(mean, 1);
  std::vector<double> values(count);
  for (double& value : values) value = distribution(random);
  return values;
}

std::string error_of(const std::string& shape, const std::string& values) {
  try {
    graph_of(shape, values, 1);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Attributes that an operator cannot do without.
std::string required_attributes(std::string_view name) {
  if (name == "reduce") return R"({"finish": "sum", "axes": ["features"]})";
  if (name == "cast") return R"({"dtype": "f16"})";
  if (name == "view") return R"({"shape": ["B", 1, 2, 2]})";
  if (name == "threshold") return R"({"threshold": 0, "value": 1})";
  if (name == "group_norm") return R"({"groups": 2})";
  if (name == "max_pool" || name == "avg_pool") return R"({"kernel": 2})";
  return "{}";
}

TEST(Operators, HalvesComeBackAsHalves) {
  for (const std::string_view name : operator_names()) {
    if (name == "matmul" || name == "linear" || name == "prelu") continue;
    const Graph graph = import_graph(
        R"({"ingot_graph": 1, "values": [
          {"op": "input", "name": "x", "dtype": "f16", "shape": ["B", 1, 1, 4]}, )" +
        call(std::string(name), required_attributes(name)) +
        R"(], "results": [{"value": 1, "name": "y"}]})");
    const DType expected = name == "argmax" ? DType::i64 : DType::f16;
    EXPECT_EQ(graph[graph.results[0].value].dtype, expected) << name;
  }
}

TEST(Operators, StatisticsOfHalvesAreTakenInSingle) {
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
      {"op": "input", "name": "x", "dtype": "bf16", "shape": ["B", 1, 1, 4]},
      {"op": "layer_norm", "args": [0]}], "results": [{"value": 1, "name": "y"}]})");
  for (const Node& node : graph.nodes) {
    if (node.kind != NodeKind::reduce) continue;
    EXPECT_EQ(node.dtype, DType::f32);
  }
}

TEST(Operators, SoftmaxSumsToOneAndIgnoresShifts) {
  const Graph graph = graph_of(R"(["B", 1, 1, 7])", call("softmax"), 1);
  std::vector<double> x = random_values(21);
  const std::vector<double> y = evaluate_on(graph, 3, x);
  for (double& value : x) value += 1e4;
  const std::vector<double> shifted = evaluate_on(graph, 3, x);
  for (size_t row = 0; row < 3; ++row) {
    double sum = 0;
    for (size_t i = row * 7; i < row * 7 + 7; ++i) {
      sum += y[i];
      EXPECT_NEAR(shifted[i], y[i], 1e-11);
    }
    EXPECT_NEAR(sum, 1, 1e-15);
  }
}

TEST(Operators, LayerNormGivesMeanZeroAndVarianceOneUnderALargeMean) {
  const Graph graph = graph_of(R"(["B", 1, 1, 64])", call("layer_norm", R"({"eps": 0})"), 1);
  const std::vector<double> y = evaluate_on(graph, 1, random_values(64, 1e6));
  double mean = 0, square = 0;
  for (const double value : y) mean += value / 64, square += value * value / 64;
  EXPECT_NEAR(mean, 0, 1e-9);
  EXPECT_NEAR(square, 1, 1e-9);
}

TEST(Operators, GroupNormIsTheSameForBothPlacesOfTheChannels) {
  const std::vector<double> x = random_values(2 * 12);
  const auto features =
      evaluate_on(graph_of(R"(["B", 1, 1, 12])", call("group_norm", R"({"groups": 3})"), 1), 2, x);
  const auto rows = evaluate_on(
      graph_of(R"(["B", 12, 1, 1])", call("group_norm", R"({"groups": 3, "channels": "rows"})"), 1),
      2, x);
  EXPECT_EQ(features, rows);
}

TEST(Operators, GroupNormOfFeaturesNeverLeavesItsFactoring) {
  // Weight and bias are viewed by group, so that one view comes before and one after.
  const Graph graph = import_graph(R"({"ingot_graph": 1, "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 12]},
      {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 1, 1, 12]},
      {"op": "group_norm", "args": [0, 1], "attributes": {"groups": 4}}],
      "results": [{"value": 2, "name": "y"}]})");
  int views_of_data = 0;
  for (const Node& node : graph.nodes) {
    views_of_data += node.kind == NodeKind::view && node.shape.batched;
  }
  EXPECT_EQ(views_of_data, 2);
}

TEST(Operators, SaysWhatAnArgumentOrAttributeLacks) {
  const std::string row = R"(["B", 1, 1, 6])";
  EXPECT_THAT(error_of(row, call("group_norm")), HasSubstr("needs the attribute 'groups'"));
  EXPECT_THAT(error_of(row, call("group_norm", R"({"groups": 4})")),
              HasSubstr("6 channels do not divide into 4 groups"));
  EXPECT_THAT(error_of(row, call("group_norm", R"({"groups": 0})")), HasSubstr("0 groups"));
  EXPECT_THAT(error_of(row, call("max_pool", R"({"kernel": 0})")), HasSubstr("at least 1"));
  EXPECT_THAT(error_of(row, call("gelu", R"({"approximate": "sigmoid"})")), HasSubstr("tanh"));
  EXPECT_THAT(error_of(row, call("softplus", R"({"beta": "x"})")), HasSubstr("must be a number"));
  EXPECT_THAT(error_of(row, call("dropout", R"({"training": true})")), HasSubstr("random"));
  EXPECT_THAT(error_of(row, call("norm", R"({"p": 3})")), HasSubstr("order 3"));
  EXPECT_THAT(error_of(row, call("threshold")), HasSubstr("'threshold' and 'value'"));
  EXPECT_THAT(error_of(row, call("linear")), HasSubstr("takes 2 to 3 arguments, got 1"));
  EXPECT_THAT(error_of(row, call("prelu")), HasSubstr("takes 2 arguments, got 1"));
  EXPECT_THAT(error_of(row, call("layer_norm", R"({"axes": ["batch"]})")),
              HasSubstr("the batch cannot"));
  EXPECT_THAT(error_of(row, call("cast", R"({"dtype": "f8"})")), HasSubstr("no dtype 'f8'"));
  EXPECT_THAT(error_of(row, call("batch_norm", R"({"training": 1})")),
              HasSubstr("must be true or false"));
}

TEST(Operators, ParametersMustHaveAsManyElementsAsChannels) {
  EXPECT_THAT(error_of(R"(["B", 1, 1, 6])", R"({"op": "batch_norm", "args": [0, 0]})"),
              HasSubstr("weight has shape [B, 1, 1, 6], expected [1, 1, 1, 6]"));
}

}  // namespace
}  // namespace ingot
