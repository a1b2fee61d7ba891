// Sweeps of which operands lie turned: when there is a kernel for it, how it deals rows to blocks,
// and that NVRTC compiles it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "codegen/turned.h"
#include "codegen_testing.h"
#include "cuda/compiler.h"
#include "cuda/nvrtc.h"
#include "graph/operators.h"

namespace ingot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Plan planned(Graph graph) {
  return make_plan(std::move(graph), hopper_target(), Precision::ieee);
}

// x + t, and behind it what `behind` names, over the features.
Plan sum_then(const char* behind, Shape shape, DType dtype = DType::f32) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", dtype, shape);
  const ValueId t = builder.leaf(LeafRole::input, "t", dtype, shape);
  const ValueId sum = builder.pointwise(PointwiseOp::add_, {x, t});
  builder.result(sum, "sum");
  if (*behind == '\0') return planned(builder.take());
  OperatorCall call;
  call.args = {sum};
  if (std::string_view(behind) == "layer_norm") {
    const Shape row{false, 1, 1, shape.features};
    call.args.push_back(builder.leaf(LeafRole::parameter, "weight", dtype, row));
    call.args.push_back(builder.leaf(LeafRole::parameter, "bias", dtype, row));
    call.attributes = {{"axes", std::vector<int64_t>{kFeatures}}};
  }
  builder.result(find_operator(behind)->define(builder, call), "y");
  return planned(builder.take());
}

// What backward makes of a layer norm of t, and of what was added to it: reductions of two products
// in one phase, or with the statistics computed again in two.
Plan norm_gradient(int64_t features, DType dtype, bool again) {
  GraphBuilder builder;
  const Shape shape{true, 28, 7, features}, row{true, 28, 7, 1};
  const auto leaf = [&](const char* name, Shape of, DType type) {
    const ValueId value = builder.leaf(LeafRole::input, name, type, of);
    return type == DType::f32 ? value : builder.cast(value, DType::f32);
  };
  const auto op = [&](PointwiseOp what, ValueId a, ValueId b) {
    return builder.pointwise(what, {a, b});
  };
  const auto reduced = [&](Finish finish, ValueId of) {
    return builder.reduce(finish, of, axis_bit(kFeatures));
  };
  const ValueId t = leaf("t", shape, dtype), g = leaf("g", shape, dtype);
  const ValueId h = leaf("h", shape, dtype);
  const ValueId weight = leaf("weight", {false, 1, 1, features}, DType::f32);
  const ValueId mean = again ? reduced(Finish::mean, t) : leaf("mean", row, DType::f32);
  const ValueId rstd = again
                           ? builder.pointwise(PointwiseOp::rsqrt_, {reduced(Finish::variance, t)})
                           : leaf("rstd", row, DType::f32);
  const ValueId normed = op(PointwiseOp::mul_, op(PointwiseOp::sub_, t, mean), rstd);
  const ValueId given = op(PointwiseOp::mul_, g, weight);
  const ValueId along = op(PointwiseOp::mul_, given, normed);
  ValueId d = op(PointwiseOp::sub_, given, reduced(Finish::mean, given));
  d = op(PointwiseOp::sub_, d, op(PointwiseOp::mul_, normed, reduced(Finish::mean, along)));
  d = op(PointwiseOp::add_, h, op(PointwiseOp::mul_, d, rstd));
  builder.result(dtype == DType::f32 ? d : builder.cast(d, dtype), "d");
  return planned(builder.take());
}

enum class Lies { dense, turned, all_turned, shifted };

// Of every operand of a sweep; `lies` is how those named "t" do, or all.
std::vector<OperandLayout> layouts(const Plan& plan, const KernelSource& source, Lies lies,
                                   int64_t batch) {
  std::vector<OperandLayout> result;
  for (const KernelOperand& operand : source.operands) {
    OperandLayout layout{dense_strides(operand.seen), 0};
    if (plan.graph[operand.value].name == "t" || lies == Lies::all_turned) {
      const Shape& seen = operand.seen;
      const int64_t rows = seen.rows * seen.groups;
      if (lies == Lies::turned || lies == Lies::all_turned) {
        layout.strides = {rows * seen.features, seen.groups, 1, rows};
        if (rows == 1) layout.strides = {1, 0, 0, batch};
      }
      if (lies == Lies::shifted) layout.low_bits = 4;
    }
    result.push_back(layout);
  }
  return result;
}

std::optional<KernelSource> turned_source(const Plan& plan, Lies lies = Lies::turned,
                                          int64_t batch = 64) {
  const KernelSource plain = generate(plan).back();
  const auto turned = turned_operands(plan, plain, layouts(plan, plain, lies, batch), batch);
  return turned ? generate_turned(plan, plain, *turned) : std::nullopt;
}

TEST(CodegenTurned, RowsThatLieSideBySideAreReadTogether) {
  const Plan plan = sum_then("layer_norm", {true, 196, 1, 768});
  const KernelSource source = turned_source(plan).value();
  EXPECT_THAT(source.text, HasSubstr("load_apart(operands.v1_t.at<f32>(b, e.row, 0, e.column), "
                                     "operands.v1_t.strides[3], v1_t);"));
  EXPECT_THAT(source.text, HasSubstr("ingot::load(operands.v0_x.at"));
  EXPECT_THAT(source.text, HasSubstr("ingot::store(operands.v2_add_out.at"));
  EXPECT_THAT(source.text, HasSubstr("Turned, 4, 4, 8, 1>(operands, rows)"));
  const KernelEntry& entry = source.entries.at(0);
  EXPECT_THAT(entry.name, ::testing::EndsWith("_turned"));
  EXPECT_EQ(entry.threads, 256);
  EXPECT_EQ(blocks_of(source, entry, 64), 64 * 196 / 4);
  const KernelSource odd = turned_source(sum_then("layer_norm", {true, 49, 1, 768})).value();
  EXPECT_EQ(blocks_of(odd, odd.entries.at(0), 3), (3 * 49 + 3) / 4) << "rows left over";
  // Of two bytes: rows of vectors of eight.
  const KernelSource half =
      turned_source(sum_then("layer_norm", {true, 196, 1, 768}, DType::bf16)).value();
  EXPECT_THAT(half.text, HasSubstr("Turned, 8, 4, 8, 1>"));
}

