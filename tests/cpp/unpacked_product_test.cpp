// Products that read their operands as they lie in memory: what is planned, and that every tile
// compiles for what the host takes it to need.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/compiler.h"
#include "cuda/nvrtc.h"
#include "product/hopper/candidates.h"

namespace ingot::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What a call with few tiles and a long K launches: the slices, then what adds them.
TEST(UnpackedProduct, AddsSlicesThatMeetInMemory) {
  hopper::ProductShape shape;
  shape.m = shape.n = 64, shape.k = 65536;
  shape.x = shape.w = {1, 64, true};
  shape.y_stride = 64;
  std::vector<hopper::TileChoice> menu;
  hopper::add_streamed_tiles(menu, shape, {132});
  const auto found = std::find_if(menu.begin(), menu.end(), [](const hopper::TileChoice& c) {
    return c.features == 64 && c.samples == 64 && c.depth_warps == 4 && c.slices > 1;
  });
  ASSERT_NE(found, menu.end());
  const hopper::ProductPlan plan = hopper::plan_with(shape, *found, {132});
  EXPECT_EQ(plan.slices, 132);
  EXPECT_EQ(plan.sliced.kernel, "streamed_slices");
  EXPECT_EQ(plan.sliced.grid, 132u);
  EXPECT_EQ(plan.kernel, "product_merged");
  EXPECT_EQ(plan.grid, 16u);  // 16 × 16 of the tile each
  EXPECT_EQ(plan.sums_bytes, size_t(132) * 64 * 64 * 4);
  EXPECT_GE(plan.workspace_bytes, plan.sums_bytes);
  const hopper::ProductArgs args = hopper::args_of(plan, shape);
  EXPECT_EQ(args.slices, 132);
  EXPECT_EQ(args.chunks, 2048);
  // Along its rows an operand is read in whole eights of K, and rows in whole pieces of 16 bytes.
  for (const auto& [k, stride] : {std::pair<int64_t, int64_t>{65540, 64}, {65536, 66}}) {
    hopper::ProductShape odd = shape;
    odd.k = k, odd.x.k_stride = stride;
    EXPECT_FALSE(hopper::streams(odd));
  }
  // A warp that has all of K to itself makes no long chain of sums.
  for (const hopper::TileChoice& c : menu) {
    if (c.depth_warps > 1) continue;
    EXPECT_LE(hopper::divide_up(2048, c.slices), 64) << hopper::name_of(c);
  }
}

// The gradient of a last layer's input, 4096×10000→512, would pack 164 MB for 7 % of its time; a
// seed model's product is a third faster packed. Of any program's products time alone counts.
TEST(UnpackedProduct, IsPreferredInModulesWherePackingTakesMuchMemory) {
  hopper::ProductShape shape;
  shape.m = 4096, shape.n = 512, shape.k = 10000;
  shape.x = {10000, 1, true}, shape.w = {1, 512, true};
  shape.y_stride = 512;
  const auto variant_of = [](hopper::ProductShape asked, hopper::Unpacked unpacked) {
    asked.unpacked = unpacked;
    return hopper::plan_product(asked, {132}).variant;
  };
  EXPECT_EQ(variant_of(shape, hopper::Unpacked::none), hopper::Variant::fused_split);
  EXPECT_EQ(variant_of(shape, hopper::Unpacked::whole), hopper::Variant::split_both);
  hopper::ProductShape few = shape;
  few.m = 512;  // 20 MB
  few.k = 10240, few.x.row_stride = 10240;
  EXPECT_EQ(variant_of(few, hopper::Unpacked::whole), variant_of(few, hopper::Unpacked::none));
  hopper::ProductShape seed;
  seed.m = 1024, seed.n = seed.k = 8192;
  seed.x = seed.w = {8192, 1, true};
  seed.y_stride = 8192;
  EXPECT_EQ(variant_of(seed, hopper::Unpacked::whole), hopper::Variant::fused_split);
}

// A small result of a long K: both operands as they lie in memory, no more slices than the GPU
// holds blocks, and no workspace but their sums.
TEST(UnpackedProduct, SplitsBothOperandsOnTheWay) {
  hopper::ProductShape shape;
  shape.m = shape.n = 256, shape.k = 131072;
  shape.x = shape.w = {1, 256, true};
  shape.y_stride = 256;
  EXPECT_NE(hopper::plan_product(shape, {}).variant, hopper::Variant::split_both);
  shape.unpacked = hopper::Unpacked::any;
  const hopper::ProductPlan plan = hopper::plan_product(shape, {132});
  ASSERT_EQ(plan.variant, hopper::Variant::split_both) << plan.config;
  EXPECT_EQ(plan.config, "SplitBothConfig<false, false>");
  EXPECT_EQ(plan.slices, 33);
  EXPECT_EQ(plan.sliced.kernel, "split_both_slices");
  EXPECT_EQ(plan.sliced.grid, 132u);
  EXPECT_EQ(plan.kernel, "product_merged");
  EXPECT_EQ(plan.grid, 4u * 8 * 8);  // 16 × 16 of a tile each
  EXPECT_TRUE(plan.splits.empty());
  EXPECT_EQ(plan.workspace_bytes, size_t(33) * 256 * 256 * 4);
  EXPECT_EQ(plan.chunks, 2048);
  EXPECT_EQ(plan.moment_tiles, 16);
  shape.x.aligned = false;
  EXPECT_NE(hopper::plan_product(shape, {132}).variant, hopper::Variant::split_both);
}

