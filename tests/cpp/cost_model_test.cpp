// The cost model of the Hopper product against the table of bench/hopper/sweep.cu, measured on an
// H200: what it chooses must be near the best of all configurations.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "product/hopper/candidates.h"

namespace ingot::hopper {
namespace {

using nlohmann::json;

constexpr DeviceLimits kH200 = {132, 66};
constexpr double kMostOverBest = 1.05;
constexpr double kJitter = 0.001;  // milliseconds by which launches of the same kernel differ

json measured_table() {
  std::ifstream file(INGOT_SOURCE_DIR "/bench/results/config-sweep/nvidia-h200.json");
  return json::parse(file, nullptr, false);
}

ProductShape shape_of(const json& row) {
  ProductShape shape;
  shape.m = row["m"], shape.n = row["n"], shape.k = row["k"];
  shape.x = shape.w = {shape.k, 1, true};
  shape.y_stride = shape.n;
  return shape;
}

double time_of(const json& row, const std::string& name) {
  for (const json& c : row["configurations"]) {
    if (c["name"] == name) return c["ms"];
  }
  return 0;
}

std::string chosen(const ProductShape& shape) {
  const std::vector<TileChoice> menu = tile_choices(shape, kH200);
  const auto cost = [&](const TileChoice& c) { return estimate(shape, c, kH200); };
  return name_of(*std::min_element(
      menu.begin(), menu.end(), [&](const auto& a, const auto& b) { return cost(a) < cost(b); }));
}

TEST(CostModel, ChoosesWithinFivePercentOfTheBestOnEveryMeasuredShape) {
  const json table = measured_table();
  ASSERT_TRUE(table.is_object()) << "no table of measured times";
  ASSERT_GE(table["shapes"].size(), 36u);
  for (const json& row : table["shapes"]) {
    const std::string name = chosen(shape_of(row));
    double best = 1e30, taken = 0;  // the library, which gives no fused epilogue, apart
    std::string fastest;
    for (const json& c : row["configurations"]) {
      const double ms = c["ms"];
      if (c["name"] == name) taken = ms;
      if (c["name"] != "library" && ms < best) best = ms, fastest = c["name"];
    }
    ASSERT_GT(taken, 0) << name << " was not measured";
    EXPECT_LE(taken, kMostOverBest * best)
        << row["m"] << "x" << row["k"] << "->" << row["n"] << ": " << name << " takes " << taken
        << " ms, " << fastest << " " << best;
  }
}

TEST(CostModel, LeavesAPlainProductToTheLibraryExactlyWhereThatIsFaster) {
  const json table = measured_table();
  ASSERT_TRUE(table.is_object()) << "no table of measured times";
  int left = 0;
  for (const json& row : table["shapes"]) {
    const ProductShape shape = shape_of(row);
    const double own = time_of(row, chosen(shape)), library = time_of(row, "library");
    const bool faster = plan_product(shape, kH200).library_faster;
    left += faster;
    const double taken = faster ? library : own, other = faster ? own : library;
    EXPECT_LE(taken, kMostOverBest * other + kJitter)
        << row["m"] << "x" << row["k"] << "->" << row["n"] << (faster ? ": library" : ": own");
  }
  EXPECT_GT(left, 0) << "some small products of the table are the library's";
}

}  // namespace
}  // namespace ingot::hopper
