#include "plan/plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "graph/evaluate.h"
#include "graph/operators.h"
#include "graph_testing.h"
#include "plan/factoring.h"
#include "plan/frontier.h"
#include "plan_interpreter.h"
#include "support/error.h"

namespace ingot {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kInner = 8, kOuter = 6;
constexpr Shape kVector{false, 1, 1, kOuter};

Target target_with(bool fused) {
  Target target;
  target.name = "test";
  target.fused_epilogue = target.fused_statistics = fused;
  return target;
}

// linear → scale → batch norm, or linear → batch norm → scale → softmax, as the seed models have
// them.
class Models {
 public:
  Graph gemm_scale_bn(bool training) {
    ValueId y = linear();
    y = builder_.pointwise(PointwiseOp::mul_, {y, parameter("scale")});
    builder_.result(batch_norm(y, training), "y");
    return builder_.take();
  }
  Graph gemm_bn_scale_softmax() {
    const ValueId scale = builder_.leaf(LeafRole::parameter, "scale", DType::f32, {});
    const ValueId y = builder_.pointwise(PointwiseOp::mul_, {scale, batch_norm(linear(), true)});
    OperatorCall call{{y}, {{"axes", std::vector<int64_t>{kFeatures}}}};
    builder_.result(apply_operator(builder_, "softmax", call), "y");
    return builder_.take();
  }

 private:
  ValueId parameter(const char* name) {
    return builder_.leaf(LeafRole::parameter, name, DType::f32, kVector);
  }
  ValueId buffer(const char* name) {
    return builder_.leaf(LeafRole::buffer, name, DType::f32, kVector);
  }
  ValueId linear() {
    const ValueId x = builder_.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kInner});
    const ValueId w =
        builder_.leaf(LeafRole::parameter, "weight", DType::f32, {false, kOuter, 1, kInner});
    const ValueId bias = parameter("bias");
    return builder_.pointwise(PointwiseOp::add_, {builder_.matmul(x, w, true), bias});
  }
  ValueId batch_norm(ValueId y, bool training) {
    OperatorCall call;
    call.args = {y,
                 parameter("gamma"),
                 parameter("beta"),
                 buffer("mean"),
                 buffer("var"),
                 builder_.leaf(LeafRole::buffer, "count", DType::i64, {})};
    call.attributes = {{"training", training},
                       {"momentum", 0.1},
                       {"eps", 1e-5},
                       {"axes", std::vector<int64_t>{kBatch}}};
    return apply_operator(builder_, "batch_norm", call);
  }
  GraphBuilder builder_;
};

std::vector<SweepKind> kinds(const Plan& plan) {
  std::vector<SweepKind> list;
  for (const Sweep& sweep : plan.sweeps) list.push_back(sweep.kind);
  return list;
}

void expect_meaning(const Graph& graph, const Plan& plan) {
  testing::Bindings expected(graph, 5, 7), actual(graph, 5, 7);
  evaluate(graph, 5, expected.tensors());
  testing::interpret(plan, 5, actual.tensors());
  EXPECT_TRUE(testing::agree(expected, actual)) << to_string(plan);
}

TEST(Plan, FusesStatisticsIntoTheProduct) {
  const Graph graph = Models().gemm_scale_bn(true);
  const Plan plan = make_plan(graph, target_with(true), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::map));
  const Sweep& product = plan.sweeps[0];
  // One Moments state serves mean, variance and the running statistics.
  EXPECT_EQ(shared_states(plan.graph, product, product.statistics).size(), 1u);
  EXPECT_FALSE(product.tail.empty());
  for (const Update& update : plan.graph.updates) {
    EXPECT_THAT(product.stores, Contains(update.value));
  }
  expect_meaning(graph, plan);
}

TEST(Plan, ReadsTheProductTwiceWhereNothingCanBeFused) {
  const Graph graph = Models().gemm_scale_bn(true);
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::columns, SweepKind::map));
  // Nothing but the product is stored at full size: bias and scale are applied again.
  EXPECT_THAT(plan.sweeps[2].loads, Contains(plan.sweeps[0].matmul));
  for (const ValueId id : plan.sweeps[1].stores) EXPECT_FALSE(plan.graph[id].shape.batched);
  expect_meaning(graph, plan);
}

TEST(Plan, ResolvesSoftmaxInOneRowsSweep) {
  const Graph graph = Models().gemm_bn_scale_softmax();
  const Plan plan = make_plan(graph, target_with(true), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::rows));
  expect_meaning(graph, plan);
}

