// The C++ API's graphs, as the importer reads them. Both sides define ingot::Graph: the API's lives
// in the inline namespace `api`, and the internal headers come first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <type_traits>

#include "api/program.h"
#include "graph/importer.h"
// clang-format off
#include "ingot/ingot.hpp"
// clang-format on

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace api = ingot::api;

// What stands behind a handle is another class: a program that sees both has one of each.
static_assert(!std::is_same_v<ingot::api::Program, ingot::abi::Program>);

template <class Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const api::Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CppApi, BuildsTheSeedModel) {
  api::Graph graph("gemm_scale_bn");
  const auto by_feature = api::Shape::vector(4);
  const auto x = graph.input("x", api::Shape::batch(6));
  const auto weight = graph.parameter("gemm.weight", api::Shape::matrix(4, 6));
  const auto scale = graph.parameter("scale", by_feature);
  api::BatchNorm bn;
  bn.running_mean = graph.buffer("bn.running_mean", by_feature);
  bn.running_var = graph.buffer("bn.running_var", by_feature);
  bn.num_batches_tracked =
      graph.buffer("bn.num_batches_tracked", api::Shape::scalar(), api::DataType::i64);
  bn.training = true;
  bn.momentum.reset();
  graph.set_origin("bn", "model.cpp:7");
  graph.result(softmax(batch_norm(linear(x, weight) * scale, bn)), "y");

  const auto read = ingot::import_graph(graph.json());
  EXPECT_EQ(read.name, "gemm_scale_bn");
  EXPECT_EQ(read.leaves().size(), graph.leaf_names().size());
  EXPECT_EQ(read.updates.size(), 3u);
  const auto& y = read[read.results.at(0).value];
  EXPECT_TRUE(y.shape.batched);
  EXPECT_EQ(y.shape.features, 4);
  EXPECT_EQ(y.source, "model.cpp:7");
}

TEST(CppApi, EveryWrapperIsAnOperatorOfTheFormat) {
  api::Graph graph("all");
  const auto x = graph.input("x", api::Shape::batch(4));
  const auto square_matrix = graph.parameter("w", api::Shape::matrix(4, 4));
  auto y = matmul_transposed(matmul(x, square_matrix), square_matrix);
  for (const auto unary : {api::exp, api::log, api::sqrt, api::rsqrt, api::square, api::tanh,
                           api::sigmoid, api::relu, api::silu, api::mish, api::gelu}) {
    y = unary(y);
  }
  y = -(1.0 - y * 2.0 / y + y);
  y = layer_norm(y, {}, {}, 1e-3, {api::Axis::rows, api::Axis::features});
  for (const auto over_axes :
       {api::softmax, api::log_softmax, api::logsumexp, api::sum, api::mean, api::max, api::min}) {
    y = over_axes(y, {api::Axis::features});
  }
  y = api::apply("gelu", {y}, {{"approximate", "tanh"}});
  y = api::apply("view", {y}, {{"shape", api::Shape{true, 1, 1, 1}}});
  y = api::apply("max_pool", {y}, {{"kernel", 1}});
  graph.result(y, "y");
  EXPECT_NO_THROW(ingot::import_graph(graph.json()));
}

TEST(CppApi, NamesAndNumbersSurviveTheJson) {
  api::Graph graph("quo\"te\\ \n\x01 \xc3\xa9");
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto x = graph.input("x\t\"", api::Shape::vector(1));
  graph.result(x * 0.1 + kInfinity + 5e-324, "y");
  const auto read = ingot::import_graph(graph.json());
  EXPECT_EQ(read.name, graph.name());
  EXPECT_EQ(read[0].name, "x\t\"");
  std::vector<double> constants;
  for (const auto& node : read.nodes) {
    if (node.kind == ingot::NodeKind::constant) constants.push_back(node.constant);
  }
  EXPECT_THAT(constants, ElementsAre(0.1, kInfinity, 5e-324));
}

TEST(CppApi, RefusesAmbiguousNamesAndForeignValues) {
  api::Graph a("a"), b("b");
  const auto x = a.input("x", api::Shape::vector(1));
  const auto other = b.input("x", api::Shape::vector(1));
  EXPECT_THAT(error_of([&] { a.parameter("x", api::Shape::vector(1)); }), HasSubstr("named 'x'"));
  EXPECT_THAT(error_of([&] { a.result(x, "x"); }), HasSubstr("named 'x'"));
  EXPECT_THAT(error_of([&] { x + other; }), HasSubstr("another graph"));
}

TEST(CppApi, BindingsAreByNameAndShareOneBatch) {
  api::Graph graph("g");
  const auto a = graph.input("a", api::Shape::batch(2));
  const auto b = graph.input("b", api::Shape::batch(2));
  graph.result(a + b, "y");
  const api::detail::Signature signature(graph);
  std::vector<float> data(6), short_data(4);
  const auto tensor = api::host(data, api::Shape::batch(2), 3);
  api::Bindings bindings = {{"a", tensor}, {"b", tensor}};
  EXPECT_THAT(error_of([&] { signature.arrange(bindings); }), HasSubstr("nothing is bound to 'y'"));
  bindings["y"] = tensor;
  EXPECT_EQ(signature.batch(signature.arrange(bindings)), 3);
  bindings["b"] = api::host(short_data, api::Shape::batch(2), 2);
  EXPECT_THAT(error_of([&] { signature.batch(signature.arrange(bindings)); }),
              HasSubstr("'b' has batch size 2"));
  bindings["z"] = tensor;
  EXPECT_THAT(error_of([&] { signature.arrange(bindings); }), HasSubstr("no leaf or result 'z'"));
  EXPECT_THAT(error_of([&] { api::host(data, api::Shape::batch(4), 3); }),
              HasSubstr("12 elements"));
}

