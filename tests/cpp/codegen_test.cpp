// What the generator writes: its structure here, and that NVRTC compiles it where there is one.
#include "codegen/kernel_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "codegen/product_epilogue.h"
#include "cuda/compiler.h"
#include "cuda/nvrtc.h"
#include "graph/operators.h"
#include "support/error.h"

namespace ingot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Target cuda(bool fused) {
  Target target;
  target.device = Target::Device::cuda;
  target.fused_epilogue = target.fused_statistics = fused;
  target.product_flops = 2e14;
  target.bandwidth = 4e12;
  target.launch_seconds = 2e-6;
  target.units = 132;
  return target;
}

// x·Wᵀ + b, batch norm in training mode, optionally a softmax behind it.
Graph seed(int64_t features, bool softmax) {
  GraphBuilder builder;
  const auto leaf = [&](LeafRole role, const char* name, Shape shape, DType dtype = DType::f32) {
    return builder.leaf(role, name, dtype, shape);
  };
  const Shape vector{false, 1, 1, features};
  const ValueId x = leaf(LeafRole::input, "x", {true, 1, 1, 64});
  const ValueId w = leaf(LeafRole::parameter, "gemm.weight", {false, features, 1, 64});
  const ValueId b = leaf(LeafRole::parameter, "gemm.bias", vector);
  ValueId y = builder.pointwise(PointwiseOp::add_, {builder.matmul(x, w, true), b});
  OperatorCall norm;
  norm.args = {y,
               leaf(LeafRole::parameter, "bn.weight", vector),
               leaf(LeafRole::parameter, "bn.bias", vector),
               leaf(LeafRole::buffer, "bn.running_mean", vector),
               leaf(LeafRole::buffer, "bn.running_var", vector),
               leaf(LeafRole::buffer, "bn.count", {}, DType::i64)};
  norm.attributes = {{"training", true}, {"momentum", 0.1}};
  y = find_operator("batch_norm")->define(builder, norm);
  if (softmax) {
    OperatorCall call;
    call.args = {y};
    y = find_operator("softmax")->define(builder, call);
  }
  builder.result(y, "y");
  return builder.take();
}

const KernelEntry* entry_of(const std::vector<KernelSource>& sources, KernelRole role) {
  for (const KernelSource& source : sources) {
    for (const KernelEntry& entry : source.entries) {
      if (entry.role == role) return &entry;
    }
  }
  return nullptr;
}

TEST(Codegen, AColumnsSweepHasStatisticsMergeAndATail) {
  const Plan plan = make_plan(seed(256, false), cuda(false), Precision::ieee);
  const std::vector<KernelSource> sources = generate(plan);
  ASSERT_EQ(sources.size(), 2u);
  const KernelSource& statistics = sources[0];
  EXPECT_THAT(statistics.name, HasSubstr("fused_"));
  EXPECT_THAT(statistics.text, HasSubstr("using Statistics = Together<Moments<float>>;"));
  EXPECT_THAT(statistics.text, HasSubstr("static constexpr i64 kColumns = 256"));
  EXPECT_THAT(statistics.text, HasSubstr("columns_sweep<"));
  EXPECT_THAT(statistics.text, HasSubstr("merge_sweep<"));
  EXPECT_THAT(statistics.text, HasSubstr("variance_unbiased(state.first)"));
  EXPECT_THAT(statistics.text, Not(HasSubstr("atomic")));
  ASSERT_NE(entry_of(sources, KernelRole::merge), nullptr);
  // The aligned variant first; one of width 1 for everything else.
  EXPECT_EQ(statistics.entries[0].width, 4);
  EXPECT_EQ(statistics.entries[1].width, 1);
  // What does not depend on the sample is hoisted out of the loop over samples.
  EXPECT_THAT(sources[1].text, HasSubstr("shared.v"));
}

