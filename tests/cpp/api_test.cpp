#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <memory>
#include <string>
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
  EXPECT_THAT(create_error(kRelu, "[1"), HasSubstr("options is not valid JSON"));
  EXPECT_THAT(create_error(kRelu, "[1]"), HasSubstr("JSON object"));
}

TEST(Api, RefusesOptionsAndGraphsThatNestTooDeep) {
  constexpr size_t kDeep = 2000000;
  const std::string deep = std::string(kDeep, '[') + std::string(kDeep, ']');
  const auto refused = AllOf(HasSubstr("more than 64 deep"), HasSubstr("options"));
  for (const char* key : {"device", "sm", "capabilities", "product_choices"}) {
    EXPECT_THAT(create_error(kRelu, (R"({")" + std::string(key) + R"(": )" + deep + "}").c_str()),
                refused);
    EXPECT_THAT(
        create_error(kRelu, (R"({")" + std::string(key) + R"(": {"a": )" + deep + "}}").c_str()),
        refused);
  }
  EXPECT_THAT(create_error(kRelu, deep.c_str()), refused);
  const std::string open(kDeep, '[');
  EXPECT_THAT(create_error(kRelu, open.c_str()), refused);
  const std::string graph = R"({"ingot_graph": )" + deep + "}";
  EXPECT_THAT(create_error(graph.c_str(), nullptr),
              AllOf(HasSubstr("more than 64 deep"), HasSubstr("graph")));
  EXPECT_EQ(ingot_evaluate_fp64(graph.c_str(), 1, nullptr, 0), INGOT_INVALID_ARGUMENT);
  // Brackets within texts nest nothing.
  const std::string text = R"({"cache_dir": "\")" + std::string(100, '[') + R"("})";
  ingot_program* program = nullptr;
  EXPECT_EQ(ingot_program_create(kRelu, text.c_str(), &program), INGOT_OK) << ingot_last_error();
  ingot_program_destroy(program);
}

TEST(Api, MessagesStayShort) {
  const std::string long_list = "[" + std::string(100000, '1') + "]";
  const std::string options = R"({"device": )" + long_list + "}";
  EXPECT_LT(create_error(kRelu, options.c_str()).size(), 500u);
}

TEST(Api, ReadsEveryOption) {
  const ProgramOptions options = abi::parse_options(
      R"({"device": "cuda", "precision": "tf32", "rewrite_level": "real", "sm": 80,
          "cache_dir": "/c", "capabilities": {"amx": false}})");
  EXPECT_EQ(options.device, Target::Device::cuda);
  EXPECT_EQ(options.precision, Precision::tf32);
  EXPECT_TRUE(options.real_rewrites);
  EXPECT_EQ(options.sm, 80);
  EXPECT_EQ(options.cache_dir, "/c");
  EXPECT_EQ(options.capabilities["amx"], false);
  EXPECT_EQ(abi::parse_options(abi::to_json(options).dump()).sm, 80);
}

TEST(Api, RefusesMissingArguments) {
  EXPECT_EQ(ingot_program_create(kRelu, nullptr, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_THAT(create_error(nullptr, nullptr), HasSubstr("graph"));
  EXPECT_THAT(create_error("{}", nullptr), HasSubstr("ingot_graph"));
  EXPECT_EQ(ingot_program_run(nullptr, 1, nullptr, 0, nullptr, 0, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_frozen_size(nullptr, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_uses_library(nullptr, 1, nullptr, 0, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_prepare_call(nullptr, 1, nullptr, 0, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_freeze(nullptr, 1, nullptr, 0, nullptr, 0, nullptr),
            INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_run_frozen(nullptr, 1, nullptr, 0, nullptr, 0, nullptr, 0, nullptr),
            INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_call(nullptr), INGOT_INVALID_ARGUMENT);
  const ingot_call empty = {};
  EXPECT_EQ(ingot_program_call(&empty), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_doctor(nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_explain(nullptr, 1, nullptr), INGOT_INVALID_ARGUMENT);
  EXPECT_EQ(ingot_program_signature(nullptr, nullptr), INGOT_INVALID_ARGUMENT);
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
  EXPECT_EQ(abi::guarded([] { fail(INGOT_UNSUPPORTED, "a"); }), INGOT_UNSUPPORTED);
  EXPECT_EQ(abi::guarded([] { throw std::bad_alloc(); }), INGOT_FAILED);
  EXPECT_EQ(abi::guarded([] { throw 3; }), INGOT_FAILED);
  EXPECT_THAT(ingot_last_error(), HasSubstr("unknown"));
}

template <class T>
ingot_tensor row(T* data, int64_t batch, int64_t features) {
  const int32_t dtype = sizeof(T) == 8 ? INGOT_F64 : INGOT_F32;
  return {data, {batch, 1, 1, features}, {features, 0, 0, 1}, dtype, -1};
}

constexpr char kTracked[] = R"({"ingot_graph": 1, "name": "tracked", "values": [
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 5, 1, 8]},
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 8]},
    {"op": "linear", "args": [1, 0, -1]},
    {"op": "buffer", "name": "count", "dtype": "i64", "shape": [1, 1, 1, 1]},
    {"op": "buffer", "name": "var", "dtype": "f32", "shape": [1, 1, 1, 5]},
    {"op": "buffer", "name": "mean", "dtype": "f32", "shape": [1, 1, 1, 5]},
    {"op": "batch_norm", "args": [2, -1, -1, 5, 4, 3],
     "attributes": {"training": true, "momentum": 0.1, "eps": 1e-5}},
    {"op": "softmax", "args": [6], "attributes": {"axes": ["features"]}}],
    "results": [{"value": 7, "name": "y"}]})";

