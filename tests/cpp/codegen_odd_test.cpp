// Rows that no vector divides: where their whole vectors lie, and which tensors a kernel may move
// so.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "codegen/turned.h"
#include "codegen_testing.h"
#include "graph/importer.h"
#include "graph/operators.h"
#include "support/error.h"
#include "sweeps/odd_rows.cuh"

namespace ingot {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kWords = 50257;

ValueId input(GraphBuilder& builder, int64_t features, DType dtype = DType::f32) {
  return builder.leaf(LeafRole::input, "x", dtype, {true, 1, 1, features});
}

KernelSource softmax(int64_t features, DType dtype = DType::f32) {
  GraphBuilder builder;
  OperatorCall call;
  call.args = {input(builder, features, dtype)};
  const ValueId y = find_operator("softmax")->define(builder, call);
  return source_of(builder, y);
}

// How often each element of a row is moved, by whole vectors or singly.
template <i64 Length, int V>
void expect_each_element_once(i64 index) {
  const OddRow<Length, V> row(index);
  std::vector<int> moved(Length);
  for (int e = row.head; e < row.end; e += V) {
    EXPECT_EQ((index * Length + e) % V, 0) << "aligned where the tensor is";
    for (int i = 0; i < V; ++i) ++moved.at(static_cast<size_t>(e + i));
  }
  for (int n = 0; n < row.kSingles; ++n) {
    if (row.single(n) >= 0) ++moved.at(static_cast<size_t>(row.single(n)));
  }
  EXPECT_THAT(moved, ::testing::Each(1)) << Length << " by " << V << ", row " << index;
}

TEST(OddRow, MovesEachElementOnce) {
  for (i64 index : {i64{0}, i64{1}, i64{2}, i64{3}, i64{5}, i64{6}, i64{7}, i64{1} << 33}) {
    expect_each_element_once<8, 4>(index);
    expect_each_element_once<17, 8>(index);
    expect_each_element_once<1001, 4>(index);
    expect_each_element_once<1001, 8>(index);
    expect_each_element_once<1004, 8>(index);
    expect_each_element_once<1022, 8>(index);
  }
}

TEST(CodegenOdd, ALongRowIsMovedInWholeVectors) {
  const KernelSource source = softmax(kWords);
  ASSERT_EQ(source.entries.size(), 2u);
  const KernelEntry &odd = source.entries[0], &singly = source.entries[1];
  EXPECT_TRUE(odd.odd);
  EXPECT_EQ(odd.width, 4);
  EXPECT_THAT(source.text, ContainsRegex("odd_rows_looped<ingot::[A-Za-z]+, 4, "));
  EXPECT_FALSE(singly.odd);
  EXPECT_EQ(singly.width, 1);
  EXPECT_NE(odd.name, singly.name);
}

TEST(CodegenOdd, OtherRowsAreMovedAsBefore) {
  EXPECT_THAT(softmax(kWords + 47).text, Not(HasSubstr("odd_rows"))) << "four divides it";
  EXPECT_THAT(softmax(1001).text, Not(HasSubstr("odd_rows"))) << "registers hold it";
  EXPECT_THAT(softmax((1 << 23) + 1).text, ContainsRegex("rows_in_waves<ingot::[A-Za-z]+, 1, "));
}

TEST(CodegenOdd, NoRowThatIsHeldIsMovedByVectorsThatDoNotDivideIt) {
  for (int64_t columns = 32765; columns <= 32785; ++columns) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const KernelSource source = softmax(columns, dtype);
      const bool loops = source.text.find("odd_rows_looped<") != std::string::npos;
      for (const KernelEntry& entry : source.entries) {
        EXPECT_TRUE(entry.odd ? loops : columns % entry.width == 0) << columns;
      }
    }
  }
}

TEST(CodegenOdd, SixteenBitsMoveEightThoughFourDivideThem) {
  const KernelSource source = softmax(kWords + 3, DType::bf16);
  EXPECT_EQ(source.entries.front().width, 8);
  EXPECT_TRUE(source.entries.front().odd);
  EXPECT_THAT(source.text, ContainsRegex("odd_rows_looped<ingot::[A-Za-z]+, 8, "));
}