// Over the batch, of a·b: as a norm's gradient asks for them.
Graph reductions_of_products(const std::vector<Finish>& finishes) {
  GraphBuilder builder;
  const ValueId a = builder.leaf(LeafRole::input, "a", DType::f32, {true, 1, 1, 512});
  const ValueId b = builder.leaf(LeafRole::input, "b", DType::f32, {true, 1, 1, 512});
  const ValueId product = builder.pointwise(PointwiseOp::mul_, {a, b});
  for (const Finish finish : finishes) {
    builder.result(builder.reduce(finish, product, axis_bit(kBatch)), std::string(name_of(finish)));
  }
  return builder.take();
}

std::string columns_text(const std::vector<Finish>& finishes) {
  const Graph graph = reductions_of_products(finishes);
  return generate(make_plan(graph, cuda(false), Precision::ieee)).at(0).text;
}

TEST(Codegen, AMeanIsReadOffTheStateOfASum) {
  const std::string both = columns_text({Finish::mean, Finish::sum});
  EXPECT_THAT(both, HasSubstr("using Statistics = Together<Average<float>>;"));
  EXPECT_THAT(both, HasSubstr("Average<float>::value(state.first)"));
  EXPECT_THAT(both, HasSubstr("Average<float>::mean(state.first)"));
  EXPECT_THAT(both, HasSubstr("1 monoid state(s)"));
  EXPECT_THAT(columns_text({Finish::mean}), HasSubstr("Together<Moments<float>>;"));
  EXPECT_THAT(columns_text({Finish::sum, Finish::mean, Finish::variance}),
              HasSubstr("Together<Sum<float>, Moments<float>>;"))
      << "the variance's moments have the mean already";
}

TEST(Codegen, AColumnsSweepBeginsWhereTheOneBeforeEnded) {
  // (x − mean)² summed, where the mean takes a sweep of its own.
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 512});
  const ValueId mean = builder.reduce(Finish::mean, x, axis_bit(kBatch));
  const ValueId centred = builder.pointwise(PointwiseOp::sub_, {x, mean});
  const ValueId square = builder.pointwise(PointwiseOp::mul_, {centred, centred});
  builder.result(builder.reduce(Finish::sum, square, axis_bit(kBatch)), "sum");
  const std::vector<KernelSource> sources =
      generate(make_plan(builder.take(), cuda(false), Precision::ieee));
  ASSERT_EQ(sources.size(), 2u);
  EXPECT_THAT(sources[0].text, HasSubstr("kBackwards = false"));
  EXPECT_THAT(sources[1].text, HasSubstr("kBackwards = true"));
}

TEST(Codegen, FewerSamplesAreFoldedAtOnceWhereSeveralTensorsAreLoaded) {
  EXPECT_THAT(columns_text({Finish::sum}), HasSubstr("32, 8, 4>(operands"));
}

// A value that a sweep stores and a product reads.
Graph read_by_product(int64_t features, bool softmax) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 3, 1, features});
  OperatorCall call;
  call.args = {x};
  const ValueId y = softmax ? find_operator("softmax")->define(builder, call)
                            : builder.pointwise(PointwiseOp::tanh_, {x});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, 64, 1, features});
  builder.result(y, "y");
  builder.result(builder.matmul(y, w, true), "z");
  return builder.take();
}

std::optional<KernelSource> packing_source(int64_t features, bool softmax,
                                           hopper::Scheme scheme = hopper::Scheme::split) {
  const Plan plan = make_plan(read_by_product(features, softmax), cuda(true), Precision::fp32);
  return generate_packing(plan, 0, product_operand(plan.graph, plan.sweeps.at(1), 0), scheme);
}

