// The text of standalone files; that it compiles is tools/check_standalone.py's to show.
#include "standalone/standalone.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#if defined(__SANITIZE_ADDRESS__)
// GCC 12 believes that <regex> reads what was not set, between a sanitizer's instructions.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <regex>

#include "api/program.h"
#include "api/standalone.h"
#include "product/hopper/launch.h"
#include "standalone/amalgamate.h"
#include "support/error.h"

namespace ingot::standalone {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Two linears, the second weight as [K, N], and a softmax.
constexpr const char* kTwoLinears = R"({
  "ingot_graph": 1, "name": "two", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 384, 1, 512]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
    {"op": "parameter", "name": "v", "dtype": "f32", "shape": [1, 384, 1, 256]},
    {"op": "matmul", "args": [2, 3]},
    {"op": "softmax", "args": [4]}],
  "results": [{"value": 5, "name": "y"}]})";

std::unique_ptr<abi::Program> two_linears(const std::string& options = R"({"device": "cuda"})") {
  return abi::make_program(kTwoLinears, options);
}

// A softmax of so many rows a sample.
std::unique_ptr<abi::Program> softmax_of(int64_t rows, int64_t features) {
  const std::string graph = R"({
    "ingot_graph": 1, "name": "rows", "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", )" +
                            std::to_string(rows) + ", 1, " + std::to_string(features) + R"(]},
      {"op": "softmax", "args": [0]}],
    "results": [{"value": 1, "name": "y"}]})";
  return abi::make_program(graph.c_str(), R"({"device": "cuda"})");
}

std::string source_of(const abi::Program& program,
                      std::vector<std::array<int64_t, kAxes>> strides = {}) {
  const Request request = {&program.plan, "forward", std::move(strides)};
  const nlohmann::json written = write_source({&request, 1});
  return written["common"].get<std::string>() + written["programs"][0]["source"].get<std::string>();
}

// Everything that a pattern's first group finds, in order.
std::vector<std::string> all(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator at(text.begin(), text.end(), expression), end; at != end; ++at) {
    found.push_back((*at)[1]);
  }
  return found;
}

// The strides of each product's operands: {n, k, {address, row, k}, {address, row, k}, ...}.
std::vector<std::string> strides_of_products(const std::string& text) {
  return all(text, R"(Shape \w+ = \{\d+, false, (\{nullptr, \d+, \d+\}, \{nullptr, \d+, \d+\}))");
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Amalgamation, TakesEachHeaderOnceAndWhatItIncludesBeforeIt) {
  Amalgamation headers;
  headers.add_header("sweeps/map.cuh");
  headers.add_header("sweeps/tensor.cuh");
  EXPECT_EQ(headers.take_includes("#include \"sweeps/map.cuh\"\n\n#include <cmath>\n\nint a;\n"),
            "int a;\n");
  const std::string text = headers.text();
  EXPECT_EQ(count(text, "// ---- sweeps/tensor.cuh "), 1);
  EXPECT_LT(text.find("// ---- common/types.cuh "), text.find("// ---- sweeps/tensor.cuh "));
  EXPECT_THAT(text, ::testing::StartsWith("#include <cmath>\n"));
  EXPECT_THAT(text, Not(HasSubstr("#pragma once")));
  EXPECT_THAT(text, Not(HasSubstr("#include \"")));
  EXPECT_THROW(headers.add_header("sweeps/none.cuh"), std::logic_error);
}

TEST(Standalone, BindsEveryOperandOfAProduct) {
  const auto program = two_linears();
  const std::string text = source_of(*program);
  // The first product reads two leaves and writes a buffer that the second one reads.
  const std::vector<std::string> buffers =
      all(text, R"(\brun\(launch, \w+, tensors\[0\], tensors\[1\], workspace \+ (\w+), )");
  ASSERT_EQ(buffers.size(), 1u);
  EXPECT_THAT(text, HasSubstr(", workspace + " + buffers[0] + ", tensors[2], "));
  EXPECT_THAT(text, HasSubstr(buffers[0] + " = pieces.take(batch * 1536);"));  // 384 features
  EXPECT_THAT(strides_of_products(text), ElementsAre("{nullptr, 512, 1}, {nullptr, 512, 1}",
                                                     "{nullptr, 384, 1}, {nullptr, 1, 256}"))
      << "v is [K, N]";
  EXPECT_THAT(text, HasSubstr("split_columns<8, 2, 2>"));
  EXPECT_EQ(all(text, R"((void run_forward)\()").size(), 1u);
}

TEST(Standalone, TakesStridesThatAreNotDense) {
  const auto program = two_linears();
  // w is a view of a [512, 384] tensor.
  const std::string text = source_of(*program, {{512, 0, 0, 1}, {0, 1, 0, 384}, {0, 256, 0, 1}});
  EXPECT_EQ(strides_of_products(text).front(), "{nullptr, 512, 1}, {nullptr, 1, 384}");
}