// What a softmax makes of g, summed: over everything, as the gradient of a number that scales what
// is before the softmax; and, with `columns`, over the batch, as the gradient of a bias.
Graph summed_behind_softmax(bool columns) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 12});
  const ValueId g = builder.leaf(LeafRole::input, "g", DType::f32, {true, 1, 1, 12});
  const OperatorCall call{{x}, {{"axes", std::vector<int64_t>{kFeatures}}}};
  const ValueId y =
      builder.pointwise(PointwiseOp::mul_, {apply_operator(builder, "softmax", call), g});
  const ValueId product = builder.pointwise(PointwiseOp::mul_, {y, x});
  const auto everything = static_cast<AxisMask>(axis_bit(kBatch) | axis_bit(kFeatures));
  builder.result(builder.reduce(Finish::sum, product, everything), "sum");
  if (columns) builder.result(builder.reduce(Finish::sum, y, axis_bit(kBatch)), "columns");
  return builder.take();
}

TEST(Plan, StoresOneOfTwoValuesThatFollowFromOneAnotherOnAGpu) {
  // Of u, which a softmax's sweep computes, and v = s·u: columns of both are summed, v is the
  // result.
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 12});
  const ValueId g = builder.leaf(LeafRole::input, "g", DType::f32, {true, 1, 1, 12});
  const ValueId s = builder.leaf(LeafRole::parameter, "s", DType::f32, {});
  const auto times = [&](ValueId a, ValueId b) {
    return builder.pointwise(PointwiseOp::mul_, {a, b});
  };
  const OperatorCall call{{x}, {{"axes", std::vector<int64_t>{kFeatures}}}};
  const ValueId u = times(apply_operator(builder, "softmax", call), g), v = times(u, s);
  builder.result(builder.reduce(Finish::sum, times(u, x), axis_bit(kBatch)), "sum");
  const ValueId mean = builder.reduce(Finish::mean, times(v, x), axis_bit(kBatch));
  builder.result(builder.pointwise(PointwiseOp::sub_, {v, mean}), "centred");
  const Graph graph = builder.take();
  Target target = target_with(true);
  target.device = Target::Device::cuda;
  target.bandwidth = 4e12;
  target.units = 132;
  const Plan plan = make_plan(graph, target, Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::rows, SweepKind::columns, SweepKind::map));
  EXPECT_EQ(plan.sweeps[0].stores.size(), 1u);
  expect_meaning(graph, plan);
}

TEST(Plan, SumsColumnsFirstWhereStatisticsOfColumnsAreTakenAnyway) {
  const Graph graph = summed_behind_softmax(true);
  const Plan plan = make_plan(graph, target_with(true), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::rows, SweepKind::columns, SweepKind::rows));
  EXPECT_EQ(plan.sweeps[0].stores.size(), 1u) << "not the product, too";
  EXPECT_EQ(plan.sweeps[1].statistics.size(), 2u);
  EXPECT_FALSE(plan.sweeps[2].space.batched);
  expect_meaning(graph, plan);
  const Graph alone = summed_behind_softmax(false);
  const Plan of_one = make_plan(alone, target_with(true), Precision::fp32);
  EXPECT_THAT(kinds(of_one), ElementsAre(SweepKind::rows, SweepKind::columns));
  expect_meaning(alone, of_one);
}

TEST(Plan, NeedsOneSweepInEvalMode) {
  const Graph graph = Models().gemm_scale_bn(false);
  const Plan plan = make_plan(graph, target_with(true), Precision::fp32);
  EXPECT_EQ(plan.sweeps.back().kind, SweepKind::product);
  expect_meaning(graph, plan);
}

// How many values of every element a product's epilogue stores.
size_t stored_by_product(const Plan& plan) {
  const Sweep& product = plan.sweeps[0];
  return static_cast<size_t>(
      std::count_if(product.stores.begin(), product.stores.end(),
                    [&](ValueId id) { return plan.graph[id].shape == product.space; }));
}

