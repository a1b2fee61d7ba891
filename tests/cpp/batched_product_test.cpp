// Products whose weight differs from entry to entry of a batch: where the kernels' tiles find what
// they multiply and where they store it, walked through on the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "api/program.h"
#include "cuda/driver.h"
#include "product/hopper/args.cuh"
#include "product/hopper/candidates.h"
#include "product/split.cuh"

namespace ingot::hopper {
namespace {

using ::testing::HasSubstr;

template <int kTileSamples, int kTileFeatures = 128>
struct Tiles {
  static constexpr bool kBatched = true;
  static constexpr int kSamples = kTileSamples, kFeatures = kTileFeatures;
};

// Element (entry, row, k) of an operand is its own number.
struct Operand {
  OperandShape shape;
  int64_t rows = 0;
  std::vector<float> data;

  Operand(int64_t batches, int64_t rows_, int64_t k, OperandShape shape_)
      : shape(shape_), rows(rows_) {
    const int64_t last = (batches - 1) * shape.batch_stride + (rows - 1) * shape.row_stride +
                         (k - 1) * shape.k_stride;
    for (int64_t i = 0; i <= last; ++i) data.push_back(static_cast<float>(i));
  }
  const float* row(int64_t entry, int64_t at) const {
    return data.data() + entry * shape.batch_stride + at * shape.row_stride;
  }
};

SplitArgs split_args(const SplitStep& step, const Operand& operand) {
  SplitArgs args{};
  args.source = operand.data.data();
  args.row_stride = step.row_stride;
  args.k_stride = step.k_stride;
  args.rows = static_cast<i32>(step.rows);
  args.entry_rows = static_cast<i32>(step.entry_rows);
  args.entry_skip = step.entry_skip;
  return args;
}

// Every element of the result is stored once, and is the product of the rows that it should be: of
// packed operands, of their exponents, and of what a redo reads.
template <int kSamples, int kFeatures = 128>
void check_tiles(const ProductShape& shape, const TileChoice& choice) {
  using Config = Tiles<kSamples, kFeatures>;
  // It reads the operands, and has no scales.
  const bool unpacked = is_unpacked(choice.variant);
  const ProductPlan plan = plan_with(shape, choice, DeviceLimits());
  const Operand x(shape.batches, shape.m, shape.k, shape.x),
      w(shape.batches, shape.n, shape.k, shape.w);
  const auto source = [&](SplitStep::Operand which, i32 row) -> const float* {
    for (const SplitStep& step : plan.splits) {
      if (step.operand != which) continue;
      EXPECT_LT(row, step.rows);
      return source_row(split_args(step, which == SplitStep::Operand::x ? x : w), row);
    }
    return w.data.data() + row * shape.w.row_stride;  // a tensor map over the weights themselves
  };
  std::vector<i32> exponents(static_cast<size_t>(std::max(shape.x_rows(), shape.w_rows())));
  ProductArgs args{};
  args.x = {x.data.data(), shape.x.row_stride, shape.x.k_stride};
  args.w = {w.data.data(), shape.w.row_stride, shape.w.k_stride};
  args.x_exponent = args.w_exponent = exponents.data();
  args.m = static_cast<i32>(shape.m);
  args.n = static_cast<i32>(shape.n);
  args.entry_tiles = static_cast<i32>(plan.entry_tiles);
  args.x_entry_rows = shape.shares_samples() ? 0 : args.m;
  args.x_entry_stride = shape.x.batch_stride;
  args.w_entry_stride = shape.w.batch_stride;
  args.raster = {plan.raster_feature_tiles * choice.cluster, static_cast<i32>(plan.sample_tiles),
                 plan.raster_group};
  std::vector<int> stored(static_cast<size_t>(shape.batches * shape.m * shape.n));
  for (i32 t = 0; t < args.raster.count(); ++t) {
    i32 feature_tile = 0, sample_tile = 0;
    args.raster.locate(t, feature_tile, sample_tile);
    const ProductArgs own = args_of_tile<Config>(args, sample_tile);
    const i32 first = first_sample<Config>(args, sample_tile);
    for (i32 i = 0; i < kSamples; ++i) {
      const i32 m = first + i;
      if (plan.tma_store) {
        ASSERT_LT(m, own.m) << "a box reaches into the next entry";
      }
      if (m >= own.m) continue;
      const int64_t entry = m / shape.m, inside = m % shape.m;
      const i32 x_row = sample_row<Config>(args, sample_tile) + i;
      if (!unpacked) {
        ASSERT_EQ(source(SplitStep::Operand::x, x_row), x.row(entry, inside));
        ASSERT_EQ(own.x_exponent + m, exponents.data() + x_row);
      }
      ASSERT_EQ(own.x.data + m * own.x.row_stride, x.row(entry, inside));
      for (i32 j = 0; j < Config::kFeatures; ++j) {
        const i32 n = feature_tile * Config::kFeatures + j;
        if (n >= own.n) continue;
        const i32 w_row = weight_row<Config>(args, sample_tile, n);
        if (!unpacked) {
          ASSERT_EQ(source(SplitStep::Operand::w, w_row), w.row(entry, n));
          ASSERT_EQ(own.w_exponent + n, exponents.data() + w_row);
        }
        ASSERT_EQ(own.w.data + n * own.w.row_stride, w.row(entry, n));
        ++stored[static_cast<size_t>(m * shape.n + n)];
      }
    }
  }
  EXPECT_THAT(stored, ::testing::Each(1));
}

ProductShape batch_of(int64_t batches, int64_t m, int64_t n, int64_t k) {
  ProductShape shape;
  shape.batches = batches, shape.m = m, shape.n = n, shape.k = k;
  shape.x = {k, 1, true, m * k};
  shape.w = {k, 1, true, n * k};
  shape.y_stride = n;
  return shape;
}

// Besides, a map for the copy engine: an entry is a dimension of its own, so that no box reaches
// into the next one.
void check_unpacked_tiles(const ProductShape& shape, const TileChoice& choice) {
  const ProductPlan plan = plan_with(shape, choice, DeviceLimits());
  for (const auto& [map, operand] : {std::pair{&plan.w_map, &shape.w}, {&plan.x_map, &shape.x}}) {
    const bool shared = operand->batch_stride == 0;
    EXPECT_EQ(map->entries, shared ? 1 : uint64_t(shape.batches));
    EXPECT_EQ(map->entry_bytes, shared ? 16 : uint64_t(operand->batch_stride) * 4);
  }
  EXPECT_EQ(plan.x_map.eights, shape.x.k_stride != 1 && choice.variant == Variant::streamed);
  const TensorMapExtents extents = extents_of(plan.w_map);
  EXPECT_EQ(extents.rank, plan.w_map.eights ? 5 : 3);
  EXPECT_EQ(extents.extents[extents.rank - 1], plan.w_map.entries);
  EXPECT_EQ(extents.box[extents.rank - 1], 1u);
  switch (choice.samples * 1000 + choice.features) {
    case 16032:
      return check_tiles<16, 32>(shape, choice);
    case 8064:
      return check_tiles<8, 64>(shape, choice);
    case 128016:
      return check_tiles<128, 16>(shape, choice);
    case 32032:
      return check_tiles<32, 32>(shape, choice);
    case 32064:
      return check_tiles<32, 64>(shape, choice);
    case 64064:
      return check_tiles<64, 64>(shape, choice);
    case 128128:
      return check_tiles<128, 128>(shape, choice);
    case 128064:
      return check_tiles<128, 64>(shape, choice);
    case 256032:
      return check_tiles<256, 32>(shape, choice);
    default:
      FAIL() << "no tile like this";
  }
}

void check_all_tiles(const ProductShape& shape) {
  for (const TileChoice& choice : candidate_choices(shape, DeviceLimits())) {
    SCOPED_TRACE(name_of(choice));
    EXPECT_THAT(name_of(choice), HasSubstr(", true> raster"));
    if (is_unpacked(choice.variant)) {
      check_unpacked_tiles(shape, choice);
      continue;
    }
    if (choice.samples == 64) check_tiles<64>(shape, choice);
    if (choice.samples == 128) check_tiles<128>(shape, choice);
    if (choice.samples == 160) check_tiles<160>(shape, choice);
    if (choice.samples == 192) check_tiles<192>(shape, choice);
  }
}

TEST(BatchedProduct, TilesFindTheirOwnEntry) {
  check_all_tiles(batch_of(3, 128, 128, 32));
  check_all_tiles(batch_of(5, 100, 200, 36));
  check_all_tiles(batch_of(2, 197, 65, 12));
}

TEST(BatchedProduct, OperandsLieInAnyOrder) {
  ProductShape shape = batch_of(3, 70, 90, 20);
  shape.w = {1, 90, true, 90 * 20};  // [k, n]
  check_all_tiles(shape);
  shape.x = {1, 70, true, 70 * 20};
  check_all_tiles(shape);
  shape.x = {3 * 20, 1, true, 20};  // [m, batch, k]
  shape.w = {3 * 20, 1, true, 20};
  check_all_tiles(shape);
  shape.x = {20, 1, true, 0};  // one for all entries
  check_all_tiles(shape);
  shape.x = {24, 1, true, 70 * 24 + 8};
  shape.w = {20, 1, true, 0};
  check_all_tiles(shape);
}

TEST(BatchedProduct, WeightsThatFollowOneAnotherAreNotPacked) {
  ProductShape shape = batch_of(128, 512, 512, 512);
  EXPECT_EQ(plan_product(shape, {}).variant, Variant::fused_split);
  shape.w.batch_stride += 512;
  EXPECT_EQ(plan_product(shape, {}).variant, Variant::packed);
}

TEST(BatchedProduct, ThinMatricesAreTheLibrarys) {
  EXPECT_TRUE(plan_product(batch_of(4096, 1, 512, 512), {}).library_faster);
  ProductShape tf32 = batch_of(64, 512, 512, 512);
  tf32.scheme = Scheme::scaled;
  EXPECT_EQ(plan_product(tf32, {}).variant, Variant::unsupported);
}

TEST(BatchedProduct, PackedWeightsThatDifferFromSampleToSampleHaveNoTileOfHighs) {
  ProductShape shape = batch_of(64, 512, 512, 512);
  shape.scheme = Scheme::high;
  EXPECT_NE(plan_product(shape, {}).variant, Variant::unsupported);
  shape.weight_packed = true;
  EXPECT_EQ(plan_product(shape, {}).variant, Variant::unsupported);
}

std::string provider(const std::string& options) {
  constexpr const char* kScores = R"({
    "ingot_graph": 1, "name": "scores", "values": [
      {"op": "input", "name": "q", "dtype": "f32", "shape": ["B", 512, 1, 256]},
      {"op": "input", "name": "k", "dtype": "f32", "shape": ["B", 512, 1, 256]},
      {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
      {"op": "relu", "args": [2]}],
    "results": [{"value": 3, "name": "y"}]})";
  const auto program = abi::make_program(kScores, options);
  const nlohmann::json sweep = program->executable->describe(64)["sweeps"][0];
  return sweep["provider"].get<std::string>() + ", " + sweep.value("reason", "");
}

TEST(BatchedProduct, IsIngotsOnHopperAndTheLibrarysElsewhere) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  EXPECT_THAT(provider(R"({"device": "cuda", "sm": 90})"), HasSubstr("fp16 halves"));
  EXPECT_THAT(provider(R"({"device": "cuda", "sm": 80})"), HasSubstr("from sample to sample"));
  EXPECT_THAT(provider(R"({"device": "cuda", "sm": 90, "precision": "tf32"})"),
              HasSubstr("from sample to sample"));
}

}  // namespace
}  // namespace ingot::hopper
