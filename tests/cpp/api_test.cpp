#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "api/guard.h"
#include "api/options.h"
#include "ingot/ingot.h"

namespace ingot {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kRelu[] = R"({"ingot_graph": 1, "name": "relu", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 3]},
    {"op": "relu", "args": [0]}], "results": [{"value": 1, "name": "y"}]})";

std::string create_error(const char* graph, const char* options) {
  ingot_program* program = nullptr;
  const ingot_status status = ingot_program_create(graph, options, &program);
  EXPECT_EQ(program, nullptr);
  EXPECT_NE(status, INGOT_OK);
  return ingot_last_error();
}

TEST(Api, KnowsItsVersions) {
  EXPECT_EQ(ingot_abi_version(), INGOT_ABI_VERSION);
  EXPECT_THAT(ingot_version(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

TEST(Api, NamesTheBadOption) {
  EXPECT_THAT(create_error(kRelu, R"({"devise": "cpu"})"),
              AllOf(HasSubstr("devise"), HasSubstr("precision")));
  EXPECT_THAT(create_error(kRelu, R"({"device": "tpu"})"),
              AllOf(HasSubstr("device"), HasSubstr("tpu"), HasSubstr("cuda")));
  EXPECT_THAT(create_error(kRelu, R"({"precision": "fp8"})"),
              AllOf(HasSubstr("precision"), HasSubstr("fp8"), HasSubstr("tf32")));
  EXPECT_THAT(create_error(kRelu, R"({"sm": "9.0"})"), HasSubstr("sm"));
  EXPECT_THAT(create_error(kRelu, R"({"capabilities": 3})"), HasSubstr("capabilities"));
  EXPECT_THAT(create_error(kRelu, "[1"), HasSubstr("JSON object"));
}

TEST(Api, ReadsEveryOption) {
  const ProgramOptions options = api::parse_options(
      R"({"device": "cuda", "precision": "tf32", "rewrite_level": "real", "sm": 80,
          "cache_dir": "/c", "capabilities": {"amx": false}})");
  EXPECT_EQ(options.device, Target::Device::cuda);
  EXPECT_EQ(options.precision, Precision::tf32);
  EXPECT_TRUE(options.real_rewrites);
  EXPECT_EQ(options.sm, 80);
  EXPECT_EQ(options.cache_dir, "/c");
  EXPECT_EQ(options.capabilities["amx"], false);
  EXPECT_EQ(api::parse_options(api::to_json(options).dump()).sm, 80);
}

TEST(Api, RefusesMissingArguments) {
  EXPECT_EQ(ingot_program_create(kRelu, nullptr, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_THAT(create_error(nullptr, nullptr), HasSubstr("graph"));
  EXPECT_THAT(create_error("{}", nullptr), HasSubstr("ingot_graph"));
  EXPECT_EQ(ingot_program_run(nullptr, 1, nullptr, 0, nullptr, 0, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_frozen_size(nullptr, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_freeze(nullptr, 1, nullptr, 0, nullptr, 0, nullptr),
            INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_run_frozen(nullptr, 1, nullptr, 0, nullptr, 0, nullptr, 0, nullptr),
            INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_call(nullptr), INGOT_INVALID_ARGUMENT);
  const ingot_call empty = {};
  EXPECT_EQ(ingot_program_call(&empty), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_doctor(nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_explain(nullptr, 1, nullptr), INGOT_INVALID_ARGUMENT);
  ingot_program_destroy(nullptr);
}

TEST(Api, KeepsErrorsPerThread) {
  create_error(kRelu, R"({"devise": 1})");
  std::string other = "not asked";
  std::thread([&] { other = ingot_last_error(); }).join();
  EXPECT_EQ(other, "");
  EXPECT_THAT(ingot_last_error(), HasSubstr("devise"));
}

TEST(Api, TurnsEveryExceptionIntoAStatus) {
  EXPECT_EQ(api::guarded([] { fail(INGOT_UNSUPPORTED, "a"); }), INGOT_UNSUPPORTED);
  EXPECT_EQ(api::guarded([] { throw std::bad_alloc(); }), INGOT_FAILED);
  EXPECT_EQ(api::guarded([] { throw 3; }), INGOT_FAILED);
  EXPECT_THAT(ingot_last_error(), HasSubstr("unknown"));
}

template <class T>
ingot_tensor row(T* data, int64_t batch, int64_t features) {
  const int32_t dtype = sizeof(T) == 8 ? INGOT_F64 : INGOT_F32;
  return {data, {batch, 1, 1, features}, {features, 0, 0, 1}, dtype, -1};
}

TEST(Api, EvaluatesInDoublePrecision) {
  double x[] = {-1, 2, std::numeric_limits<double>::quiet_NaN(), 4, -5, 6}, y[6];
  const ingot_tensor tensors[] = {row(x, 2, 3), row(y, 2, 3)};
  ASSERT_EQ(ingot_evaluate_fp64(kRelu, 2, tensors, 2), INGOT_OK) << ingot_last_error();
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[5], 6);
  EXPECT_NE(y[2], y[2]);
}

TEST(Api, RunsACallThatIsKept) {
  ingot_program* program = nullptr;
  ASSERT_EQ(ingot_program_create(kRelu, nullptr, &program), INGOT_OK) << ingot_last_error();
  float x[] = {-1, 2, 3, 4, -5, 6}, y[6] = {};
  const ingot_tensor tensors[] = {row(x, 2, 3), row(y, 2, 3)};
  size_t bytes = 0;
  ASSERT_EQ(ingot_program_workspace_size(program, 2, &bytes), INGOT_OK);
  std::vector<std::byte> memory(bytes + 256);
  void* workspace = memory.data();
  size_t room = memory.size();
  ASSERT_NE(std::align(256, bytes, workspace, room), nullptr);
  ingot_call call = {};
  call.program = program;
  call.batch = 2;
  call.tensors = tensors;
  call.count = 2;
  call.workspace = workspace;
  call.workspace_bytes = bytes;
  EXPECT_EQ(ingot_program_call(&call), INGOT_OK) << ingot_last_error();
  EXPECT_THAT(y, testing::ElementsAre(0, 2, 3, 4, 0, 6));
  x[0] = 7;
  EXPECT_EQ(ingot_program_call(&call), INGOT_OK) << ingot_last_error();
  EXPECT_EQ(y[0], 7);
  call.count = 1;
  EXPECT_EQ(ingot_program_call(&call), INGOT_INVALID_ARGUMENT);
  ingot_program_destroy(program);
}

TEST(Api, MeasuresErrors) {
  const double truth[] = {3, 4};
  const float candidate[] = {3, 5};
  double measures[5];
  ASSERT_EQ(ingot_measure_error(truth, candidate, INGOT_F32, 1, 2, measures), INGOT_OK);
  EXPECT_DOUBLE_EQ(measures[0], 0.2);
  EXPECT_EQ(measures[3], 1);
}

TEST(Api, DescribesTheMachine) {
  char* text = nullptr;
  ASSERT_EQ(ingot_doctor(&text), INGOT_OK) << ingot_last_error();
  const auto json = nlohmann::json::parse(text);
  EXPECT_TRUE(json.contains("cpu") && json.contains("cuda"));
  ingot_free(text);
}

}  // namespace
}  // namespace ingot