TEST(Plan, StoresOneValueOfEveryElementInAnEpilogueOnAGpu) {
  // mish(x·Wᵀ + b) with x·Wᵀ + b as a further result, which backward reads. On the way lie values
  // that cost more to compute than to load.
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kInner});
  const ValueId w =
      builder.leaf(LeafRole::parameter, "weight", DType::f32, {false, kOuter, 1, kInner});
  const ValueId bias = builder.leaf(LeafRole::parameter, "bias", DType::f32, kVector);
  const ValueId linear = builder.pointwise(PointwiseOp::add_, {builder.matmul(x, w, true), bias});
  ValueId y = linear;
  for (int i = 0; i < 4; ++i) {
    y = builder.pointwise(PointwiseOp::tanh_, {builder.pointwise(PointwiseOp::exp_, {y})});
  }
  builder.result(builder.pointwise(PointwiseOp::mul_, {linear, y}), "y");
  builder.result(linear, "linear");
  const Graph graph = builder.take();
  Target target = target_with(true);
  const Plan on_host = make_plan(graph, target, Precision::fp32);
  EXPECT_THAT(kinds(on_host), ElementsAre(SweepKind::product));
  target.device = Target::Device::cuda;
  const Plan plan = make_plan(graph, target, Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::map));
  EXPECT_EQ(stored_by_product(plan), 1u);
  expect_meaning(graph, plan);
}

TEST(Plan, StoresWhatBothFollowFromInAnEpilogueOnAGpu) {
  // Of y = x·Wᵀ + b: tanh(y) and what is reduced of y², or exp(y), or tanh(y) + y.
  enum class Other { length, exp, sum };
  for (const Other other : {Other::length, Other::exp, Other::sum}) {
    GraphBuilder builder;
    const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kInner});
    const ValueId w =
        builder.leaf(LeafRole::parameter, "weight", DType::f32, {false, kOuter, 1, kInner});
    const ValueId bias = builder.leaf(LeafRole::parameter, "bias", DType::f32, kVector);
    const ValueId y = builder.pointwise(PointwiseOp::add_, {builder.matmul(x, w, true), bias});
    const ValueId tanh = builder.pointwise(PointwiseOp::tanh_, {y});
    builder.result(tanh, "tanh");
    const ValueId square = builder.pointwise(PointwiseOp::mul_, {y, y});
    builder.result(other == Other::length ? builder.reduce(Finish::sum, square, axis_bit(kFeatures))
                   : other == Other::exp  ? builder.pointwise(PointwiseOp::exp_, {y})
                                          : builder.pointwise(PointwiseOp::add_, {tanh, y}),
                   "other");
    const Graph graph = builder.take();
    Target target = target_with(true);
    target.device = Target::Device::cuda;
    const Plan plan = make_plan(graph, target, Precision::fp32);
    EXPECT_EQ(plan.sweeps[0].kind, SweepKind::product);
    EXPECT_EQ(stored_by_product(plan), 1u) << static_cast<int>(other);
    expect_meaning(graph, plan);
  }
}

enum class Stored { nothing, products, products_and_sums };

// x = x + tanh(layer_norm(x)·Wᵀ), again and again. stored: what are results too, as backward wants
// them.
Graph residual_layers(int count, Stored stored) {
  GraphBuilder builder;
  const std::map<std::string, Attribute> axes = {{"axes", std::vector<int64_t>{kFeatures}}};
  ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  for (int i = 0; i < count; ++i) {
    const ValueId w = builder.leaf(LeafRole::parameter, fmt::format("w{}", i), DType::f32,
                                   {false, kOuter, 1, kOuter});
    const ValueId y = builder.matmul(apply_operator(builder, "layer_norm", {{x}, axes}), w, true);
    if (stored != Stored::nothing) builder.result(y, fmt::format("y{}", i));
    x = builder.pointwise(PointwiseOp::add_, {x, builder.pointwise(PointwiseOp::tanh_, {y})});
    if (stored == Stored::products_and_sums) builder.result(x, fmt::format("x{}", i));
  }
  builder.result(apply_operator(builder, "layer_norm", {{x}, axes}), "out");
  return builder.take();
}

size_t most_loads(const Plan& plan) {
  size_t most = 0;
  for (const Sweep& sweep : plan.sweeps) most = std::max(most, sweep.loads.size());
  return most;
}

TEST(Plan, StoresWhatGrowsFromLayerToLayerOnAGpu) {
  Target target = target_with(true);
  target.device = Target::Device::cuda;
  for (const Stored stored : {Stored::nothing, Stored::products, Stored::products_and_sums}) {
    const Graph graph = residual_layers(9, stored);
    const Plan plan = make_plan(graph, target, Precision::fp32);
    EXPECT_LE(most_loads(plan), 3U) << to_string(plan);
    expect_meaning(graph, plan);
  }
}

