// How sweeps that only move memory are cut: long rows, sums of all, means of many columns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "codegen_testing.h"
#include "graph/operators.h"
#include "sweeps/waves.cuh"

namespace ingot {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

KernelSource along_rows(const char* op, int64_t features, DType dtype = DType::f32) {
  GraphBuilder builder;
  OperatorCall call;
  call.args = {builder.leaf(LeafRole::input, "x", dtype, {true, 1, 1, features})};
  const ValueId y = find_operator(op)->define(builder, call);
  return source_of(builder, y);
}

KernelSource reduced(Shape shape, AxisMask axes) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, shape);
  const ValueId y = builder.reduce(Finish::sum, x, axes);
  return source_of(builder, y);
}

// Bytes that a thread keeps of a row of `features`, in vectors of `width`.
int64_t kept(const KernelEntry& entry) {
  return entry.shared_bytes / (entry.threads * entry.width * 4);
}

TEST(CodegenMemory, ARowThatAClusterKeepsHasThreeBlocksAMultiprocessor) {
  const KernelSource whole = along_rows("softmax", 1 << 16);
  ASSERT_THAT(whole.text, HasSubstr("rows_looped<"));
  ASSERT_THAT(whole.text, HasSubstr("__launch_bounds__(512, 3)"));
  EXPECT_THAT(whole.text, Not(HasSubstr("store_streamed"))) << "what follows may find it";
  const KernelEntry& entry = whole.entries.front();
  EXPECT_EQ(entry.tiles, 4);
  EXPECT_EQ(kept(entry), (1 << 16) / (4 * 512 * 4)) << "all of it";
}

TEST(CodegenMemory, OfALongerRowAClusterKeepsWhatTwoBlocksHaveRoomFor) {
  for (const char* op : {"softmax", "layer_norm"}) {
    const KernelSource source = along_rows(op, (1 << 18) + 1);
    ASSERT_THAT(source.text, HasSubstr("odd_rows_looped<"));
    EXPECT_THAT(source.text, HasSubstr("__launch_bounds__(512, 2)"));
    EXPECT_THAT(source.text, HasSubstr("store_streamed")) << "the rest is read again";
    const KernelEntry& entry = source.entries.front();
    EXPECT_EQ(entry.tiles, 8);
    EXPECT_LT(kept(entry), (1 << 18) / (8 * 512 * 4));
    EXPECT_EQ(kept(entry) % 4, 0) << "vectors that are read together";
    EXPECT_GT(entry.shared_bytes, 80 * 1024);
    EXPECT_LE(2 * (entry.shared_bytes + 1024), 228 * 1024);
  }
}

TEST(CodegenMemory, RowsIn16BitsHaveSmallBlocksWhileTheseKeepAQuarter) {
  const KernelSource kept = along_rows("softmax", 1 << 16, DType::bf16);
  EXPECT_THAT(kept.text, HasSubstr("__launch_bounds__(256, 6)"));
  EXPECT_LE(6 * (kept.entries.front().shared_bytes + 1024), 228 * 1024);
  EXPECT_THAT(along_rows("layer_norm", 1 << 16, DType::bf16).text,
              HasSubstr("__launch_bounds__(256, 5)"));
  EXPECT_THAT(along_rows("softmax", 393217, DType::bf16).text,
              HasSubstr("__launch_bounds__(512, 2)"));
  // Nothing is held, so that fewer blocks share a row.
  EXPECT_EQ(along_rows("logsumexp", 1 << 16, DType::bf16).entries.front().tiles, 2);
}

TEST(CodegenMemory, TheVariantOfAnotherWidthIsOfTheSameTemplate) {
  const auto check = [](int64_t features, DType dtype) {
    const KernelSource source = along_rows("softmax", features, dtype);
    const bool pieces = source.entries.front().role == KernelRole::waves_begin;
    const KernelRole role = pieces ? KernelRole::waves : KernelRole::rows;
    EXPECT_EQ(source.entries.back().role, role) << features;
  };
  for (int64_t i = 0; i <= 64; ++i) {
    check((1 << 18) + (i << 11), DType::f32);
    check((3 << 18) + (i << 13), DType::bf16);
    check((7 << 20) + (i << 15), DType::f32);
  }
}

TEST(CodegenMemory, RowsThatAllMultiprocessorsKeepAreDoneByBlocksThatStay) {
  constexpr int64_t kRow = 1 << 21, kRows = 6, kPieces = kRow / (256 * 4 * 8);
  for (const char* op : {"softmax", "layer_norm"}) {
    const KernelSource source = along_rows(op, kRow);
    EXPECT_THAT(source.text, HasSubstr("rows_resident<"));
    EXPECT_THAT(source.text, HasSubstr("store_streamed"));
    EXPECT_THAT(source.text, HasSubstr("i64 b, InPiece e")) << "one address for all vectors";
    ASSERT_EQ(source.entries.size(), 3u);
    const KernelEntry &begin = source.entries[0], &rows = source.entries[1];
    EXPECT_EQ(begin.role, KernelRole::waves_begin);
    EXPECT_EQ(begin.tiles, source.entries[2].tiles) << "of single elements there are most";
    EXPECT_EQ(rows.tiles, kPieces);
    EXPECT_EQ(source.entries[2].width, 1);
    EXPECT_EQ(rows.stay % 2, 0) << "two blocks a multiprocessor";
    EXPECT_EQ(blocks_of(source, rows, 1), std::min(rows.stay, kPieces));
    EXPECT_EQ(blocks_of(source, rows, kRows), rows.stay);
    const int64_t piece = 256 * 4 * 8 * 4;
    EXPECT_GE(rows.shared_bytes / piece * rows.stay, kPieces + rows.stay);
    EXPECT_LE(2 * (rows.shared_bytes + 4 * kPieces + 1024), 228 * 1024);
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    EXPECT_THAT(along_rows("softmax", 1 << 17, dtype).text, HasSubstr("rows_resident<"));
  }
}