TEST(Standalone, HoldsTheKernelForOperandsThatLieTurned) {
  const auto program = abi::make_program(R"({
    "ingot_graph": 1, "name": "sum", "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 64, 1, 512]},
      {"op": "input", "name": "t", "dtype": "f32", "shape": ["B", 64, 1, 512]},
      {"op": "add", "args": [0, 1], "origin": "sum"},
      {"op": "softmax", "args": [2], "origin": "softmax"}],
    "results": [{"value": 3, "name": "y"}]})",
                                         R"({"device": "cuda"})");
  const std::array<int64_t, kAxes> dense = {32768, 512, 0, 1}, turned = {32768, 1, 0, 64};
  EXPECT_THAT(source_of(*program), Not(HasSubstr("_turned")));
  const std::string text = source_of(*program, {dense, turned});
  EXPECT_THAT(text, HasSubstr("launch(fused_sum_softmax_turned, divide_up(batch * 64, 8), "));
  EXPECT_THAT(text, HasSubstr("{tensors[1], {32768, 1, 0, 64}}"));
  EXPECT_THAT(text, HasSubstr("rows_turned<ingot::FusedSumSoftmaxTurned, 4, 4, "));
  EXPECT_THAT(text, Not(HasSubstr("_unaligned")));
}

// The tile that a file takes for a number of samples is the one that the library would plan for.
TEST(Standalone, TakesTheTilesThatTheLibraryPlans) {
  const auto program = two_linears();
  const std::string text = source_of(*program);
  const std::string table = all(text, R"(Range shape0_ranges\[\] = \{([^;]*);)").at(0);
  std::vector<std::pair<int64_t, size_t>> ranges;
  const std::vector<std::string> most = all(table, R"(\{(\d+), \d+\})");
  const std::vector<std::string> tiles = all(table, R"(\{\d+, (\d+)\})");
  for (size_t i = 0; i < most.size(); ++i)
    ranges.emplace_back(std::stoll(most[i]), std::stoul(tiles[i]));
  const std::string listed = text.substr(text.find("#define shape0_kernels(name)"));
  const std::vector<std::string> kernels =
      all(listed.substr(0, listed.find("shape0_tiles")), R"(<hopper::(\w+<[^>]*>)>)");
  hopper::ProductShape shape;
  shape.n = 384;
  shape.k = 512;
  shape.x = shape.w = {512, 1, true};
  shape.y_stride = 384;
  shape.unpacked = hopper::Unpacked::whole;
  for (const int64_t m : {1, 64, 65, 700, 1024, 5000, 20000, 32768}) {
    shape.m = m;
    const auto range =
        std::find_if(ranges.begin(), ranges.end(), [&](const auto& one) { return m <= one.first; });
    ASSERT_NE(range, ranges.end());
    EXPECT_EQ(kernels.at(range->second),
              hopper::plan_product(shape, hopper::limits_of(program->plan.target.units)).config)
        << m << " samples";
  }
}

TEST(Standalone, GivesRowsInWavesTheirMemory) {
  const auto check = [](int64_t features, const std::string& bytes, const std::string& blocks,
                        const std::string& threads) {
    const auto program = softmax_of(3, features);
    const std::string text = source_of(*program);
    EXPECT_THAT(text, HasSubstr(bytes));
    const size_t begin = text.find("_begin, 64, 1024,"), rows = text.find(blocks + threads);
    ASSERT_NE(begin, std::string::npos);
    ASSERT_NE(rows, std::string::npos) << blocks;
    EXPECT_LT(begin, rows) << "states are set to zero first";
  };
  check(1 << 23, "wave_bytes(batch * 3, 2048, 1, 8)", "wave_tasks(batch * 3, 1024, 1)", ", 512,");
  check(1 << 21, "wave_bytes(batch * 3, 512, 1, 8)", "std::min<int64_t>(264, batch * 3 * 256)",
        ", 256,");
}

TEST(Standalone, HoldsNoCodeThatItsModelDoesNotCall) {
  const auto alone = softmax_of(1, 512);
  const std::string rows = source_of(*alone), products = source_of(*two_linears());
  for (const char* part : {"TensorMapSpec", "ProductArgs", "SampleSplits", "allocate(pieces"}) {
    EXPECT_THAT(rows, Not(HasSubstr(part)));
  }
  EXPECT_THAT(products, HasSubstr("encode_map"));
  // Planning stays behind: a file has its results.
  for (const char* part : {"ProductPlan", "TileChoice", "estimate_library", "SampleSplits"}) {
    EXPECT_THAT(products, Not(HasSubstr(part)));
  }
}