TEST(Plan, ReadsTheWeightsOfVeryLongRowsInASweepOverAllSamplesOnAGpu) {
  const auto kinds_of = [](int64_t features, bool on_gpu) {
    GraphBuilder builder;
    const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, features});
    const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, 1, 1, features});
    const OperatorCall call{{x}, {{"axes", std::vector<int64_t>{kFeatures}}}};
    const ValueId y = apply_operator(builder, "layer_norm", call);
    builder.result(builder.pointwise(PointwiseOp::mul_, {y, w}), "y");
    Target target = target_with(true);
    if (on_gpu) target.device = Target::Device::cuda;
    return kinds(make_plan(builder.take(), target, Precision::fp32));
  };
  constexpr int64_t kLongest = 1 << 20;
  EXPECT_THAT(kinds_of(kLongest, true), ElementsAre(SweepKind::rows));
  EXPECT_THAT(kinds_of(kLongest + 1, true), ElementsAre(SweepKind::rows, SweepKind::map));
  EXPECT_THAT(kinds_of(kLongest + 1, false), ElementsAre(SweepKind::rows));
}

TEST(Plan, CutsSweepsOfRowsThatWouldReduceTooMuchOnAGpu) {
  // The norms of all layers, computed again from what was stored of each.
  constexpr int kLayers = 40;
  GraphBuilder builder;
  const std::map<std::string, Attribute> axes = {{"axes", std::vector<int64_t>{kFeatures}}};
  ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  for (int i = 0; i < kLayers; ++i) {
    const ValueId y =
        builder.leaf(LeafRole::input, fmt::format("y{}", i), DType::f32, {true, 1, 1, kOuter});
    x = builder.pointwise(PointwiseOp::add_, {x, builder.pointwise(PointwiseOp::tanh_, {y})});
    builder.result(apply_operator(builder, "layer_norm", {{x}, axes}), fmt::format("norm{}", i));
  }
  const Graph graph = builder.take();
  Target target = target_with(true);
  target.device = Target::Device::cuda;
  const Plan plan = make_plan(graph, target, Precision::fp32);
  EXPECT_GT(plan.sweeps.size(), 5U);
  size_t loaded = 0;
  for (const Sweep& sweep : plan.sweeps) loaded += sweep.loads.size();
  EXPECT_LE(most_loads(plan), 8U);
  EXPECT_LE(loaded, 2U * kLayers);
  expect_meaning(graph, plan);
}

TEST(Plan, PutsProductsThatMeetOneAfterTheOther) {
  // (x·W₁ᵀ) · (x·W₂ᵀ) · (x·W₃ᵀ)
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kInner});
  ValueId y = kNoValue;
  for (const char* name : {"w1", "w2", "w3"}) {
    const ValueId w =
        builder.leaf(LeafRole::parameter, name, DType::f32, {false, kOuter, 1, kInner});
    const ValueId product = builder.matmul(x, w, true);
    y = y == kNoValue ? product : builder.pointwise(PointwiseOp::mul_, {y, product});
  }
  builder.result(y, "y");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(true), Precision::fp32);
  EXPECT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::product, SweepKind::product));
  for (const Sweep& sweep : plan.sweeps) EXPECT_EQ(sweep.stores.size(), 1U);
  expect_meaning(graph, plan);
  // Without epilogues there is nothing to gain.
  EXPECT_THAT(
      kinds(make_plan(graph, target_with(false), Precision::fp32)),
      ElementsAre(SweepKind::product, SweepKind::product, SweepKind::product, SweepKind::map));
}

// silu(x·W₁ᵀ) · (x·W₂ᵀ) in bf16: an epilogue would wait for the first product's result.
TEST(Plan, LeavesWhatFollowsFromTwoLongProductsOfHalvesToOneSweep) {
  const auto gated = [](DType dtype, int64_t k) {
    GraphBuilder builder;
    const ValueId x = builder.leaf(LeafRole::input, "x", dtype, {true, 1, 1, k});
    std::vector<ValueId> products;
    for (const char* name : {"w1", "w2"}) {
      const ValueId w = builder.leaf(LeafRole::parameter, name, dtype, {false, 64, 1, k});
      products.push_back(builder.matmul(x, w, true));
    }
    const ValueId gate = builder.pointwise(PointwiseOp::sigmoid_, {products[0]});
    builder.result(builder.pointwise(PointwiseOp::mul_, {gate, products[1]}), "y");
    Target target = target_with(true);
    target.fused_half = true;
    return kinds(make_plan(builder.take(), target, Precision::fp32));
  };
  const auto one_sweep = ElementsAre(SweepKind::product, SweepKind::product, SweepKind::map);
  const auto epilogues = ElementsAre(SweepKind::product, SweepKind::product);
  EXPECT_THAT(gated(DType::bf16, 1024), one_sweep);
  EXPECT_THAT(gated(DType::f16, 4096), one_sweep);
  EXPECT_THAT(gated(DType::bf16, 768), epilogues);
  EXPECT_THAT(gated(DType::f32, 4096), epilogues);
}