TEST(CodegenMemory, LongRowsOfWhichStatesAloneAreWantedAreFoldedByBlocksThatStay) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const KernelSource source = along_rows("logsumexp", 1 << 17, dtype);
    EXPECT_THAT(source.text, HasSubstr("rows_folded<"));
    ASSERT_EQ(source.entries.size(), 3u);
    EXPECT_EQ(source.entries[0].role, KernelRole::waves_begin);
    EXPECT_EQ(source.entries[1].role, KernelRole::waves);
    EXPECT_EQ(source.entries[1].stay % 3, 0) << "three blocks a multiprocessor";
    EXPECT_THAT(source.text, HasSubstr("__launch_bounds__(256, 3)"));
    EXPECT_EQ(source.entries[1].shared_bytes, 0);
  }
  EXPECT_THAT(along_rows("logsumexp", 1 << 16).text, HasSubstr("rows_looped<"));
  EXPECT_THAT(along_rows("logsumexp", (1 << 17) + 1).text, HasSubstr("rows_looped<"));
}

TEST(CodegenMemory, ExponentialsOfSumsThatAreRoundedTo16BitsAreCoarse) {
  EXPECT_THAT(along_rows("softmax", 1024, DType::bf16).text, HasSubstr("LogSumExp<float, true>"));
  EXPECT_THAT(along_rows("softmax", 1024, DType::f32).text, HasSubstr("LogSumExp<float>"));
}

TEST(CodegenMemory, LongerRowsAreDoneInWaves) {
  constexpr int64_t kRow = 1 << 23, kRows = 6, kPieces = kRow / (512 * 4 * 4);
  const KernelSource source = along_rows("softmax", kRow);
  EXPECT_THAT(source.text, HasSubstr("rows_in_waves<"));
  EXPECT_THAT(source.text, HasSubstr("store_streamed"));
  ASSERT_EQ(source.entries.size(), 3u);
  const KernelEntry& wave = source.entries[1];
  EXPECT_EQ(wave.role, KernelRole::waves);
  EXPECT_EQ(wave.tiles, kPieces);
  EXPECT_EQ(source.entries[2].width, 1);
  // Every piece is folded, and finished at least a row later.
  EXPECT_GE(blocks_of(source, wave, kRows), kRows * kPieces + kPieces);
  EXPECT_LT(blocks_of(source, wave, kRows), kRows * kPieces + 4 * kPieces);
  EXPECT_THAT(along_rows("softmax", kRow, DType::bf16).text, HasSubstr("rows_in_waves<"));
}

TEST(CodegenMemory, MemoryOfWavesHoldsFlagsAndAllStates) {
  constexpr int64_t kRows = 3, kPieces = 7, kState = 16;
  for (const int phases : {1, 2}) {
    const int64_t words = kRows * (kPieces + 1) * kState / 4 * phases;
    EXPECT_GE(wave_bytes(kRows, kPieces, phases, kState * phases),
              4 * (1 + kRows * phases) + 8 * words);
    EXPECT_EQ(wave_bytes(kRows, kPieces, phases, kState * phases) % 16, 0);
    EXPECT_EQ(wave_counter_bytes(kRows, phases) % 16, 0);
  }
}

TEST(CodegenMemory, ARowOfWhichNothingIsReadAgainKeepsNothing) {
  EXPECT_EQ(along_rows("logsumexp", 1 << 19).entries.front().shared_bytes, 0);
}

TEST(CodegenMemory, AllOfAFewSamplesIsSummedByManyBlocks) {
  const AxisMask all = axis_bit(kBatch) | axis_bit(kRows) | axis_bit(kFeatures);
  const KernelSource source = reduced({true, 64, 1, 1 << 16}, all);
  ASSERT_THAT(source.text, HasSubstr("columns_inner_sweep<"));
  EXPECT_EQ(source.columns, 1);
  EXPECT_EQ((64 << 16) / 4 % source.leading, 0) << "equal pieces of whole vectors";
  EXPECT_GE(blocks_of(source, source.entries.front(), 8), 1000);
  EXPECT_THAT(source.text, HasSubstr("merge_sweep<ingot::FusedSumStatistics, 1, 512>"));
  // All of these are there at once, and the compiler knows it.
  EXPECT_THAT(source.text, HasSubstr("__launch_bounds__(128, 8) fused_sum_statistics("));
  EXPECT_THAT(source.text, HasSubstr("vector_at<f32, V>"));
  // Of a size that nothing divides, the samples alone are shared out.
  const KernelSource prime = reduced({true, 1, 1, 1000003}, axis_bit(kBatch) | axis_bit(kFeatures));
  EXPECT_EQ(prime.leading, 1);
  EXPECT_EQ(blocks_of(prime, prime.entries.front(), 8), 8);
}

TEST(CodegenMemory, OfManyColumnsNoSamplesAreSplitAndNothingIsMerged) {
  const KernelSource source = reduced({true, 256, 1, 1024}, axis_bit(kBatch));
  for (const KernelEntry& entry : source.entries) {
    EXPECT_EQ(entry.role, KernelRole::columns_whole);
    EXPECT_EQ(blocks_of(source, entry, 1 << 20), entry.tiles);
  }
  EXPECT_THAT(source.text, Not(HasSubstr("merge_sweep")));
  const KernelSource fewer = reduced({true, 64, 1, 1024}, axis_bit(kBatch));
  EXPECT_EQ(fewer.entries.front().role, KernelRole::columns);
  EXPECT_EQ(fewer.entries.back().role, KernelRole::merge);
}

}  // namespace
}  // namespace ingot
