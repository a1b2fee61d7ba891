// Which configuration computes a product: asked for, measured before, or estimated.
#include "cuda/product_tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "api/program.h"

namespace ingot::cuda {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kTuned = R"({
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
    return abi::make_program(kTuned, options.dump())->executable->describe(batch)["sweeps"][0];
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
  // The second was a configuration once.
  for (const json& choice :
       {json("no such configuration"), json("DirectConfig<2, 1, 4, 4, true, true, true> raster 8"),
        json(7), json()}) {
    measured(key, choice);
    EXPECT_EQ(product(1000)["tuning"], tuning) << choice;
  }
}

TEST_F(ProductTuningTest, AFileThatOthersMayHaveWrittenCountsAsAbsent) {
  namespace fs = std::filesystem;
  const json tuning = product(1000)["tuning"];
  const fs::path file = folder_.path() + "/tuned-products.json", other = folder_.path() + "/other";
  measured(tuning["key"], another(tuning));
  EXPECT_EQ(product(1000)["tuning"]["by"], "tuned");
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(product(1000)["tuning"]["by"], "estimated");
  fs::permissions(file, fs::perms::others_write, fs::perm_options::remove);
  fs::rename(file, other);
  fs::create_symlink(other, file);
  EXPECT_EQ(product(1000)["tuning"]["by"], "estimated");
  fs::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  ::alarm(20);  // ends a test that waits
  EXPECT_EQ(product(1000)["tuning"]["by"], "estimated");
  ::alarm(0);
}

TEST_F(ProductTuningTest, DeepFilesCountAsAbsent) {
  const json tuning = product(1000)["tuning"];
  folder_.write(R"({"ingot_tuned_products": 1, "products": )" + std::string(1000000, '[') +
                std::string(1000000, ']') + "}");
  EXPECT_EQ(product(1000)["tuning"], tuning);
}

// An epilogue that reads a matrix waits for it; a sweep behind a library's product does not.
TEST(ProductTuning, CountsWhatAnEpilogueReadsInSixteenBits) {
  hopper::ProductShape shape;
  shape.m = 4096, shape.n = 2816, shape.k = 1024;
  shape.x = shape.w = {1024, 1, true};
  shape.y_stride = shape.n;
  shape.element = hopper::Element::bf16;
  Target target;
  target.units = 132;
  const ProductTuning tuning(ProgramOptions(), target, "");
  ProductTuning::EpilogueCost epilogue = {0, 1, 0, 0};
  EXPECT_NE(tuning.choose(ProductFamily::hopper, shape, epilogue).name, ProductTuning::kLibrary);
  epilogue.bytes_read = 2;
  EXPECT_EQ(tuning.choose(ProductFamily::hopper, shape, epilogue).name, ProductTuning::kLibrary);
  shape.m *= 4;  // the library's result would not stay in the L2 cache
  EXPECT_NE(tuning.choose(ProductFamily::hopper, shape, epilogue).name, ProductTuning::kLibrary);
}

// What is measured for one says nothing of the others.
TEST_F(ProductTuningTest, EveryTypeAndSchemeHasMeasurementsOfItsOwn) {
  using hopper::Element;
  hopper::ProductShape shape;
  shape.m = 1000, shape.n = 1024, shape.k = 4096;
  shape.x = shape.w = {4096, 1, true};
  shape.y_stride = 1024;
  const auto key = [&](Element element, Precision precision,
                       ProductFamily family = ProductFamily::hopper) {
    ProgramOptions options;
    options.precision = precision;
    shape.element = element;
    return ProductTuning(options, Target{}, "").key(family, shape, 0);
  };
  const std::set<std::string> keys = {
      key(Element::f32, Precision::fp32), key(Element::f32, Precision::tf32),
      key(Element::f32, Precision::high), key(Element::f16, Precision::fp32),
      key(Element::bf16, Precision::fp32)};
  EXPECT_EQ(keys.size(), 5u);
  EXPECT_THAT(key(Element::bf16, Precision::fp32), HasSubstr("bf16"));
  // The policy is of f32 products; elsewhere than on Hopper `high` is made as fp32 is.
  EXPECT_EQ(key(Element::bf16, Precision::fp32), key(Element::bf16, Precision::tf32));
  EXPECT_EQ(key(Element::f32, Precision::fp32, ProductFamily::portable),
            key(Element::f32, Precision::high, ProductFamily::portable));
}

// Keys had no type once: what they say may be of another.
TEST_F(ProductTuningTest, KeysWithoutATypeAreNotRead) {
  const json tuning = product(1000)["tuning"];
  std::string key = tuning["key"];
  const std::string type = " | f32 by fp16 halves";
  ASSERT_THAT(key, HasSubstr(type));
  key.erase(key.find(type), type.size());
  measured(key, another(tuning));
  EXPECT_EQ(product(1000)["tuning"]["by"], "estimated");
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