nlohmann::json signature_of(const char* graph, const char* options) {
  ingot_program* program = nullptr;
  char* text = nullptr;
  EXPECT_EQ(ingot_program_create(graph, options, &program), INGOT_OK) << ingot_last_error();
  EXPECT_EQ(ingot_program_signature(program, &text), INGOT_OK) << ingot_last_error();
  const auto json = nlohmann::json::parse(text);
  ingot_free(text);
  ingot_program_destroy(program);
  return json;
}

TEST(Api, SaysWhatACallBinds) {
  using Json = nlohmann::json;
  const Json cuda = signature_of(kTracked, R"({"device": "cuda"})");
  EXPECT_EQ(cuda["leaves"][0],
            Json::parse(R"({"name": "w", "role": "parameter", "dtype": "f32", "shape": [1, 5, 1, 8],
                            "layout": "matrix"})"));
  EXPECT_EQ(cuda["leaves"][1]["shape"], Json::parse(R"(["B", 1, 1, 8])"));
  EXPECT_EQ(cuda["leaves"][2]["dtype"], "i64");
  EXPECT_EQ(cuda["leaves"][2]["role"], "buffer");
  EXPECT_EQ(cuda["leaves"][1]["layout"], "any");
  EXPECT_EQ(cuda["results"], Json::parse(R"([{"name": "y", "dtype": "f32", "shape": ["B", 1, 1, 5],
                             "layout": "any"}])"));
  EXPECT_EQ(cuda["updates"], Json::parse("[2, 4, 3]")) << "of the count, the mean, the variance";
  EXPECT_EQ(cuda["frozen"]["weights"][0]["leaf"], 0);
  EXPECT_EQ(cuda["frozen"]["weights"][0]["bytes"], cuda["frozen"]["bytes"]);
  EXPECT_THAT(cuda["workspace"]["buffers"].dump(), HasSubstr("B * 20"));
  const Json cpu = signature_of(kTracked, nullptr);
  EXPECT_EQ(cpu["device"], "cpu");
  EXPECT_EQ(cpu["leaves"][0]["layout"], "any");
  EXPECT_EQ(cpu["updates"], cuda["updates"]);
}

TEST(Api, SaysWhichPrecisionWasChosen) {
  const auto precision = [](const char* options) {
    return signature_of(kTracked, options)["precision"].get<std::string>();
  };
  EXPECT_EQ(precision(R"({"device": "cuda", "precision": "fp32"})"), "fp32");
  EXPECT_EQ(precision(R"({"device": "cuda", "precision": "high"})"), "high");
  EXPECT_EQ(precision(R"({"device": "cuda", "precision": "bf16"})"), "bf16");
  EXPECT_EQ(precision(R"({"device": "cuda", "precision": "fp32", "sm": 86})"), "ieee");
  EXPECT_EQ(signature_of(kRelu, R"({"device": "cuda"})")["precision"], "ieee");
}

TEST(Api, HashesWhatAProgramDoes) {
  const auto hash = [](const char* graph, const char* options) {
    return signature_of(graph, options)["hash"].get<std::string>();
  };
  const std::string one = hash(kTracked, R"({"device": "cuda"})");
  EXPECT_EQ(one, hash(kTracked, R"({"device": "cuda", "sm": 90, "cache_dir": "/elsewhere"})"));
  EXPECT_NE(one, hash(kTracked, R"({"device": "cuda", "precision": "bf16"})"));
  EXPECT_NE(one, hash(kRelu, R"({"device": "cuda"})"));
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

class ApiBatch : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string options = R"({"device": ")" + std::string(GetParam()) + R"("})";
    ASSERT_EQ(ingot_program_create(kBatchStatistics, options.c_str(), &program_), INGOT_OK)
        << ingot_last_error();
  }
  void TearDown() override { ingot_program_destroy(program_); }

  static constexpr char kBatchStatistics[] = R"({"ingot_graph": 1, "name": "norm", "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 16]},
      {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 4096, 1, 16]},
      {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}, "origin": "gemm"},
      {"op": "reduce", "args": [2], "attributes": {"finish": "mean", "axes": ["batch"]}},
      {"op": "sub", "args": [2, 3]}], "results": [{"value": 4, "name": "y"}]})";

  ingot_program* program_ = nullptr;
};