TEST(Codegen, ASweepPacksTheRowsThatAProductReads) {
  for (const bool softmax : {false, true}) {
    for (const int64_t features : {96, 128, 1024, 2816, 4096, 11008, 16384}) {
      const std::optional<KernelSource> source = packing_source(features, softmax);
      ASSERT_TRUE(source) << features;
      const KernelEntry& entry = source->entries.at(0);
      EXPECT_EQ(entry.role, KernelRole::rows_packed);
      const int64_t team = entry.threads / entry.per_block;
      EXPECT_TRUE(team == 32 || entry.per_block == 1) << "a team is a warp or a block";
      EXPECT_EQ(blocks_of(*source, entry, 5), (15 + entry.per_block - 1) / entry.per_block);
      EXPECT_THAT(source->text, HasSubstr("place(const Operands& operands, i64 b, i64 e)"));
      EXPECT_THAT(source->text, HasSubstr("packed[i] = "));
    }
    EXPECT_FALSE(packing_source(64, softmax)) << "half of a warp";
    EXPECT_FALSE(packing_source(100, softmax)) << "no whole lines";
    EXPECT_FALSE(packing_source(96, softmax, hopper::Scheme::scaled)) << "no whole lines";
    const std::optional<KernelSource> scaled = packing_source(192, softmax, hopper::Scheme::scaled);
    ASSERT_TRUE(scaled);
    EXPECT_THAT(scaled->text, HasSubstr("ingot::ScaledVectors>"));
    EXPECT_FALSE(packing_source(1 << 16, softmax)) << "no block holds it";
  }
}

TEST(Codegen, ASoftmaxHoldsItsRowInRegistersOrLoops) {
  const Plan held = make_plan(seed(1024, true), cuda(false), Precision::ieee);
  const std::vector<KernelSource> sources = generate(held);
  EXPECT_THAT(sources.back().text, HasSubstr("Together<LogSumExp<float>> monoid(Index<0>)"));
  EXPECT_THAT(sources.back().text, HasSubstr("rows_in_registers<"));
  EXPECT_THAT(sources.back().text, HasSubstr("using Place = InRow;"));
  const Plan looped = make_plan(seed(100000, true), cuda(false), Precision::ieee);
  EXPECT_THAT(generate(looped).back().text, HasSubstr("rows_looped<"));
  EXPECT_THAT(generate(looped).back().text, HasSubstr("using Place = i64;"));
}

TEST(Codegen, OddSizesHaveNoVectors) {
  const Plan plan = make_plan(seed(333, true), cuda(false), Precision::ieee);
  for (const KernelSource& source : generate(plan)) {
    for (const KernelEntry& entry : source.entries) EXPECT_EQ(entry.width, 1) << entry.name;
  }
}

TEST(Codegen, AProductTakesBodyAndStatisticsIntoItsEpilogue) {
  const Plan plan = make_plan(seed(256, false), cuda(true), Precision::fp32);
  std::string why;
  const std::optional<ProductEpilogue> epilogue = write_epilogue(plan, 0, &why);
  ASSERT_TRUE(epilogue) << why;
  EXPECT_EQ(epilogue->moments, 1);
  EXPECT_NE(epilogue->stored, kNoValue);
  EXPECT_THAT(epilogue->functor_text, HasSubstr("product + feature.v"));
  ASSERT_TRUE(epilogue->merge);
  EXPECT_THAT(epilogue->merge->text, HasSubstr("merge_sweep<"));
  EXPECT_THAT(epilogue->merge->text, Not(HasSubstr("columns_sweep<")));
}

TEST(Codegen, AProductOfOneFeatureHasABiasAndMoreBehindIt) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 64});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, 1, 1, 64});
  const ValueId bias = builder.leaf(LeafRole::parameter, "bias", DType::f32, {});
  const ValueId row = builder.leaf(LeafRole::input, "row", DType::f32, {true, 1, 1, 1});
  const ValueId y = builder.pointwise(PointwiseOp::add_, {builder.matmul(x, w, true), bias});
  builder.result(builder.pointwise(PointwiseOp::mul_, {y, row}), "y");
  const Plan plan = make_plan(builder.take(), cuda(true), Precision::fp32);
  std::string why;
  const std::optional<ProductEpilogue> epilogue = write_epilogue(plan, 0, &why);
  ASSERT_TRUE(epilogue) << why;
  EXPECT_THAT(epilogue->functor_text, HasSubstr("product + feature.v"));
  EXPECT_THAT(epilogue->functor_text, HasSubstr("* sample.v"));
  const ValueId product = plan.sweeps[0].matmul;
  for (const KernelOperand& operand : epilogue->operands) EXPECT_NE(operand.value, product);
}