TEST(Plan, StoresWhatIsReadAnywayInALaterMap) {
  // Behind dh = dy·Wᵀ: the gradients dh·u and dh·g, and u·g, which does not wait for the product.
  GraphBuilder builder;
  const Shape wide{true, 1, 1, kOuter};
  const ValueId dy = builder.leaf(LeafRole::input, "dy", DType::f32, {true, 1, 1, kInner});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, kOuter, 1, kInner});
  const ValueId g = builder.leaf(LeafRole::input, "g", DType::f32, wide);
  const ValueId u = builder.leaf(LeafRole::input, "u", DType::f32, wide);
  const ValueId other = builder.leaf(LeafRole::input, "other", DType::f32, wide);
  const ValueId dh = builder.matmul(dy, w, true);
  const auto times = [&](ValueId a, ValueId b) {
    return builder.pointwise(PointwiseOp::mul_, {a, b});
  };
  builder.result(times(dh, u), "dg");
  builder.result(times(dh, g), "du");
  builder.result(times(g, u), "h");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::product, SweepKind::map));
  EXPECT_EQ(plan.sweeps[1].stores.size(), 3u);
  expect_meaning(graph, plan);

  // What reads more has a sweep of its own.
  GraphBuilder apart;
  const auto copy = [&](ValueId id) {
    return apart.leaf(graph[id].role, graph[id].name, DType::f32, graph[id].shape);
  };
  const ValueId v = copy(dy), m = copy(w), a = copy(g), b = copy(other);
  apart.result(apart.pointwise(PointwiseOp::mul_, {apart.matmul(v, m, true), a}), "du");
  apart.result(apart.pointwise(PointwiseOp::mul_, {a, b}), "h");
  EXPECT_THAT(kinds(make_plan(apart.take(), target_with(false), Precision::fp32)),
              ElementsAre(SweepKind::product, SweepKind::map, SweepKind::map));
}

TEST(Plan, ResolvesRowReductionsInSequenceInOneSweep) {
  GraphBuilder builder;
  ValueId y = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  const std::map<std::string, Attribute> axes = {{"axes", std::vector<int64_t>{kFeatures}}};
  y = apply_operator(builder, "layer_norm", {{y}, axes});
  y = apply_operator(builder, "softmax", {{y}, axes});
  builder.result(y, "y");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  EXPECT_THAT(kinds(plan), ElementsAre(SweepKind::rows));
  expect_meaning(graph, plan);
}

TEST(Plan, ComputesWhatARunningSumAddsUpInItsSweep) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  const ValueId sums = builder.scan(builder.pointwise(PointwiseOp::tanh_, {x}));
  builder.result(builder.pointwise(PointwiseOp::sub_, {sums, x}), "y");
  builder.result(sums, "sums");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::scan, SweepKind::map));
  EXPECT_THAT(plan.sweeps[0].stores, ElementsAre(sums));
  EXPECT_THAT(plan.sweeps[1].loads, Contains(sums));
  expect_meaning(graph, plan);
}

TEST(Plan, SumsRowsOfOneElementNowhere) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 4, 1, 1});
  builder.result(builder.pointwise(PointwiseOp::tanh_, {builder.scan(x)}), "y");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  EXPECT_THAT(kinds(plan), ElementsAre(SweepKind::map));
  expect_meaning(graph, plan);
}