TEST_P(ApiBatch, OfMoreThanMemoryCanHoldIsRefused) {
  const auto refused = AllOf(HasSubstr("the batch size is"), HasSubstr("2^48"), HasSubstr("gemm"));
  // The last is the first that is too large: 4096 elements a sample.
  for (const int64_t batch : {int64_t{1} << 62, int64_t{1} << 50, int64_t{1} << 52,
                              (int64_t{1} << 60) + 1, (int64_t{1} << 36) + 1}) {
    size_t bytes = 17;
    EXPECT_EQ(ingot_program_workspace_size(program_, batch, &bytes), INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused) << batch;
    EXPECT_EQ(bytes, 17u);
    char* text = nullptr;
    EXPECT_EQ(ingot_program_explain(program_, batch, &text), INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused);
    const int device = std::string(GetParam()) == "cuda" ? 0 : -1;
    EXPECT_EQ(ingot_program_prepare(program_, batch, device), INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused);
    ingot_tensor tensors[3] = {};
    EXPECT_EQ(ingot_program_run(program_, batch, tensors, 3, nullptr, 0, nullptr),
              INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused);
    EXPECT_EQ(ingot_program_freeze(program_, batch, tensors, 3, nullptr, 0, nullptr),
              INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused);
    EXPECT_EQ(ingot_evaluate_fp64(kBatchStatistics, batch, tensors, 3), INGOT_INVALID_ARGUMENT);
    EXPECT_THAT(ingot_last_error(), refused);
  }
}

TEST_P(ApiBatch, SizesGrowWithTheBatchUpToTheLargest) {
  size_t before = 0;
  for (int64_t batch = 1; batch <= int64_t{1} << 36; batch *= 2) {
    size_t bytes = 0;
    ASSERT_EQ(ingot_program_workspace_size(program_, batch, &bytes), INGOT_OK)
        << ingot_last_error();
    EXPECT_GE(bytes, before) << batch;
    if (std::string(GetParam()) == "cpu") {
      EXPECT_GE(bytes, static_cast<size_t>(batch) * 4096 * sizeof(float));
    }
    before = bytes;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ApiBatch, ::testing::Values("cpu", "cuda"));

// Seconds of this thread that making a program of `count` pairs takes, at best.
double seconds_to_create(int count, const std::string& device, const std::string& layer) {
  std::string values = R"({"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 64]})";
  int last = 0, next = 1;
  for (int i = 0; i < count; ++i) {
    if (layer == "linear") {
      values += fmt::format(
          R"(, {{"op": "parameter", "name": "w{}", "dtype": "f32", "shape": [1, 64, 1, 64]}},
              {{"op": "matmul", "args": [{}, {}], "attributes": {{"transpose_b": true}}}})",
          i, last, next);
      last = next + 1;
      next += 2;
    }
    values += fmt::format(R"(, {{"op": "{}", "args": [{}]}})", i % 2 == 0 ? "tanh" : "exp", last);
    last = next++;
  }
  const std::string graph = R"({"ingot_graph": 1, "values": [)" + values +
                            R"(], "results": [{"value": )" + std::to_string(last) + "}]}";
  const auto now = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) {
    const double begun = now();
    ingot_program* program = nullptr;
    EXPECT_EQ(ingot_program_create(graph.c_str(), (R"({"device": ")" + device + R"("})").c_str(),
                                   &program),
              INGOT_OK)
        << ingot_last_error();
    ingot_program_destroy(program);
    best = std::min(best, now() - begun);
  }
  return best;
}

// Four times the nodes take about four times as long; they took sixteen times.
// How much longer four times as many nodes take: the least of a few tries, beside other tests.
double growth(int nodes, const char* device, const char* kind) {
  double least = 1e30;
  for (int i = 0; i < 4 && least >= 8; ++i) {
    least = std::min(
        least, seconds_to_create(4 * nodes, device, kind) / seconds_to_create(nodes, device, kind));
  }
  return least;
}

TEST(Api, CreatingAProgramIsLinearInItsNodes) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "times under a sanitizer are its own";
#endif
  for (const char* device : {"cpu", "cuda"}) {
    EXPECT_LT(growth(1000, device, ""), 8) << device;
    EXPECT_LT(growth(400, device, "linear"), 8) << device;
  }
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