// One operator behind a product, and the text of its epilogue.
std::string epilogue_of(const std::function<ValueId(GraphBuilder&, ValueId)>& define) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 7, 1, 64});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, 256, 1, 64});
  builder.result(define(builder, builder.matmul(x, w, true)), "y");
  const Plan plan = make_plan(builder.take(), cuda(true), Precision::fp32);
  std::string why;
  const std::optional<ProductEpilogue> epilogue = write_epilogue(plan, 0, &why);
  EXPECT_TRUE(epilogue) << why;
  return epilogue ? epilogue->functor_text : "";
}

std::string activation(const char* name) {
  return epilogue_of([name](GraphBuilder& builder, ValueId y) {
    OperatorCall call;
    call.args = {y};
    return find_operator(name)->define(builder, call);
  });
}

TEST(Codegen, DivisionsTakeTheShortestWayThatTheirOperandsAllow) {
  EXPECT_THAT(activation("mish"), HasSubstr("math::divide_moderate("));
  EXPECT_THAT(activation("silu"), HasSubstr("math::divide_by_normal("));
  const auto divided_by = [](double number) {
    return epilogue_of([number](GraphBuilder& builder, ValueId y) {
      return builder.pointwise(PointwiseOp::div_, {y, builder.constant(number)});
    });
  };
  EXPECT_THAT(divided_by(4), HasSubstr(" * 0.25f"));
  EXPECT_THAT(divided_by(0), HasSubstr("math::divide("));
  EXPECT_THAT(divided_by(1e-30), HasSubstr("math::divide("));
  const std::string by_operand = epilogue_of([](GraphBuilder& builder, ValueId y) {
    const ValueId z = builder.leaf(LeafRole::input, "z", DType::f32, {true, 7, 1, 256});
    return builder.pointwise(PointwiseOp::div_, {y, z});
  });
  EXPECT_THAT(by_operand, HasSubstr("math::divide("));
}

TEST(Codegen, OnePlusErfIsOneFunctionUnlessErfIsReadElsewhere) {
  EXPECT_THAT(activation("gelu"), HasSubstr("math::one_plus_erf("));
  EXPECT_THAT(activation("gelu"), Not(HasSubstr("pointwise::erf")));
  const std::string twice = epilogue_of([](GraphBuilder& builder, ValueId y) {
    const ValueId erf = builder.pointwise(PointwiseOp::erf_, {y});
    const ValueId sum = builder.pointwise(PointwiseOp::add_, {builder.constant(1), erf});
    return builder.pointwise(PointwiseOp::mul_, {erf, sum});
  });
  EXPECT_THAT(twice, HasSubstr("pointwise::erf("));
  EXPECT_THAT(twice, Not(HasSubstr("one_plus_erf")));
  const std::string two = epilogue_of([](GraphBuilder& builder, ValueId y) {
    const ValueId erf = builder.pointwise(PointwiseOp::erf_, {y});
    return builder.pointwise(PointwiseOp::add_, {builder.constant(2), erf});
  });
  EXPECT_THAT(two, HasSubstr("pointwise::erf("));
  const std::string tanh = epilogue_of([](GraphBuilder& builder, ValueId y) {
    const ValueId value = builder.pointwise(PointwiseOp::tanh_, {y});
    return builder.pointwise(PointwiseOp::add_, {value, builder.constant(1)});
  });
  EXPECT_THAT(tanh, HasSubstr("math::one_plus_tanh("));
}