TEST(Plan, SeesGroupsAndFeaturesInOneSweep) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  const ValueId scale = builder.leaf(LeafRole::parameter, "s", DType::f32, kVector);
  const ValueId groups = builder.view(x, {true, 1, 2, 3});
  const ValueId mean = builder.reduce(Finish::mean, groups, axis_bit(kFeatures));
  const ValueId centred = builder.pointwise(PointwiseOp::sub_, {groups, mean});
  const ValueId back = builder.view(centred, {true, 1, 1, kOuter});
  builder.result(builder.pointwise(PointwiseOp::mul_, {back, scale}), "y");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  ASSERT_THAT(kinds(plan), ElementsAre(SweepKind::rows));
  EXPECT_EQ(plan.sweeps[0].space, (Shape{true, 1, 2, 3}));
  EXPECT_EQ(plan.sweeps[0].shapes.at(scale), (Shape{false, 1, 2, 3}));
  expect_meaning(graph, plan);
}

TEST(Plan, WritesABufferAfterItsLastReader) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  const ValueId running = builder.leaf(LeafRole::buffer, "running", DType::f32, kVector);
  const ValueId mean = builder.reduce(Finish::mean, x, axis_bit(kBatch));
  builder.update(builder.pointwise(PointwiseOp::add_, {running, mean}), running);
  const ValueId centred = builder.pointwise(PointwiseOp::sub_, {x, mean});
  builder.result(builder.pointwise(PointwiseOp::mul_, {centred, running}), "y");
  const Graph graph = builder.take();
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  EXPECT_THAT(plan.sweeps.back().stores, ElementsAre(plan.graph.updates[0].value));
  expect_meaning(graph, plan);
}

TEST(Plan, CopiesResultsThatAreLeavesOrShared) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, kOuter});
  const ValueId y = builder.pointwise(PointwiseOp::relu_, {x});
  builder.result(x, "x again");
  builder.result(y, "y");
  builder.result(y, "y again");
  const Graph graph = builder.take();
  expect_meaning(graph, make_plan(graph, target_with(false), Precision::fp32));
}

TEST(Plan, LetsBuffersOfDisjointLifetimesOverlap) {
  Plan plan;
  const Shape shape{true, 1, 1, 100};
  plan.buffers = {{shape, DType::f32, 0, 1}, {shape, DType::f32, 2, 3}, {shape, DType::f32, 1, 2}};
  size_t total = 0;
  const auto offsets = plan.workspace_layout(64, &total);
  EXPECT_EQ(total, 2u * 64 * 100 * 4);
  EXPECT_EQ(offsets[0], offsets[1]);
  EXPECT_NE(offsets[0], offsets[2]);
  EXPECT_EQ(plan.workspace_layout(int64_t{1} << 32, &total).size(), 3u);
  EXPECT_GT(total, size_t{1} << 40);
}

TEST(Plan, LeavesOutBuffersThatNobodyUses) {
  Plan plan;
  const Shape shape{true, 1, 1, 100};
  plan.buffers = {{shape, DType::f32, 0, 1}, {shape, DType::f32, 1, 2}, {shape, DType::f32, 1, 3}};
  size_t total = 0;
  const auto offsets = plan.workspace_layout(64, &total, {false, true, false});
  EXPECT_EQ(total, 2u * 64 * 100 * 4);
  EXPECT_EQ(offsets[1], Plan::kNowhere);
  EXPECT_EQ(std::max(offsets[0], offsets[2]), total / 2);
}

TEST(Plan, KeepsBuffersApartThatMeetInOneSweep) {
  Plan plan;
  const Shape shape{true, 1, 1, 100};
  // Made one after the other, each from the one before; then the same from the last to the first.
  plan.buffers = {{shape, DType::f32, 0, 1}, {shape, DType::f32, 1, 2}, {shape, DType::f32, 2, 3}};
  for (int turn = 0; turn < 2; ++turn) {
    size_t total = 0;
    const auto offsets = plan.workspace_layout(64, &total);
    EXPECT_EQ(total, 2u * 64 * 100 * 4);
    EXPECT_NE(offsets[0], offsets[1]);
    EXPECT_NE(offsets[1], offsets[2]);
    std::reverse(plan.buffers.begin(), plan.buffers.end());
  }
}

TEST(Plan, CountsBytesAndFlops) {
  const Graph graph = Models().gemm_scale_bn(true);
  const Plan plan = make_plan(graph, target_with(false), Precision::fp32);
  const Cost cost = plan.cost(plan.sweeps[0], 1000);
  EXPECT_EQ(cost.bytes_read, 4 * (1000 * kInner + kInner * kOuter));
  EXPECT_EQ(cost.bytes_written, 4 * 1000 * kOuter);
  EXPECT_EQ(cost.flops, 2 * 1000 * kInner * kOuter);
  EXPECT_GE(cost.seconds, cost.limit_seconds);
  EXPECT_THAT(to_string(plan), HasSubstr("must wait for every row"));
}

