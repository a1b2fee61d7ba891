// The policy `high`: what it plans, packs and says of itself.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/program.h"
#include "cuda/product_family.h"
#include "product/hopper/candidates.h"

namespace ingot::cuda {
namespace {

using ::testing::HasSubstr;

hopper::ProductShape high_shape(int64_t m, int64_t n, int64_t k) {
  hopper::ProductShape shape;
  shape.m = m, shape.n = n, shape.k = k;
  shape.x = shape.w = {k, 1, true};
  shape.y_stride = n;
  shape.scheme = hopper::Scheme::high;
  return shape;
}

TEST(HighProduct, PacksAPlaneOfCrossTermsAndOneOfHalvesForHigh) {
  for (const int64_t k : {1, 32, 33, 64, 65, 1000, 8192}) {
    EXPECT_EQ(hopper::packed_bytes(hopper::Scheme::high, 10, k),
              static_cast<size_t>(10 * 2 * ((k + 63) / 64) * 128))
        << "whole lines of 64 of k in either plane";
  }
  hopper::ProductShape shape = high_shape(1024, 8192, 8192);
  const hopper::ProductPlan plan = hopper::plan_product(shape, {});
  ASSERT_EQ(plan.variant, hopper::Variant::crossed) << plan.reason;
  EXPECT_EQ(plan.scheme, hopper::Scheme::high);
  EXPECT_EQ(plan.chunks, 2 * 8192 / 64) << "a line of either plane a stage";
  ASSERT_EQ(plan.splits.size(), 2u);
  for (const hopper::SplitStep& step : plan.splits) {
    EXPECT_STREQ(step.header, "product/crossed_rows.cuh");
  }
  EXPECT_EQ(plan.x_map.columns, 2u * 8192);
  EXPECT_EQ(plan.w_map.row_bytes, 4u * 8192);
  EXPECT_LE(plan.shared_bytes, 232448u);
  shape.scheme = hopper::Scheme::split;
  EXPECT_LT(plan.estimated_us, hopper::plan_product(shape, {}).estimated_us);
}

TEST(HighProduct, StaysWithFp32sSchemeWhereHighHasNoTile) {
  hopper::ProductShape batch = high_shape(256, 256, 256);
  batch.batches = 8;
  batch.x.batch_stride = batch.w.batch_stride = 256 * 256;
  const hopper::ProductShape thin = high_shape(4, 4096, 4096);
  for (const hopper::ProductShape& shape : {batch, thin}) {
    const hopper::ProductPlan plan = hopper::plan_product(shape, {});
    ASSERT_NE(plan.variant, hopper::Variant::unsupported) << plan.reason;
    EXPECT_EQ(plan.scheme, hopper::Scheme::split);
    EXPECT_EQ(plan.config, hopper::plan_product(hopper::as_split(shape), {}).config);
    for (const hopper::SplitStep& step : plan.splits) {
      EXPECT_STREQ(step.header, "product/split.cuh");
    }
  }
}

// A frozen weight is packed by one scheme, whatever the samples.
TEST(HighProduct, ReadsAFrozenWeightByTheSchemeThatPackedIt) {
  for (const int64_t m : {1, 64, 100, 1024, 16384}) {
    hopper::ProductShape shape = high_shape(m, 4096, 4096);
    shape.weight_packed = true;
    for (const hopper::TileChoice& choice : hopper::candidate_choices(shape, {})) {
      EXPECT_EQ(choice.variant, hopper::Variant::crossed);
    }
    EXPECT_EQ(hopper::plan_product(shape, {}).scheme, hopper::Scheme::high);
  }
}

TEST(HighProduct, HasATileOfHighForEveryShape) {
  for (const int64_t m : {1, 100, 5000}) {
    for (const int64_t n : {1, 127, 4099}) {
      for (const int64_t k : {1, 33, 4100, 40000}) {
        for (const bool aligned : {true, false}) {
          hopper::ProductShape shape = high_shape(m, n, k);
          shape.x.aligned = shape.w.aligned = shape.y_aligned = aligned;
          int tiles = 0;
          for (const hopper::TileChoice& choice : hopper::candidate_choices(shape, {})) {
            if (choice.variant != hopper::Variant::crossed) continue;
            ++tiles;
            const hopper::ProductPlan plan = hopper::plan_with(shape, choice, {});
            EXPECT_LE(plan.shared_bytes, 232448u) << plan.config;
            EXPECT_GE(plan.chunks * 32, k);
            EXPECT_EQ(plan.tma_store, aligned && n % 4 == 0);
            EXPECT_TRUE(plan.tma_store || choice.samples < 256) << "for want of registers";
          }
          EXPECT_GE(tiles, 3);
        }
      }
    }
  }
}

TEST(HighProduct, ServeHighOnHopperAloneByASchemeOfItsOwn) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto high = [](int sm, const std::string& dtype, int64_t batch) {
    const std::string graph = fmt::format(
        R"({{"ingot_graph": 1, "name": "linear", "values": [
          {{"op": "input", "name": "x", "dtype": "{0}", "shape": ["B", 1, 1, 4096]}},
          {{"op": "parameter", "name": "w", "dtype": "{0}", "shape": [1, 4096, 1, 4096]}},
          {{"op": "matmul", "args": [0, 1], "attributes": {{"transpose_b": true}}}},
          {{"op": "relu", "args": [2]}}],
        "results": [{{"value": 3, "name": "y"}}]}})",
        dtype);
    const std::string options =
        fmt::format(R"({{"device": "cuda", "precision": "high", "sm": {}}})", sm);
    return abi::make_program(graph.c_str(), options)->executable->describe(batch)["sweeps"][0];
  };
  const nlohmann::json own = high(90, "f32", 4096);
  EXPECT_EQ(own["provider"],
            name_of(ProductFamily::hopper, hopper::Element::f32, hopper::Scheme::high));
  EXPECT_THAT(own["config"].get<std::string>(), HasSubstr("CrossedConfig<"));
  EXPECT_THAT(own["tuning"]["key"].get<std::string>(), HasSubstr("| f32 by high |"));
  const nlohmann::json thin = high(90, "f32", 4);
  EXPECT_EQ(thin["provider"], name_of(ProductFamily::hopper, hopper::Element::f32))
      << "fp32's scheme stands in";
  EXPECT_EQ(high(100, "f32", 4096)["provider"],
            name_of(ProductFamily::portable, hopper::Element::f32));
  EXPECT_EQ(high(90, "bf16", 4096)["provider"],
            name_of(ProductFamily::hopper, hopper::Element::bf16));
}

}  // namespace
}  // namespace ingot::cuda