// What takes the most registers: a value of each feature, and statistics.
constexpr const char* kBiasAndMoments = R"(
struct Epilogue {
  struct Params { const float* bias; };
  struct Feature { float bias; };
  struct Sample {};
  static constexpr int kMoments = 1;
  static constexpr u32 kSums = 0;
  static constexpr bool kStore = true, kReadsElements = false;
  INGOT_D static Feature feature(const Params& p, i64 n) { return {p.bias[n]}; }
  INGOT_D static Sample sample(const Params&, i64) { return {}; }
  INGOT_D static float apply(const Params&, const Feature& feature, const Sample&, i64, i64,
                             float product, float (&statistics)[1]) {
    return statistics[0] = product + feature.bias;
  }
};
)";

// That `call`, of a template of the configuration C, compiles for Hopper without a word.
void expect_quiet(const std::string& header, const std::string& call, const std::string& config,
                  const std::string& checks, int threads, int resident) {
  const std::string text = fmt::format(
      "#include \"product/hopper/{}\"\nusing namespace ingot;\n"
      "using namespace ingot::hopper;\nusing C = {};\nstatic_assert({});\n"
      "{}"
      "extern \"C\" __global__ void __launch_bounds__({}, {}) product(\n"
      "    const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,\n"
      "    const __grid_constant__ ProductArgs args) {{ {}; }}\n",
      header, config, checks, kBiasAndMoments, threads, resident, call);
  std::vector<std::string> options = compile_options(nvrtc_architecture(90));
  options.emplace_back("--ptxas-options=-v");
  const Compilation result = nvrtc_compile("product", text, headers_of(text), options);
  EXPECT_THAT(result.log, Not(HasSubstr("error"))) << config;
  EXPECT_THAT(result.log, Not(HasSubstr("warning"))) << config;
  EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << config;
  EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame"))) << config;
}

// Every tile, in every order of the operands, as one kernel and in slices; what the host takes a
// tile to need is what the kernel says.
TEST(UnpackedProduct, StreamsWithoutSpills) {
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  for (hopper::TileChoice tile : hopper::kStreamedTiles) {
    for (const auto& [w_along_k, x_along_k] :
         {std::pair{true, true}, {false, true}, {false, false}}) {
      tile.w_along_k = w_along_k;
      tile.x_along_k = x_along_k;
      const std::string config = hopper::config_text(tile, false);
      const int threads = 128 + 32 * hopper::streamed_warps(tile);
      const int resident = hopper::streamed_resident(tile);
      const std::string checks = fmt::format(
          "C::kSharedBytes == {} && C::kThreads == {} && C::kResident == {} && "
          "C::kFeatures == {} && C::kSamples == {} && 8 * C::kPartGroups == {}",
          hopper::streamed_bytes(tile), threads, resident, tile.features, tile.samples,
          hopper::unpacked_part_samples(tile));
      expect_quiet("streamed.cuh", "streamed_slices<C>(w, x, args)", config, checks, threads,
                   resident);
    }
  }
}

TEST(UnpackedProduct, SplitsBothOperandsWithoutSpills) {
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  hopper::TileChoice tile = hopper::kSplitBothTile;
  const std::string checks = fmt::format(
      "C::kSharedBytes == {} && C::kThreads == {} && C::kChunk == {} && "
      "C::kFeatures == {} && C::kSamples == {} && C::kFeatureWarps == {}",
      hopper::split_both_bytes(tile), hopper::kSplitBothThreads, hopper::kSplitBothChunk,
      tile.features, tile.samples, tile.feature_warps);
  for (const bool w_along_k : {true, false}) {
    for (const bool x_along_k : {true, false}) {
      tile.w_along_k = w_along_k;
      tile.x_along_k = x_along_k;
      for (const char* call : {"product_split_both<C, Epilogue>(w, x, x, args, {})",
                               "split_both_slices<C>(w, x, args)"}) {
        expect_quiet("split_both.cuh", call, hopper::config_text(tile, false), checks,
                     hopper::kSplitBothThreads, 1);
      }
    }
  }
}

}  // namespace
}  // namespace ingot::cuda