// e^(-x²/2), with Φ(x) beside it or not.
std::string normal_density(bool beside_erf) {
  return epilogue_of([beside_erf](GraphBuilder& builder, ValueId x) {
    const auto times = [&](ValueId a, ValueId b) {
      return builder.pointwise(PointwiseOp::mul_, {a, b});
    };
    const ValueId density =
        builder.pointwise(PointwiseOp::exp_, {times(times(x, x), builder.constant(-0.5))});
    if (!beside_erf) return density;
    const ValueId u = times(x, builder.constant(0.70710678118654752440));
    const ValueId erf = builder.pointwise(PointwiseOp::erf_, {u});
    return builder.pointwise(PointwiseOp::add_, {times(x, density), erf});
  });
}

TEST(Codegen, TheDerivativeOfGeluSharesAPowerOfE) {
  EXPECT_THAT(normal_density(true), HasSubstr("math::exp_of_minus_square(product * 0.7071"));
  EXPECT_THAT(normal_density(false), HasSubstr("pointwise::exp("));
}

TEST(Codegen, WhatIsRoundedTo16BitsTakesCoarserFunctions) {
  // A function in f32, between casts as PyTorch computes 16-bit operators; its value may be read in
  // f32 as well.
  const auto behind = [](PointwiseOp op, DType half, bool is_kept) {
    GraphBuilder builder;
    const ValueId x = builder.leaf(LeafRole::input, "x", half, {true, 1, 1, 256});
    const ValueId value = builder.pointwise(op, {builder.cast(x, DType::f32)});
    builder.result(builder.cast(value, half), "y");
    if (is_kept) builder.result(value, "kept");
    return generate(make_plan(builder.take(), cuda(false), Precision::fp32))[0].text;
  };
  EXPECT_THAT(behind(PointwiseOp::exp_, DType::bf16, false), HasSubstr("math::coarse::exp("));
  EXPECT_THAT(behind(PointwiseOp::exp_, DType::f16, false), HasSubstr("math::coarse::exp("));
  EXPECT_THAT(behind(PointwiseOp::sigmoid_, DType::f16, false), HasSubstr("coarse::sigmoid("));
  EXPECT_THAT(behind(PointwiseOp::tanh_, DType::bf16, false), HasSubstr("math::coarse::tanh("));
  // Its error would not vanish beside that of f16.
  EXPECT_THAT(behind(PointwiseOp::tanh_, DType::f16, false), HasSubstr("pointwise::tanh("));
  EXPECT_THAT(behind(PointwiseOp::exp_, DType::bf16, true), HasSubstr("pointwise::exp("));
  EXPECT_THAT(behind(PointwiseOp::tanh_, DType::bf16, true), HasSubstr("pointwise::tanh("));
}

// Else a multiply-subtract may keep what the largest product was rounded by.
TEST(Codegen, WhatIsSubtractedFromItsLargestIsRoundedBefore) {
  const auto behind = [](Finish finish) {
    GraphBuilder builder;
    const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 256});
    const ValueId s = builder.leaf(LeafRole::parameter, "s", DType::f32, {false, 1, 1, 256});
    const ValueId z = builder.pointwise(PointwiseOp::mul_, {x, s});
    const ValueId least = builder.reduce(finish, z, axis_bit(kFeatures));
    builder.result(builder.pointwise(PointwiseOp::sub_, {z, least}), "y");
    return generate(make_plan(builder.take(), cuda(false), Precision::fp32))[0].text;
  };
  for (const Finish finish : {Finish::max, Finish::min, Finish::log_sum_exp}) {
    EXPECT_THAT(behind(finish), HasSubstr("math::difference(")) << name_of(finish);
  }
  EXPECT_THAT(behind(Finish::mean), Not(HasSubstr("math::difference(")));
}

