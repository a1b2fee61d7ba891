#include "graph/importer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include "support/error.h"

namespace ingot {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The seed model: batch norm of a scaled linear, in training mode.
std::string gemm_scale_bn(const std::string& batch_norm_attributes) {
  return R"({"ingot_graph": 1, "name": "gemm_scale_bn", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 6]},
    {"op": "parameter", "name": "gemm.weight", "dtype": "f32", "shape": [1, 4, 1, 6]},
    {"op": "parameter", "name": "gemm.bias", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "parameter", "name": "scale", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "parameter", "name": "bn.weight", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "parameter", "name": "bn.bias", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "buffer", "name": "bn.running_mean", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "buffer", "name": "bn.running_var", "dtype": "f32", "shape": [1, 1, 1, 4]},
    {"op": "buffer", "name": "bn.num_batches_tracked", "dtype": "i64", "shape": [1, 1, 1, 1]},
    {"op": "linear", "args": [0, 1, 2], "origin": "gemm", "source": "model.py:14"},
    {"op": "mul", "args": [9, 3], "source": "model.py:15"},
    {"op": "batch_norm", "args": [10, 4, 5, 6, 7, 8], "attributes": )" +
         batch_norm_attributes + R"(, "origin": "bn", "source": "model.py:16"}],
    "results": [{"value": 11, "name": "y"}]})";
}

std::string error_of(std::string_view json) {
  try {
    import_graph(json);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// A graph with one input x: [B, 1, 1, 6] and then the given values.
std::string graph_with(const std::string& values, int result = 1) {
  return R"({"ingot_graph": 1, "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 6]})" +
         (values.empty() ? "" : ", " + values) + R"(], "results": [{"value": )" +
         std::to_string(result) + R"(, "name": "y"}]})";
}

TEST(Importer, ReadsTheSeedModelInTrainingMode) {
  const Graph graph = import_graph(gemm_scale_bn(R"({"training": true, "momentum": 0.1})"));
  EXPECT_EQ(graph.name, "gemm_scale_bn");
  EXPECT_EQ(graph.leaves().size(), 9u);
  ASSERT_EQ(graph.results.size(), 1u);
  const Node& y = graph[graph.results[0].value];
  EXPECT_EQ(y.shape, (Shape{true, 1, 1, 4}));
  EXPECT_EQ(y.name, "bn");
  EXPECT_EQ(y.source, "model.py:16");
  // Running mean, running variance and the counter.
  ASSERT_EQ(graph.updates.size(), 3u);
  for (const Update& update : graph.updates) EXPECT_EQ(graph[update.buffer].role, LeafRole::buffer);
}

TEST(Importer, EvalModeReadsTheRunningStatisticsAndUpdatesNothing) {
  const Graph graph = import_graph(gemm_scale_bn(R"({"training": false, "momentum": null})"));
  EXPECT_TRUE(graph.updates.empty());
  for (const Node& node : graph.nodes) EXPECT_NE(node.kind, NodeKind::reduce);
}

TEST(Importer, ExportedGraphsComeBackEqual) {
  const Graph graph = import_graph(gemm_scale_bn(R"({"training": true})"));
  const nlohmann::json exported = export_graph(graph);
  const Graph again = import_graph(exported.dump());
  EXPECT_EQ(to_string(again), to_string(graph));
  EXPECT_EQ(export_graph(again), exported);
}

TEST(Importer, InfiniteConstantsSurviveTheFormat) {
  const Graph graph = import_graph(
      graph_with(R"({"op": "constant", "value": "-inf"}, {"op": "maximum", "args": [0, 1]})", 2));
  const Graph again = import_graph(export_graph(graph).dump());
  EXPECT_EQ(again[1].constant, -std::numeric_limits<double>::infinity());
}