TEST(Plan, FindsBrokenPlans) {
  const Plan good = make_plan(Models().gemm_scale_bn(true), target_with(false), Precision::fp32);
  validate(good);
  Plan plan = good;
  plan.sweeps[0].stores.clear();
  EXPECT_THROW(validate(plan), std::logic_error);
  plan = good;
  std::swap(plan.sweeps[1], plan.sweeps[2]);
  EXPECT_THROW(validate(plan), std::logic_error);
  plan = good;
  plan.sweeps[2].body.pop_back();
  EXPECT_THROW(validate(plan), std::logic_error);
  plan = good;
  std::reverse(plan.sweeps[2].body.begin(), plan.sweeps[2].body.end());
  EXPECT_THROW(validate(plan), std::logic_error);
}

TEST(Plan, KnowsItsPrecisions) {
  EXPECT_EQ(precision_from("tf32"), Precision::tf32);
  EXPECT_THROW(precision_from("fp8"), std::runtime_error);
}

TEST(Strides, SplitAxesAndRefuseToMergeThem) {
  const std::array<int64_t, kAxes> strides = {100, 40, 0, 3};
  EXPECT_THAT(strides_in({true, 2, 1, 6}, strides, {true, 2, 2, 3}), ElementsAre(100, 40, 9, 3));
  EXPECT_THAT(strides_in({false, 1, 1, 6}, {0, 0, 0, 5}, {false, 6, 1, 1}),
              ElementsAre(0, 5, 0, 0));
  EXPECT_THROW(strides_in({true, 2, 1, 6}, strides, {true, 1, 1, 12}), std::logic_error);
}

TEST(Factoring, FindsTheCoarsestCommonOne) {
  const Factoring groups(Shape{true, 1, 3, 4}), rows(Shape{true, 3, 1, 4});
  EXPECT_EQ(groups, rows);
  const auto common = Factoring::common(groups, Factoring(Shape{true, 1, 6, 2}), 12);
  ASSERT_TRUE(common);
  EXPECT_EQ(common->shape(12, true, {}), (Shape{true, 3, 2, 2}));
  EXPECT_FALSE(Factoring::common(groups, Factoring(Shape{true, 1, 2, 6}), 12));
}

TEST(Frontier, CountsASharedArgumentOnce) {
  // y = f(a) + g(a): loading a (3) beats loading both f(a) and g(a) (2 each).
  GraphBuilder builder;
  const ValueId a = builder.leaf(LeafRole::input, "a", DType::f32, {true, 1, 1, 4});
  const ValueId f = builder.pointwise(PointwiseOp::exp_, {a});
  const ValueId g = builder.pointwise(PointwiseOp::tanh_, {a});
  const ValueId y = builder.pointwise(PointwiseOp::add_, {f, g});
  std::vector<AccessCost> costs(4, {2, 0.1});
  const auto cost_of = [&](ValueId id) { return costs[static_cast<size_t>(id)]; };
  costs[static_cast<size_t>(a)] = {3, kImpossible};
  costs[static_cast<size_t>(y)].load = kImpossible;
  EXPECT_THAT(cheapest_frontier(builder.graph(), cost_of, {y}).loaded, ElementsAre(a));
  costs[static_cast<size_t>(f)].load = costs[static_cast<size_t>(g)].load = 1;
  EXPECT_THAT(cheapest_frontier(builder.graph(), cost_of, {y}).loaded, ElementsAre(f, g));
  costs[static_cast<size_t>(a)].load = kImpossible;
  costs[static_cast<size_t>(g)].load = kImpossible;
  EXPECT_FALSE(cheapest_frontier(builder.graph(), cost_of, {y}).feasible);
}

TEST(Plan, RefusesBuffersThatTogetherDoNotFitIntoSizes) {
  Plan plan;
  // 2^51 bytes each, of which 2^64 hold 8192; no two of them may overlap.
  plan.buffers.assign(8200, {Shape{.batched = true}, DType::f64, 0, 1});
  size_t bytes = 0;
  plan.workspace_layout(1000, &bytes);
  EXPECT_EQ(bytes, 8200 * 8192u);
  EXPECT_THROW(plan.workspace_layout(int64_t{1} << 48, &bytes), Error);
}

}  // namespace
}  // namespace ingot
