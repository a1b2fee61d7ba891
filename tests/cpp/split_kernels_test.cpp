// Which of Ingot's own products serves which GPU, and with what configuration.
#include "cuda/split_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/program.h"
#include "cuda/compiler.h"
#include "cuda/nvrtc.h"

namespace ingot::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kLinear = R"({
  "ingot_graph": 1, "name": "linear", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 384, 1, 512]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
    {"op": "relu", "args": [2]}],
  "results": [{"value": 3, "name": "y"}]})";

nlohmann::json sweep_of(const std::string& options) {
  const auto program = api::make_program(kLinear, options);
  return program->executable->describe(100000)["sweeps"][0];
}

TEST(SplitKernels, AreChosenByArchitectureAndCapabilities) {
  const nlohmann::json none = nlohmann::json::object();
  EXPECT_EQ(split_family(90, none), SplitFamily::hopper);
  for (const int sm : {80, 87, 100, 103}) EXPECT_EQ(split_family(sm, none), SplitFamily::portable);
  for (const int sm : {86, 89, 120}) {
    std::string why;
    EXPECT_EQ(split_family(sm, none, &why), SplitFamily::none);
    EXPECT_THAT(why, HasSubstr("tensor cores"));
    EXPECT_EQ(split_family(sm, {{"portable_product", true}}), SplitFamily::portable);
  }
  EXPECT_EQ(split_family(90, {{"hopper_product", false}}), SplitFamily::portable);
  EXPECT_EQ(split_family(90, {{"hopper_product", false}, {"portable_product", false}}),
            SplitFamily::none);
  EXPECT_EQ(split_family(75, {{"portable_product", true}}), SplitFamily::none);
}

TEST(SplitKernels, FitIntoTheSharedMemoryOfTheGpu) {
  hopper::ProductShape shape;
  shape.m = 1000, shape.n = 384, shape.k = 512;
  shape.x = shape.w = {512, 1, true};
  shape.y_stride = 384;
  Target target;
  target.units = 108;
  for (const auto& [bytes, threads] : {std::pair{163, 256u}, {99, 128u}, {227, 128u}}) {
    target.shared_bytes = bytes * 1024;
    const hopper::ProductPlan plan = plan_split_product(SplitFamily::portable, shape, target);
    EXPECT_EQ(plan.variant, hopper::Variant::portable) << plan.reason;
    EXPECT_EQ(plan.threads, threads);
    const size_t most = static_cast<size_t>(target.shared_bytes);
    EXPECT_LE(plan.shared_bytes, most);
    // Eight warps a multiprocessor want both halves of it; one block of four takes most of 99 KiB.
    EXPECT_GT(plan.shared_bytes, most * (bytes == 227 ? 2 : 4) / 5);
  }
  target.shared_bytes = 48 * 1024;
  EXPECT_EQ(plan_split_product(SplitFamily::portable, shape, target).variant,
            hopper::Variant::unsupported);
}

TEST(SplitKernels, LeaveFewTilesToTheLibrary) {
  hopper::ProductShape shape;
  shape.n = 1024, shape.k = 4096;
  shape.x = shape.w = {4096, 1, true};
  shape.y_stride = 1024;
  Target target;
  target.sm = 80, target.units = 108, target.shared_bytes = 163 * 1024;
  shape.m = 64;
  EXPECT_TRUE(plan_split_product(SplitFamily::portable, shape, target).library_faster);
  shape.m = 8192;
  const hopper::ProductPlan plan = plan_split_product(SplitFamily::portable, shape, target);
  EXPECT_FALSE(plan.library_faster);
  shape.weight_packed = true;
  EXPECT_LT(plan_split_product(SplitFamily::portable, shape, target).estimated_us,
            plan.estimated_us);
}

TEST(SplitKernels, TakeTheProductSweepsOfAPlan) {
  // Where a GPU is present, programs are planned for it and not for the "sm" given here.
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  for (const int sm : {80, 100}) {
    const nlohmann::json sweep =
        sweep_of(R"({"device": "cuda", "sm": )" + std::to_string(sm) + "}");
    EXPECT_EQ(sweep["provider"], name_of(SplitFamily::portable));
  }
  EXPECT_EQ(sweep_of(R"({"device": "cuda", "sm": 90})")["provider"], name_of(SplitFamily::hopper));
  EXPECT_EQ(sweep_of(R"({"device": "cuda", "sm": 90,
                         "capabilities": {"hopper_product": false}})")["provider"],
            name_of(SplitFamily::portable));
  const nlohmann::json library = sweep_of(R"({"device": "cuda", "sm": 86})");
  EXPECT_EQ(library["provider"], "cuBLASLt (ieee fp32)");
  EXPECT_THAT(library["reason"], HasSubstr("8.6"));
}

TEST(SplitKernels, KeepWeightsThatAreParameters) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto size = [](const std::string& graph, const char* options) {
    return api::make_program(graph, options)->executable->frozen_size();
  };
  // A line of 128 bytes for 32 of K, an exponent a row, both in multiples of 256 bytes.
  constexpr size_t kKept = 384 * 16 * 128 + 384 * 4;
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 90})"), kKept);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 80})"), kKept);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 86})"), 0u);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 90, "precision": "ieee"})"), 0u);
  EXPECT_EQ(size(kLinear, R"({"device": "cpu"})"), 0u);
  std::string weight_is_input = kLinear;
  weight_is_input.replace(weight_is_input.find("parameter"), 9, "input");
  EXPECT_EQ(size(weight_is_input, R"({"device": "cuda", "sm": 90})"), 0u);
}

// With the epilogue that the generator writes, for the large and the small shared memory.
TEST(SplitKernels, CompileWithoutSpills) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  for (const int sm : {80, 86}) {
    const nlohmann::json sweep = sweep_of(R"({"device": "cuda", "sm": )" + std::to_string(sm) +
                                          R"(, "capabilities": {"portable_product": true}})");
    ASSERT_EQ(sweep["provider"], name_of(SplitFamily::portable));
    for (const nlohmann::json& kernel : sweep["kernels"]) {
      const std::string text = kernel["text"];
      std::vector<std::string> options = compile_options(nvrtc_architecture(sm));
      options.emplace_back("--ptxas-options=-v");
      const Compilation result = nvrtc_compile(kernel["name"], text, headers_of(text), options);
      EXPECT_THAT(result.log, Not(HasSubstr("warning")));
      EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << kernel["name"];
      EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame")));
    }
  }
}

}  // namespace
}  // namespace ingot::cuda
