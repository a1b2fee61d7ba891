#include "graph/graph.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/builder.h"
#include "support/error.h"

namespace ingot {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Shape kRow{true, 1, 1, 4};

std::string error_of(const Graph& graph) {
  try {
    graph.validate();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// x and a buffer, x + buffer handed back.
Graph sum_graph() {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, kRow);
  const ValueId buffer = builder.leaf(LeafRole::buffer, "state", DType::f32, {false, 1, 1, 4});
  builder.set_origin("act", "model.py:3");
  builder.result(builder.pointwise(PointwiseOp::add_, {x, buffer}), "y");
  return builder.take();
}

TEST(Shapes, BroadcastAxisByAxis) {
  EXPECT_EQ(broadcast({true, 1, 1, 4}, {false, 3, 1, 1}), (Shape{true, 3, 1, 4}));
  EXPECT_THROW(broadcast({false, 1, 1, 4}, {false, 1, 1, 3}), Error);
}

TEST(Graph, UsersAreListedOnceAndInOrder) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, kRow);
  const ValueId squared = builder.pointwise(PointwiseOp::mul_, {x, x});
  const ValueId sum = builder.pointwise(PointwiseOp::add_, {x, squared});
  builder.result(sum, "y");
  EXPECT_THAT(builder.take().users(),
              ElementsAre(ElementsAre(squared, sum), ElementsAre(sum), ElementsAre()));
}

TEST(Graph, ValidationNamesTheNodeAndWhatIsWrong) {
  Graph graph = sum_graph();
  EXPECT_EQ(error_of(graph), "no error");
  graph[2].shape.features = 5;
  EXPECT_THAT(error_of(graph), AllOf(HasSubstr("value 2 (act, model.py:3)"),
                                     HasSubstr("[B, 1, 1, 5] where its arguments give")));
  graph = sum_graph();
  graph[2].dtype = DType::f16;
  EXPECT_THAT(error_of(graph), HasSubstr("dtype f16"));
  graph = sum_graph();
  graph[2].args = {0};
  EXPECT_THAT(error_of(graph), HasSubstr("takes 2 arguments, got 1"));
  for (const ValueId later : {2, 3, -1}) {
    graph = sum_graph();
    graph[2].args[1] = later;
    EXPECT_THAT(error_of(graph), HasSubstr("not an earlier value"));
  }
  for (const ValueId absent : {3, 9, -2}) {  // there are three
    graph = sum_graph();
    graph.results[0].value = absent;
    EXPECT_THAT(error_of(graph), HasSubstr(fmt::format("value {}, which does not exist", absent)));
  }
}

TEST(Graph, UpdatesFitTheirBuffer) {
  Graph graph = sum_graph();
  graph.updates = {{2, 1}};
  EXPECT_THAT(error_of(graph), HasSubstr("buffer 'state' is f32[1, 1, 1, 4], but its update is"));
  graph.updates = {{0, 0}};
  EXPECT_THAT(error_of(graph), HasSubstr("not a buffer"));
  graph.updates = {{1, 1}, {1, 1}};
  EXPECT_THAT(error_of(graph), HasSubstr("updated twice"));
}

TEST(Builder, ALaterUpdateReplacesAnEarlierOne) {
  GraphBuilder builder;
  const ValueId state = builder.leaf(LeafRole::buffer, "state", DType::f32, {});
  EXPECT_EQ(builder.current(state), state);
  const ValueId once = builder.pointwise(PointwiseOp::neg_, {state});
  builder.update(once, state);
  EXPECT_EQ(builder.current(state), once);
  const ValueId twice = builder.pointwise(PointwiseOp::neg_, {once});
  builder.update(twice, state);
  EXPECT_EQ(builder.current(state), twice);
  EXPECT_EQ(builder.take().updates.size(), 1u);
}

TEST(Builder, ConstantsAdoptTheOtherArgumentsDtype) {
  GraphBuilder builder;
  const auto with = [&builder](DType dtype, double constant) {
    const ValueId x = builder.leaf(LeafRole::input, "x", dtype, {});
    const ValueId y = builder.pointwise(PointwiseOp::mul_, {x, builder.constant(constant)});
    return builder.graph()[y].dtype;
  };
  EXPECT_EQ(with(DType::f16, 0.5), DType::f16);
  EXPECT_EQ(with(DType::f64, 0.5), DType::f64);
  EXPECT_EQ(with(DType::i64, 2), DType::i64);
  EXPECT_EQ(with(DType::i64, 0.5), DType::f32);
}

TEST(Builder, RefusesWhatHasNoMeaning) {
  GraphBuilder builder;
  const ValueId integers = builder.leaf(LeafRole::input, "i", DType::i64, kRow);
  const ValueId flags = builder.leaf(LeafRole::input, "f", DType::boolean, kRow);
  EXPECT_THROW(builder.pointwise(PointwiseOp::add_, {flags, flags}), Error);
  EXPECT_THROW(builder.pointwise(PointwiseOp::cast_, {flags}), Error);
  EXPECT_THROW(builder.reduce(Finish::mean, integers, axis_bit(kFeatures)), Error);
  EXPECT_THROW(builder.reduce(Finish::sum, integers, 0), Error);
  EXPECT_THROW(builder.matmul(integers, integers, true), Error);
  EXPECT_THROW(builder.leaf(LeafRole::input, "x", DType::f32, {true, 0, 1, 1}), Error);
}

TEST(Graph, PrintsOneLineANode) {
  EXPECT_EQ(to_string(sum_graph()),
            "graph\n"
            "  %0 = input \"x\" : f32[B, 1, 1, 4]\n"
            "  %1 = buffer \"state\" : f32[1, 1, 1, 4]\n"
            "  %2 = add %0, %1 : f32[B, 1, 1, 4]  // act, model.py:3\n"
            "  return %2 as \"y\"\n");
}

}  // namespace
}  // namespace ingot