TEST(Codegen, AnEpilogueFindsItsOperandsWithoutDividingTheElement) {
  const std::string text = epilogue_of([](GraphBuilder& builder, ValueId y) {
    const ValueId z = builder.leaf(LeafRole::input, "z", DType::f32, {true, 7, 1, 256});
    return builder.pointwise(PointwiseOp::add_, {y, z});
  });
  EXPECT_THAT(text, HasSubstr("kReadsElements = true"));
  EXPECT_THAT(text, HasSubstr("ptx::prefetch_line(operands.v3_z.at<f32>(b, row, 0, n))"));
  EXPECT_THAT(text, HasSubstr("widen(*operands.v3_z.at<f32>(b, row, 0, n))"));
  EXPECT_THAT(activation("silu"), HasSubstr("kReadsElements = false"));
}

TEST(Codegen, SplitsOfSamplesCoverThemOnce) {
  const Plan plan = make_plan(seed(256, false), cuda(false), Precision::ieee);
  const std::vector<KernelSource> sources = generate(plan);
  const KernelSource& source = sources[0];
  for (const int64_t batch : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65},
                              int64_t{1000}, int64_t{100000}, int64_t{1} << 33}) {
    const SampleSplits cut = splits_of(source, source.entries[0], batch);
    EXPECT_GE(cut.splits, 1);
    EXPECT_GE(cut.splits * cut.per_split, batch);
    EXPECT_LT((cut.splits - 1) * cut.per_split, std::max<int64_t>(batch, 1));
  }
}

TEST(Codegen, HeadersOfASourceAreFoundThroughIncludes) {
  const Plan plan = make_plan(seed(256, true), cuda(false), Precision::ieee);
  const KernelSource source = generate(plan).back();
  std::vector<std::string> paths;
  for (const auto& [path, text] : cuda::headers_of(source.text)) paths.push_back(path);
  EXPECT_THAT(paths, ::testing::Contains("common/monoid.cuh"));
  EXPECT_THAT(paths, ::testing::Contains("sweeps/rows.cuh"));
  EXPECT_THAT(paths, Not(::testing::Contains("sweeps/map.cuh")));
}

// [N, C, space], normalised over all of `groups` and behind that a softmax over `axes`.
Graph behind_convolution(int64_t channels, int64_t space, int64_t groups, AxisMask axes) {
  GraphBuilder builder;
  ValueId y = builder.leaf(LeafRole::input, "y", DType::f32, {true, channels, 1, space});
  if (groups > 0) {
    OperatorCall norm;
    norm.args = {y};
    norm.attributes = {{"groups", groups}, {"channels", "rows"}, {"eps", 1e-5}};
    y = find_operator("group_norm")->define(builder, norm);
  }
  if (axes != 0) {
    const ValueId top = builder.reduce(Finish::max, y, axes);
    const ValueId shifted = builder.pointwise(PointwiseOp::sub_, {y, top});
    y = builder.pointwise(PointwiseOp::exp_, {shifted});
  }
  builder.result(y, "y");
  return builder.take();
}

KernelSource last_source(Graph graph) {
  return generate(make_plan(std::move(graph), cuda(false), Precision::ieee)).back();
}

TEST(Codegen, RowsWhoseElementsLieApartGoToNeighbouringThreads) {
  const KernelSource held = last_source(behind_convolution(24, 1000, 0, axis_bit(kRows)));
  EXPECT_THAT(held.text, HasSubstr("kRow = 24, kRowsPerSample = 1000"));
  EXPECT_THAT(held.text, HasSubstr("kInner = 1000"));
  EXPECT_THAT(held.text, HasSubstr("rows_across<ingot::"));
  // A thread holds 12 of them; 128 rows side by side.
  EXPECT_THAT(held.text, HasSubstr(", 2, 128>"));
  EXPECT_EQ(blocks_of(held, held.entries[0], 3), (3 * 1000 + 127) / 128);
  const KernelSource looped = last_source(behind_convolution(2000, 100, 0, axis_bit(kRows)));
  EXPECT_THAT(looped.text, HasSubstr("rows_across_looped<ingot::"));
  // Too few side by side to fill a sector: one block a sample.
  const KernelSource few = last_source(behind_convolution(24, 4, 0, axis_bit(kRows)));
  EXPECT_THAT(few.text, HasSubstr("groups_sweep<"));
}