TEST(Standalone, GivesKernelsOfSeveralProgramsTheirOwnNames) {
  const auto program = two_linears();
  const Request requests[] = {{&program->plan, "training", {}}, {&program->plan, "eval", {}}};
  const nlohmann::json result = write_source(requests);
  const auto first = result["programs"][0]["kernels"].get<std::vector<std::string>>();
  const auto second = result["programs"][1]["kernels"].get<std::vector<std::string>>();
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(second[i], first[i] + "_eval");
}

TEST(Standalone, RefusesWhatOnlyTheLibraryComputes) {
  const auto program = two_linears(R"({"device": "cuda", "precision": "bf16"})");
  try {
    source_of(*program);
    FAIL() << "it was written";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), INGOT_UNSUPPORTED);
    EXPECT_THAT(error.what(), HasSubstr("precision is bf16"));
  }
}

TEST(Standalone, ChecksItsOptions) {
  const auto cuda = two_linears(), cpu = two_linears(R"({"device": "cpu"})");
  const auto attempt = [](const abi::Program* program, const char* options) -> std::string {
    try {
      abi::standalone_source({&program, 1}, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [null]})"), "");
  EXPECT_THAT(attempt(cpu.get(), R"({"names": ["a"], "leaf_strides": [null]})"),
              HasSubstr("made for the CPU"));
  EXPECT_THAT(attempt(cuda.get(), R"({"names": ["a b"], "leaf_strides": [null]})"),
              HasSubstr("identifier"));
  EXPECT_THAT(attempt(cuda.get(), R"({"names": [], "leaf_strides": [null]})"), HasSubstr("names"));
  EXPECT_THAT(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [[[1, 2, 3, 4]]]})"),
              HasSubstr("1 entries for 3 leaves"));
  EXPECT_THAT(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [[[1, 2]]]})"),
              HasSubstr("four integers"));
  EXPECT_EQ(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [null], "batches": [7]})"), "");
  for (const char* batch : {"0", "1.5", R"("8")"}) {
    const std::string options =
        fmt::format(R"({{"names": ["a"], "leaf_strides": [null], "batches": [{}]}})", batch);
    EXPECT_THAT(attempt(cuda.get(), options.c_str()), HasSubstr("is no size"));
  }
  EXPECT_THAT(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [null], "batches": []})"),
              HasSubstr("'batches'"));
  EXPECT_THAT(attempt(cuda.get(), R"({"names": ["a"], "leaf_strides": [null], "contracted": [8]})"),
              HasSubstr("no batch of its own"));
}

TEST(Standalone, ProductsThatContractWhatACallGivesHoldATileForEachLength) {
  constexpr char kProduct[] = R"({"ingot_graph": 1, "name": "product", "values": [
    {"op": "input", "name": "a", "dtype": "f32", "shape": ["B", 1, 1, 1024]},
    {"op": "input", "name": "b", "dtype": "f32", "shape": [1, 1024, 1, 512]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": false}}],
    "results": [{"value": 2, "name": "product"}], "updates": []})";
  const auto program = abi::make_program(kProduct, R"({"device": "cuda"})");
  const abi::Program* const one = program.get();
  const auto written = [&](const std::string& contracted) {
    return abi::standalone_source(
        {&one, 1},
        fmt::format(R"({{"names": ["a"], "leaf_strides": [[[1, 0, 0, 4096], [0, 512, 0, 1]]],
                         "batches": [4096], "contracted": [{}]}})",
                    contracted));
  };
  const nlohmann::json fixed = written("null"), any = written("131072");
  const std::string of_fixed = fixed["programs"][0]["source"],
                    of_any = any["programs"][0]["source"];
  EXPECT_THAT(of_fixed, HasSubstr(", {}, batch, 1024)"));
  EXPECT_THAT(of_any, HasSubstr(", {}, 4096, batch)"));
  const std::string tables = any["common"];
  EXPECT_THAT(tables, HasSubstr("= {512, true, {nullptr, 1, 4096}, {nullptr, 1, 512}"));
  EXPECT_THAT(tables, HasSubstr("{1073741824, "));
}

TEST(Standalone, ProductsOfOneBatchSizeHoldItsTileAlone) {
  const auto program = two_linears();
  const abi::Program* const one = program.get();
  const auto tiles = [&](const char* batches) {
    const std::string options =
        fmt::format(R"({{"names": ["a"], "leaf_strides": [null], "batches": [{}]}})", batches);
    const std::string text = abi::standalone_source({&one, 1}, options)["common"];
    return std::pair(count(text, "Config<"), text.find("{1073741824, 0}") != std::string::npos);
  };
  const auto [many, last_of_many] = tiles("null");
  const auto [few, only_one] = tiles("1024");
  EXPECT_LT(few, many);
  EXPECT_FALSE(last_of_many);
  EXPECT_TRUE(only_one);
}

}  // namespace
}  // namespace ingot::standalone