TEST(CodegenTurned, WhereMostOfTheBytesLieTurnedAWarpMovesWholeSectors) {
  const Plan plan = sum_then("layer_norm", {true, 196, 1, 768});
  const KernelSource source = turned_source(plan, Lies::all_turned).value();
  EXPECT_THAT(source.text, HasSubstr("Turned, 4, 8, 16, 1>(operands, rows)"));
  EXPECT_EQ(blocks_of(source, source.entries.at(0), 64), 64 * 196 / 8);
  // Longer rows than so few lanes can hold.
  const KernelSource longer =
      turned_source(sum_then("layer_norm", {true, 196, 1, 2048}), Lies::all_turned).value();
  EXPECT_THAT(longer.text, HasSubstr("Turned, 4, 4, 16, 1>"));
}

TEST(CodegenTurned, SmallTeamsShareABlockAndMapsAreCutAlongRowsToo) {
  const KernelSource images = turned_source(sum_then("layer_norm", {true, 28, 28, 192})).value();
  EXPECT_THAT(images.text, HasSubstr("Turned, 4, 4, 2, 4>"));
  EXPECT_EQ(blocks_of(images, images.entries.at(0), 64), 64 * 784 / 16);
  const KernelSource map = turned_source(sum_then("", {true, 196, 1, 768})).value();
  EXPECT_THAT(map.text, HasSubstr("map_turned<ingot::FusedAddTurned, 4, 8, 8, 1, 4>"));
  EXPECT_THAT(map.text, HasSubstr("load_apart(operands.v1_t"));
  EXPECT_EQ(blocks_of(map, map.entries.at(0), 64), 2 * 64 * 196 / 8) << "512 columns a block";
}

TEST(CodegenTurned, AMatrixThatIsTransposedHasItsRowsAlongTheBatch) {
  EXPECT_TRUE(turned_source(sum_then("softmax", {true, 1, 1, 512})));
  EXPECT_FALSE(turned_source(sum_then("softmax", {true, 1, 1, 512}), Lies::turned, 7))
      << "too few of them";
}

TEST(CodegenTurned, NothingIsWrittenWhereVectorsOrSectorsAreWholeAnyway) {
  const Plan plan = sum_then("layer_norm", {true, 196, 1, 768});
  EXPECT_FALSE(turned_source(plan, Lies::dense));
  EXPECT_FALSE(turned_source(plan, Lies::shifted)) << "unaligned, but row by row";
  EXPECT_FALSE(turned_source(sum_then("layer_norm", {true, 6, 1, 768}))) << "six rows";
  EXPECT_FALSE(turned_source(sum_then("softmax", {true, 16, 1, 40000}))) << "rows that loop";
}

TEST(CodegenTurned, WhatIsUnalignedBesideIsMovedElementByElement) {
  const Plan plan = sum_then("layer_norm", {true, 196, 1, 768});
  const KernelSource plain = generate(plan).back();
  std::vector<OperandLayout> layout = layouts(plan, plain, Lies::turned, 64);
  for (size_t i = 0; i < layout.size(); ++i) {
    if (plain.operands[i].written) layout[i].low_bits = 8;
  }
  const auto turned = turned_operands(plan, plain, layout, 64);
  ASSERT_TRUE(turned);
  const KernelSource source = generate_turned(plan, plain, *turned).value();
  EXPECT_THAT(source.text, HasSubstr("ingot::store_apart(operands.v2_add_out.at<f32>"));
  EXPECT_THAT(source.text, Not(HasSubstr("ingot::store(")));
}

void expect_turned_without_spills(const KernelSource& source) {
  for (const int sm : {80, 90}) {
    std::vector<std::string> options = cuda::compile_options(cuda::nvrtc_architecture(sm));
    options.emplace_back("--ptxas-options=-v");
    const std::string log =
        cuda::nvrtc_compile(source.name, source.text, cuda::headers_of(source.text), options).log;
    EXPECT_THAT(log, Not(HasSubstr("warning"))) << log;
    EXPECT_THAT(log, HasSubstr(" 0 bytes spill stores")) << source.text;
    EXPECT_THAT(log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame"))) << source.name;
  }
}

TEST(CodegenTurned, NvrtcCompilesWithoutSpills) {
  if (!cuda::nvrtc_info().available) GTEST_SKIP() << cuda::nvrtc_info().why;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t features : {32, 333, 768, 6144}) {
      for (const char* behind : {"layer_norm", "softmax", ""}) {
        const auto source = turned_source(sum_then(behind, {true, 28, 7, features}, dtype));
        ASSERT_TRUE(source) << behind << features;
        expect_turned_without_spills(*source);
      }
      for (const bool again : {false, true}) {
        const int64_t most = std::min<int64_t>(features, 1024);  // three values are held of each
        const auto source = turned_source(norm_gradient(most, dtype, again));
        ASSERT_TRUE(source) << "gradient " << features;
        expect_turned_without_spills(*source);
      }
    }
  }
}

}  // namespace
}  // namespace ingot