TEST(Codegen, SeveralBlocksShareALongRow) {
  const KernelSource one = last_source(behind_convolution(8, 3000, 1, 0));
  EXPECT_THAT(one.text, Not(HasSubstr("INGOT_CLUSTER(")));
  const KernelSource four = last_source(behind_convolution(8, 20000, 2, 0));
  EXPECT_THAT(four.text, HasSubstr("INGOT_CLUSTER(4)"));
  EXPECT_EQ(four.entries[0].tiles, 4);
  EXPECT_EQ(blocks_of(four, four.entries[0], 3), 3 * 2 * 4);
  const KernelSource eight = last_source(behind_convolution(8, 500000, 2, 0));
  EXPECT_THAT(eight.text, HasSubstr("INGOT_CLUSTER(8)"));
}

// Behind a group norm, tanh twice and a maximum over channels: what the norm's sweep stores.
int64_t stored_by_norm(int64_t space) {
  GraphBuilder builder;
  OperatorCall norm;
  norm.args = {builder.leaf(LeafRole::input, "y", DType::f32, {true, 32, 1, space})};
  norm.attributes = {{"groups", 4}, {"channels", "rows"}, {"eps", 1e-5}};
  ValueId y = find_operator("group_norm")->define(builder, norm);
  for (int i = 0; i < 2; ++i) y = builder.pointwise(PointwiseOp::tanh_, {y});
  builder.result(builder.reduce(Finish::max, y, axis_bit(kRows)), "y");
  const Plan plan = make_plan(builder.take(), cuda(false), Precision::ieee);
  int64_t largest = 0;
  for (const ValueId value : plan.sweeps.at(0).stores) {
    largest = std::max(largest, plan.graph[value].shape.static_elements());
  }
  return largest;
}

TEST(Codegen, ALongRowIsReadAgainToStoreItsElements) {
  // A group of 8·3000 is held in registers, and its elements are stored; of one of 8·5000, which
  // would be read again for that, the statistics are.
  EXPECT_EQ(stored_by_norm(3000), 32 * 3000);
  EXPECT_EQ(stored_by_norm(5000), 4);
}

TEST(Codegen, OneBlockDoesNotOwnALargeSample) {
  // Reductions over groups and over channels of a large sample are two sweeps.
  const Plan large =
      make_plan(behind_convolution(32, 5000, 4, axis_bit(kRows)), cuda(false), Precision::ieee);
  ASSERT_EQ(large.sweeps.size(), 2u);
  for (const KernelSource& source : generate(large)) {
    EXPECT_THAT(source.text, Not(HasSubstr("groups_sweep<")));
  }
  const Plan small =
      make_plan(behind_convolution(32, 50, 4, axis_bit(kRows)), cuda(false), Precision::ieee);
  EXPECT_EQ(small.sweeps.size(), 1u);
  // Rows of four, of which one block would read all.
  const Graph graph = behind_convolution(100000, 4, 0, axis_bit(kRows));
  EXPECT_THROW(generate(make_plan(graph, cuda(false), Precision::ieee)), Error);
}

// Compiles without warnings, and nothing lies in local memory.
void expect_compiled_without_spills(const KernelSource& source) {
  for (const int sm : {80, 90}) {
    std::vector<std::string> options = cuda::compile_options(cuda::nvrtc_architecture(sm));
    options.emplace_back("--ptxas-options=-v");
    const cuda::Compilation result =
        cuda::nvrtc_compile(source.name, source.text, cuda::headers_of(source.text), options);
    EXPECT_THAT(result.log, Not(HasSubstr("warning"))) << result.log;
    EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores"));
    EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame")))
        << source.name;
  }
}