TEST(CodegenOdd, WhatRowsShareIsReadOneByOne) {
  GraphBuilder builder;
  OperatorCall call;
  const Shape row = {false, 1, 1, kWords};
  call.args = {input(builder, kWords), builder.leaf(LeafRole::parameter, "weight", DType::f32, row),
               kNoValue};
  call.attributes["eps"] = 1e-5;
  const ValueId y = find_operator("layer_norm")->define(builder, call);
  const KernelSource source = source_of(builder, y);
  EXPECT_THAT(source.text, HasSubstr("load_apart(operands.v1_weight"));
  EXPECT_TRUE(source.entries.front().odd);
}

TEST(CodegenOdd, AMapMovesWholeVectorsWhereNothingIsOfTheElementAlone) {
  GraphBuilder builder;
  const ValueId x = input(builder, kWords);
  const ValueId y = builder.pointwise(PointwiseOp::exp_, {x});
  EXPECT_THAT(source_of(builder, y).text, HasSubstr("odd_map<ingot::FusedExp, 4, "));

  GraphBuilder other;
  const ValueId bias = other.leaf(LeafRole::parameter, "b", DType::f32, {false, 1, 1, kWords});
  const ValueId sum = other.pointwise(PointwiseOp::add_, {input(other, kWords), bias});
  EXPECT_THAT(source_of(other, sum).text, Not(HasSubstr("odd_map")));
}

// relu(x + bias) over planes of so many numbers, with a bias for each of 64.
KernelSource planes(int64_t plane, DType dtype = DType::f32, bool batched_bias = false) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", dtype, {true, 64, 1, plane});
  const ValueId bias = builder.leaf(batched_bias ? LeafRole::input : LeafRole::parameter, "b",
                                    dtype, {batched_bias, 64, 1, 1});
  const ValueId sum = builder.pointwise(PointwiseOp::add_, {x, bias});
  return source_of(builder, builder.pointwise(PointwiseOp::relu_, {sum}));
}

TEST(CodegenOdd, VectorsOfAMapGoOnIntoTheNextPlane) {
  const KernelSource source = planes(3025);
  ASSERT_EQ(source.entries.size(), 2u);
  EXPECT_TRUE(source.entries[0].across_rows);
  EXPECT_EQ(source.entries[0].width, 4);
  EXPECT_THAT(source.text, HasSubstr("at<f32>(0, (e + i) / 3025, 0, 0)"));
  EXPECT_FALSE(source.entries[1].across_rows);
  EXPECT_EQ(source.entries[1].width, 1);
  EXPECT_FALSE(source.operands.back().vector && source.operands[1].vector)
      << "one value a plane is gathered";
}

TEST(CodegenOdd, PlanesThatAreWholeVectorsAreMovedAsBefore) {
  EXPECT_FALSE(planes(3136).entries.front().across_rows);
  EXPECT_THAT(planes(3136).text, Not(HasSubstr("(e + i)")));
}

TEST(CodegenOdd, NarrowerVectorsInAPlaneAreOneOfThreeKernels) {
  const KernelSource source = planes(3026, DType::bf16, true);
  ASSERT_EQ(source.entries.size(), 3u);
  EXPECT_EQ(source.entries[0].width, 8);
  EXPECT_TRUE(source.entries[0].across_rows);
  EXPECT_EQ(source.entries[1].width, 2);
  EXPECT_FALSE(source.entries[1].across_rows);
  EXPECT_EQ(source.entries[2].width, 1);
  EXPECT_THAT(source.text, HasSubstr("at<bf16>(b, (e + i) / 3026, 0, 0)"));
}

TEST(CodegenOdd, PlanesMustLieOneBehindAnother) {
  const KernelSource source = planes(3025);
  const KernelEntry& across = source.entries.front();
  const auto x = std::find_if(source.operands.begin(), source.operands.end(),
                              [](const KernelOperand& operand) { return operand.vector; });
  ASSERT_NE(x, source.operands.end());
  constexpr int64_t kSample = int64_t{64} * 3025;
  const auto moves = [&](int64_t sample, int64_t plane, uintptr_t low_bits, int64_t batch = 8) {
    return moves_vectors(*x, across, {{sample, plane, 0, 1}, low_bits}, batch);
  };
  EXPECT_TRUE(moves(kSample, 3025, 0));
  EXPECT_TRUE(moves(2 * kSample, 3025, 0)) << "samples may lie apart";
  EXPECT_FALSE(moves(kSample + 1, 3025, 0)) << "but by whole vectors";
  EXPECT_FALSE(moves(2 * kSample, 3028, 0)) << "a vector's end would be between planes";
  EXPECT_FALSE(moves(kSample, 3025, 4)) << "a view that begins elsewhere";
  EXPECT_TRUE(moves(1, 3025, 0, 1)) << "of one sample no stride is used";
}