TEST(CppApi, TensorsAreRowMajor) {
  std::vector<int64_t> data(2 * 3 * 4 * 5);
  const auto tensor = api::host(data, api::Shape{true, 3, 4, 5}, 2);
  EXPECT_THAT(tensor.sizes, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(tensor.strides, ElementsAre(60, 20, 5, 1));
  EXPECT_EQ(tensor.dtype, INGOT_I64);
  EXPECT_EQ(tensor.device, -1);
}

TEST(CppApi, CompilesRunsAndExplains) {
  api::Graph graph("linear_softmax");
  const auto x = graph.input("x", api::Shape::batch(3));
  const auto weight = graph.parameter("weight", api::Shape::matrix(5, 3));
  graph.result(softmax(linear(x, weight)), "y");
  api::Program program = api::compile(graph);

  for (const int64_t batch : {2, 7}) {
    const auto count = static_cast<size_t>(batch) * 5;
    std::vector<float> xs(static_cast<size_t>(batch) * 3), ws(15), ys(count);
    for (size_t i = 0; i < xs.size(); ++i) xs[i] = 0.25f * static_cast<float>(i % 11);
    for (size_t i = 0; i < ws.size(); ++i) ws[i] = 1.0f - 0.5f * static_cast<float>(i % 4);
    std::vector<double> truth(count);
    api::Bindings bindings = {{"x", api::host(xs, api::Shape::batch(3), batch)},
                              {"weight", api::host(ws, api::Shape::matrix(5, 3))},
                              {"y", api::host(ys, api::Shape::batch(5), batch)}};
    program.prepare(batch);
    program.run(bindings);
    bindings["y"] = api::host(truth, api::Shape::batch(5), batch);
    api::evaluate_fp64(graph, bindings);
    for (size_t i = 0; i < count; ++i) EXPECT_NEAR(ys[i], truth[i], 1e-6) << i;

    // Whether the host keeps packed weights (its own product alone does) or not: the same bits.
    std::vector<std::byte> kept(program.frozen_size() + 256);
    void* frozen = kept.data();
    size_t room = kept.size();
    std::align(256, program.frozen_size(), frozen, room);
    std::vector<float> again(count);
    bindings["y"] = api::host(again, api::Shape::batch(5), batch);
    std::vector<std::byte> memory(program.workspace_size(batch) + 256);
    void* workspace = memory.data();
    size_t space = memory.size();
    std::align(256, program.workspace_size(batch), workspace, space);
    program.freeze(bindings, frozen, room);
    program.run_frozen(bindings, workspace, space, frozen, room);
    EXPECT_EQ(again, ys);
  }
  EXPECT_THAT(program.explain(2), HasSubstr("softmax"));
  EXPECT_THAT(program.signature(), HasSubstr("\"weight\""));
}

TEST(CppApi, RunsOnTensorsOfAnyStrides) {
  constexpr int64_t kBatch = 4;
  api::Graph graph("linear");
  const auto x = graph.input("x", api::Shape::batch(3));
  graph.result(linear(x, graph.parameter("weight", api::Shape::matrix(5, 3))), "y");
  api::Program program = api::compile(graph);
  std::vector<float> xs(12), spread(24), ws(15), ys(20), found(20);
  for (size_t i = 0; i < xs.size(); ++i) xs[i] = spread[2 * i] = 0.25f * static_cast<float>(i);
  for (size_t i = 0; i < ws.size(); ++i) ws[i] = 1.0f - 0.5f * static_cast<float>(i % 4);
  api::Bindings bindings = {{"x", api::host(xs, api::Shape::batch(3), kBatch)},
                            {"weight", api::host(ws, api::Shape::matrix(5, 3))},
                            {"y", api::host(ys, api::Shape::batch(5), kBatch)}};
  program.run(bindings);
  EXPECT_EQ(program.prepare(bindings), program.workspace_size(kBatch));

  bindings["x"].data = spread.data();
  for (int64_t& stride : bindings["x"].strides) stride *= 2;
  bindings["y"] = api::host(found, api::Shape::batch(5), kBatch);
  program.run(bindings);
  EXPECT_EQ(found, ys);
  // x is copied into the workspace, which a caller who brings it has to know.
  EXPECT_GT(program.prepare(bindings), program.workspace_size(kBatch));
  std::vector<std::byte> memory(program.workspace_size(kBatch) + 256);
  void* workspace = memory.data();
  size_t room = memory.size();
  std::align(256, program.workspace_size(kBatch), workspace, room);
  try {
    program.run(bindings, workspace, program.workspace_size(kBatch));
    FAIL() << "with less memory than it takes";
  } catch (const api::Error& error) {
    EXPECT_NE(std::string(error.what()).find("ingot_program_prepare_call"), std::string::npos)
        << error.what();
  }
}

TEST(CppApi, FailuresCarryTheLibrarysMessageAndStatus) {
  api::Graph graph("bad");
  const auto x = graph.input("x", api::Shape::batch(3));
  graph.set_origin("act", "model.cpp:9");
  graph.result(api::apply("frobnicate", {x}), "y");
  try {
    api::compile(graph);
    FAIL() << "compiled";
  } catch (const api::Error& error) {
    EXPECT_EQ(error.status(), INGOT_UNSUPPORTED);
    EXPECT_THAT(error.what(), HasSubstr("frobnicate"));
    EXPECT_THAT(error.what(), HasSubstr("model.cpp:9"));
  }
}

}  // namespace
