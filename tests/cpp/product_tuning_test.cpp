// Which configuration computes a product: asked for, measured before, or estimated.
#include "cuda/product_tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "api/program.h"

namespace ingot::cuda {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kLinear = R"({
  "ingot_graph": 1, "name": "linear", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 4096]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 1024, 1, 4096]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
    {"op": "relu", "args": [2]}],
  "results": [{"value": 3, "name": "y"}]})";

class Folder {
 public:
  Folder() : path_(::testing::TempDir() + "tuning-" + std::to_string(::getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& text) const {
    std::ofstream(path_ + "/tuned-products.json") << text;
  }

 private:
  std::string path_;
};

class ProductTuningTest : public ::testing::Test {
 protected:
  // The product of the linear model at this batch size.
  json product(int64_t batch, const json& choices = json::object()) const {
    const json options = {{"device", "cuda"},
                          {"sm", 90},
                          {"cache_dir", folder_.path()},
                          {"product_choices", choices}};
    return api::make_program(kLinear, options.dump())->executable->describe(batch)["sweeps"][0];
  }
  void measured(const std::string& key, const json& choice) const {
    folder_.write(
        json{{"ingot_tuned_products", 1}, {"products", {{key, {{"choice", choice}}}}}}.dump());
  }
  Folder folder_;
};

std::string another(const json& tuning) {
  for (const json& name : tuning["candidates"]) {
    if (name != tuning["choice"] && name != "library") return name;
  }
  return "";
}

TEST_F(ProductTuningTest, TheCostModelChoosesAmongTheCandidates) {
  const json tuning = product(1000)["tuning"];
  EXPECT_EQ(tuning["by"], "estimated");
  EXPECT_THAT(tuning["candidates"].get<std::vector<std::string>>(),
              Contains(tuning["choice"].get<std::string>()));
  EXPECT_EQ(tuning["candidates"].back(), "library");
  EXPECT_THAT(tuning["file"].get<std::string>(), HasSubstr(folder_.path()));
}

TEST_F(ProductTuningTest, EveryCandidateCanBeAskedFor) {
  const json tuning = product(1000)["tuning"];
  const std::string key = tuning["key"];
  for (const json& name : tuning["candidates"]) {
    const json sweep = product(1000, {{key, name}});
    EXPECT_EQ(sweep["tuning"]["choice"], name);
    EXPECT_EQ(sweep["tuning"]["by"], "given");
    EXPECT_THAT(sweep["provider"].get<std::string>(),
                HasSubstr(name == "library" ? "cuBLASLt" : "Ingot"));
  }
}

TEST_F(ProductTuningTest, WhatWasMeasuredServesItsBucketAlone) {
  const json tuning = product(1000)["tuning"];
  const std::string other = another(tuning);
  measured(tuning["key"], other);
  for (const int64_t batch : {897, 1000, 1024}) {
    EXPECT_EQ(product(batch)["tuning"]["choice"], other) << batch;
    EXPECT_EQ(product(batch)["tuning"]["by"], "tuned") << batch;
  }
  for (const int64_t batch : {64, 896, 1025}) {
    EXPECT_EQ(product(batch)["tuning"]["by"], "estimated") << batch;
  }
  const json asked = product(1000, {{tuning["key"], tuning["choice"]}});
  EXPECT_EQ(asked["tuning"]["choice"], tuning["choice"]);
  const json estimated = product(1000, {{tuning["key"], "estimated"}});
  EXPECT_EQ(estimated["tuning"]["by"], "estimated");
}

TEST_F(ProductTuningTest, DamagedFilesAndUnknownNamesCountAsAbsent) {
  const json tuning = product(1000)["tuning"];
  const std::string key = tuning["key"];
  for (const std::string text :
       {"", "{", "[]", "null", R"({"ingot_tuned_products": 2, "products": {}})",
        R"({"ingot_tuned_products": 1, "products": []})", R"({"ingot_tuned_products": 1})"}) {
    folder_.write(text);
    EXPECT_EQ(product(1000)["tuning"], tuning) << text;
  }
  for (const json& choice : {json("no such configuration"), json(7), json()}) {
    measured(key, choice);
    EXPECT_EQ(product(1000)["tuning"], tuning) << choice;
  }
}

TEST(ProductTuning, BucketsGrowByAQuarterAtMost) {
  EXPECT_EQ(ProductTuning::bucket(1), 8);
  EXPECT_EQ(ProductTuning::bucket(1024), 1024);
  for (int64_t m = 1; m < 5000; ++m) {
    const int64_t bucket = ProductTuning::bucket(m);
    ASSERT_GE(bucket, m);
    ASSERT_EQ(ProductTuning::bucket(bucket), bucket);
    if (m > 8) {
      ASSERT_LT(bucket, m + (m + 3) / 4) << m;
    }
  }
}

}  // namespace
}  // namespace ingot::cuda