TEST(CodegenOdd, WhatPlanesShareKeepsVectorsWithinThem) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 64, 1, 3025});
  const ValueId mask = builder.leaf(LeafRole::input, "m", DType::f32, {true, 1, 1, 3025});
  const ValueId y = builder.pointwise(PointwiseOp::mul_, {x, mask});
  EXPECT_FALSE(source_of(builder, y).entries.front().across_rows);
}

TEST(CodegenOdd, TensorsMustLieRowBehindRow) {
  const KernelSource source = softmax(kWords);
  const KernelEntry& odd = source.entries.front();
  const KernelOperand& x = source.operands.front();
  const auto moves = [&](int64_t stride, uintptr_t low_bits, int64_t batch = 8) {
    return moves_vectors(x, odd, {{stride, 0, 0, 1}, low_bits}, batch);
  };
  EXPECT_TRUE(moves(kWords, 0));
  EXPECT_TRUE(moves(kWords + 4, 0)) << "as far from a multiple of a vector";
  EXPECT_FALSE(moves(kWords + 1, 0));
  EXPECT_FALSE(moves(kWords + 47, 0)) << "rows that begin with a vector each";
  EXPECT_FALSE(moves(kWords, 4)) << "a view that begins elsewhere";
  EXPECT_TRUE(moves(0, 0, 1)) << "of one row no stride is used";
}

TEST(CodegenOdd, PositionsAreCountedAndNotRead) {
  GraphBuilder builder;
  const ValueId numbers = builder.leaf(LeafRole::buffer, "n", DType::f32, {false, 1, 1, kWords});
  builder.hold_positions(numbers);
  const ValueId x = input(builder, kWords);
  const ValueId y = builder.pointwise(PointwiseOp::mul_, {x, numbers});
  const KernelSource source = source_of(builder, y);
  for (const KernelOperand& operand : source.operands) EXPECT_NE(operand.value, numbers);
  EXPECT_THAT(source.text, HasSubstr("static_cast<float>(static_cast<u32>(e))"));
  EXPECT_THAT(source.text, HasSubstr("odd_map<"));
}

TEST(CodegenOdd, PositionsInGroupsAreRead) {
  GraphBuilder builder;
  const ValueId numbers = builder.leaf(LeafRole::buffer, "n", DType::f32, {false, 1, 1, 480});
  builder.hold_positions(numbers);
  const ValueId grouped = builder.view(numbers, {false, 1, 6, 80});
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 6, 80});
  const ValueId y = builder.pointwise(PointwiseOp::mul_, {x, grouped});
  const KernelSource source = source_of(builder, y);
  const auto is_numbers = [&](const KernelOperand& operand) { return operand.value == numbers; };
  EXPECT_TRUE(std::any_of(source.operands.begin(), source.operands.end(), is_numbers));
  EXPECT_THAT(source.text, Not(HasSubstr("static_cast<float>(static_cast<u32>(e")));
}

TEST(CodegenOdd, PositionsAreToldByTheGraphsText) {
  const auto graph = [](const char* shape, const char* positions) {
    return fmt::format(R"({{"ingot_graph": 1, "name": "g", "values": [
      {{"op": "buffer", "name": "n", "dtype": "f32", "shape": {},
        "attributes": {{"positions": {}}}}},
      {{"op": "exp", "args": [0]}}],
      "results": [{{"value": 1, "name": "y"}}], "updates": []}})",
                       shape, positions);
  };
  const Graph read = import_graph(graph("[1, 1, 1, 9]", "true"));
  EXPECT_TRUE(read[0].positions);
  EXPECT_TRUE(graph_from(export_graph(read))[0].positions);
  EXPECT_FALSE(import_graph(graph("[1, 1, 1, 9]", "false"))[0].positions);
  EXPECT_THROW(import_graph(graph("[\"B\", 1, 1, 9]", "true")), Error);
  EXPECT_THROW(import_graph(graph("[1, 1, 1, 16777217]", "true")), Error);
  EXPECT_THROW(import_graph(graph("[1, 1, 1, 9]", "1")), Error);
}

}  // namespace
}  // namespace ingot