TEST(Codegen, NvrtcCompilesEverySweepWithoutSpills) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  for (const int64_t features : {int64_t{256}, int64_t{333}}) {
    const Plan plan = make_plan(seed(features, true), cuda(false), Precision::ieee);
    for (const KernelSource& source : generate(plan)) expect_compiled_without_spills(source);
  }
}

TEST(Codegen, NvrtcCompilesSweepsThatPackOrSumSeveralTensorsWithoutSpills) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  for (const bool softmax : {false, true}) {
    for (const int64_t features : {128, 1024, 4096, 16384}) {
      expect_compiled_without_spills(packing_source(features, softmax).value());
    }
  }
  const Graph graph = reductions_of_products({Finish::sum, Finish::mean});
  for (const KernelSource& source : generate(make_plan(graph, cuda(false), Precision::ieee))) {
    expect_compiled_without_spills(source);
  }
}

// Statistics of x times a weight over the batch and the planes of [N, C, space].
Graph statistics_of_channels(DType dtype, bool with_sum) {
  GraphBuilder builder;
  const AxisMask axes = axis_bit(kBatch) | axis_bit(kFeatures);
  const ValueId x = builder.leaf(LeafRole::input, "x", dtype, {true, 24, 1, 1000});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", dtype, {false, 24, 1, 1});
  const ValueId y = builder.pointwise(PointwiseOp::mul_, {x, w});
  builder.result(builder.reduce(Finish::mean, y, axes), "mean");
  if (with_sum) builder.result(builder.reduce(Finish::sum, y, axes), "sum");
  return builder.take();
}

TEST(Codegen, AMeanBesideASumCountsItsValues) {
  const auto text_of = [](DType dtype, bool with_sum) {
    return last_source(statistics_of_channels(dtype, with_sum)).text;
  };
  const std::string both = text_of(DType::f32, true);
  EXPECT_THAT(both, HasSubstr("using Statistics = Together<Average<float>>;"));
  EXPECT_THAT(both, HasSubstr("Average<float>::mean(state.first)"));
  EXPECT_THAT(both, HasSubstr("Average<float>::value(state.first)"));
  EXPECT_THAT(text_of(DType::f32, false), HasSubstr("Together<Moments<float>>"));
}

TEST(Codegen, AColumnsThreadReadsSeveralVectorsAtOnceAndWhatIsOfTheColumnOnce) {
  const std::string text = last_source(statistics_of_channels(DType::f32, true)).text;
  EXPECT_THAT(text, HasSubstr("columns_inner_sweep<"));
  EXPECT_THAT(text, HasSubstr(", 4, 256, 4>"));
  EXPECT_THAT(text, HasSubstr("kFeatureOfColumn = true"));
}

TEST(Codegen, NvrtcCompilesSweepsBehindConvolutionsWithoutSpills) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  const AxisMask channels = axis_bit(kRows);
  for (const Graph& graph :
       {behind_convolution(24, 1000, 0, channels), behind_convolution(31, 1001, 0, channels),
        behind_convolution(2000, 100, 0, channels), behind_convolution(8, 20000, 2, 0),
        behind_convolution(8, 20001, 2, 0)}) {
    const Plan plan = make_plan(graph, cuda(false), Precision::ieee);
    for (const KernelSource& source : generate(plan)) expect_compiled_without_spills(source);
  }
}

TEST(Nvrtc, SaysWhatIsWrongWithASource) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  try {
    cuda::nvrtc_compile("broken", "this is no kernel", {}, {"--gpu-architecture=sm_90a"});
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), INGOT_FAILED);
    EXPECT_THAT(error.what(), HasSubstr("broken"));
    EXPECT_THAT(error.what(), HasSubstr("this is no kernel"));
  }
}

}  // namespace
}  // namespace ingot