TEST(Importer, NamesWhatIsWrongAndWhere) {
  EXPECT_THAT(error_of("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("must be an object"));
  EXPECT_THAT(error_of(R"({"ingot_graph": 2})"), HasSubstr("format 1"));
  EXPECT_THAT(error_of(R"({"ingot_graph": 1, "values": []})"), HasSubstr("no results"));
  EXPECT_THAT(error_of(graph_with(
                  R"({"op": "frobnicate", "args": [0], "origin": "act", "source": "m.py:7"})")),
              AllOf(HasSubstr("value 1 (frobnicate 'act', m.py:7)"),
                    HasSubstr("there is no operator 'frobnicate'")));
  EXPECT_THAT(error_of(graph_with(R"({"op": "add", "args": [0]})")),
              HasSubstr("takes 2 arguments, got 1"));
  EXPECT_THAT(error_of(graph_with(R"({"op": "add", "args": [0, 5]})")),
              HasSubstr("names value 5, which is not an earlier one"));
  EXPECT_THAT(error_of(graph_with(R"({"op": "add", "args": [0, -1]})")),
              HasSubstr("not an earlier value"));
  EXPECT_THAT(error_of(graph_with(R"({"op": "softmax", "args": [0], "attributes": {"dim": 1}})")),
              AllOf(HasSubstr("no attribute 'dim'"), HasSubstr("axes")));
  EXPECT_THAT(
      error_of(graph_with(R"({"op": "softmax", "args": [0], "attributes": {"axes": ["depth"]}})")),
      HasSubstr("no axis 'depth'"));
  EXPECT_THAT(error_of(graph_with(R"({"op": "relu", "args": [0], "attrs": {}})")),
              HasSubstr("unknown key 'attrs'"));
  EXPECT_THAT(error_of(graph_with(
                  R"({"op": "view", "args": [0], "attributes": {"shape": ["B", 1, 1, 7]}})")),
              HasSubstr("cannot be viewed"));
  EXPECT_THAT(error_of(graph_with("", 3)), HasSubstr("a result names value 3"));
}

TEST(Importer, ShapesThatDoNotFitAreNamedTogether) {
  const std::string message = error_of(graph_with(
      R"({"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 4, 1, 5]},
         {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}})",
      2));
  EXPECT_THAT(message, AllOf(HasSubstr("[B, 1, 1, 6]"), HasSubstr("[1, 4, 1, 5]"),
                             HasSubstr("inner extents 6 and 5 differ")));
}

TEST(Importer, ExtentsMustBePositiveAndCountable) {
  const auto view = [](const std::string& shape) {
    return error_of(
        graph_with(R"({"op": "view", "args": [0], "attributes": {"shape": )" + shape + "}}"));
  };
  EXPECT_THAT(view(R"(["B", 4611686018427387904, 4, 1])"), HasSubstr("too many elements"));
  EXPECT_THAT(view(R"(["B", -1, 1, -6])"), HasSubstr("extent below 1"));
  EXPECT_THAT(view("[2, 1, 1, 3]"), HasSubstr("batch extent"));
  EXPECT_THAT(view("6"), HasSubstr("'shape'"));
}

// Whatever the text, there is a graph or an Error: no crash, no other exception.
TEST(Importer, DamagedTextsAreRefusedCleanly) {
  const std::string good = gemm_scale_bn(R"({"training": true, "momentum": 0.1})");
  const std::string_view pieces[] = {"-1",
                                     "1e99",
                                     "null",
                                     "[]",
                                     "{}",
                                     "\"B\"",
                                     "true",
                                     "0",
                                     "\"view\"",
                                     "\"axes\"",
                                     "99999999999999999999"};
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (auto edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % text.size(), length = random() % 12;
      const std::string_view piece = pieces[random() % std::size(pieces)];
      if (random() % 2 == 0) {
        text.replace(at, length, piece);
      } else {
        text[at] = static_cast<char>(random() % 256);
      }
    }
    try {
      import_graph(text);
      ++accepted;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(accepted, 0);  // a changed name or number may still be a graph
}

TEST(Importer, DeepNestingIsRefusedCleanly) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  EXPECT_THAT(error_of(deep), HasSubstr("deep"));
  EXPECT_THAT(
      error_of(graph_with(R"({"op": "view", "args": [0], "attributes": {"shape": )" + deep + "}}")),
      HasSubstr("deep"));
}

TEST(Importer, DeclaredShapesAndDtypesAreChecked) {
  EXPECT_THAT(error_of(graph_with(R"({"op": "exp", "args": [0], "shape": ["B", 1, 1, 5]})")),
              HasSubstr("declares shape"));
  EXPECT_THAT(error_of(graph_with(R"({"op": "exp", "args": [0], "dtype": "f16"})")),
              HasSubstr("declares dtype"));
}

}  // namespace
}  // namespace ingot
