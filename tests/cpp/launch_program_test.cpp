// What calls launch, without a GPU to launch it on.
#include "program/launch_program.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "api/program.h"
#include "cuda/driver.h"

namespace ingot {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

constexpr const char* kOnHopper = R"({"device": "cuda", "sm": 90})";

// Two products of x, one behind the other, and what becomes of `second`, the second one's operand.
std::string two_products(const std::string& second) {
  return R"({"ingot_graph": 1, "name": "two", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "input", "name": "other", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "v", "dtype": "f32", "shape": [1, 4096, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 4096, 1, 512]},
    {"op": "linear", "args": [0, 2, -1]},
    {"op": "linear", "args": [)" +
         second + R"(, 3, -1]},
    {"op": "relu", "args": [4]}, {"op": "tanh", "args": [5]}],
    "results": [{"value": 6, "name": "a"}, {"value": 7, "name": "b"}]})";
}

json program_of(const std::string& graph, const std::string& options = kOnHopper,
                int64_t batch = 4096) {
  return abi::make_program(graph, options)->executable->describe(batch)["program"];
}

std::vector<std::string> packed(const json& program) {
  std::vector<std::string> names;
  for (const json& step : program["steps"]) {
    if (step["kind"] == "pack") names.push_back(step["memory"][0]);
  }
  return names;
}

std::vector<std::string> kinds(const json& program) {
  std::vector<std::string> names;
  for (const json& step : program["steps"]) names.push_back(step["kind"]);
  return names;
}

TEST(LaunchProgram, PacksAnOperandOnceForProductsThatShareIt) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const std::vector<std::string> shared = packed(program_of(two_products("0")));
  EXPECT_EQ(std::count(shared.begin(), shared.end(), "x"), 1);
  EXPECT_THAT(packed(program_of(two_products("1"))), Contains("x"));
  EXPECT_THAT(packed(program_of(two_products("1"))), Contains("other"));
}

TEST(LaunchProgram, SplitsOnTheWayWhatOneProductReadsAndNoSweepMakes) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  constexpr int64_t kSamples = 65536;  // of 256 features: packing moves as much as the product
  const auto graph = [](const std::string& operators) {
    return R"({"ingot_graph": 1, "name": "thin", "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 256]},
      {"op": "parameter", "name": "v", "dtype": "f32", "shape": [1, 256, 1, 256]},
      {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 256, 1, 256]},
      )" + operators +
           "}";
  };
  const json behind = program_of(graph(R"({"op": "linear", "args": [0, 1, -1]},
      {"op": "relu", "args": [3]}, {"op": "linear", "args": [4, 2, -1]}],
    "results": [{"value": 5, "name": "y"}])"),
                                 kOnHopper, kSamples);
  EXPECT_THAT(kinds(behind), ElementsAre("product", "product"));
  const json shared = program_of(graph(R"({"op": "linear", "args": [0, 1, -1]},
      {"op": "linear", "args": [0, 2, -1]}],
    "results": [{"value": 3, "name": "y"}, {"value": 4, "name": "z"}])"),
                                 kOnHopper, kSamples);
  EXPECT_THAT(packed(shared), Contains("x"));
  const json made = program_of(graph(R"({"op": "tanh", "args": [0]},
      {"op": "linear", "args": [3, 1, -1]}],
    "results": [{"value": 4, "name": "y"}])"),
                               kOnHopper, kSamples);
  EXPECT_EQ(kinds(made).front(), "sweep");
  EXPECT_THAT(made["steps"][0]["kernel"].get<std::string>(), ::testing::EndsWith("_packed"));
}

// What a sweep makes of x is a result, and read by a product.
std::string product_of(const std::string& made, int64_t features) {
  const std::string k = std::to_string(features);
  return R"({"ingot_graph": 1, "name": "made", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 2, 1, )" +
         k + R"(]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 384, 1, )" +
         k + R"(]},
    {"op": ")" +
         made + R"(", "args": [0]}, {"op": "linear", "args": [2, 1, -1]}],
    "results": [{"value": 2, "name": "made"}, {"value": 3, "name": "z"}]})";
}

TEST(LaunchProgram, PacksInTheSweepThatMakesAProductsRows) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  for (const char* made : {"tanh", "softmax"}) {
    const json program = program_of(product_of(made, 512));
    EXPECT_THAT(packed(program), Not(Contains("made"))) << made;
    const json& sweep = program["steps"][0];
    EXPECT_EQ(sweep["kind"], "sweep");
    EXPECT_THAT(sweep["kernel"].get<std::string>(), ::testing::EndsWith("_packed"));
    const std::vector<std::string> memory = sweep["memory"];
    ASSERT_THAT(memory, ElementsAre("x", "made", ::testing::EndsWith(" packed"),
                                    ::testing::EndsWith("'s exponents")));
    const std::vector<std::string> read = program["steps"].back()["memory"];
    EXPECT_THAT(read, AllOf(Contains(memory[2]), Contains(memory[3])));
    // Where rows are no whole slabs, or a library multiplies, the sweep is what it was.
    EXPECT_THAT(packed(program_of(product_of(made, 500))), Contains("made")) << made;
    const json library =
        program_of(product_of(made, 512), R"({"device": "cuda", "sm": 90, "precision": "ieee"})");
    EXPECT_THAT(library["steps"][0]["kernel"].get<std::string>(),
                Not(::testing::EndsWith("_packed")));
  }
}

TEST(LaunchProgram, PacksWhatTheCallerGivesBesideTheSweepThatPacks) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  // By a product that reads both operands packed: of x, or what becomes of it, and a weight.
  const auto packs_beside = [](const std::string& rows, const std::string& weight,
                               const std::string& options = kOnHopper) {
    const json program = program_of(R"({"ingot_graph": 1, "name": "beside", "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1024]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 4096, 1, 1024]},
        {"op": "softmax", "args": [0]}, {"op": "exp", "args": [1]},
        {"op": "linear", "args": [)" + rows +
                                        ", " + weight + R"(, -1]}],
        "results": [{"value": 4, "name": "y"}]})",
                                    options, 8192);
    std::vector<bool> found;
    for (const json& step : program["steps"]) {
      if (step["kind"] == "pack") found.push_back(step["beside"]);
    }
    return found;
  };
  EXPECT_THAT(packs_beside("2", "1"), ElementsAre(true));
  EXPECT_THAT(packs_beside("0", "1"), ElementsAre(false, false)) << "a packing before it";
  EXPECT_THAT(packs_beside("2", "3"), Not(Contains(true))) << "a weight that is made here";
  EXPECT_THAT(packs_beside("2", "1", R"({"device": "cuda", "sm": 90, "precision": "tf32"})"),
              ElementsAre(true));
  EXPECT_THAT(packs_beside("2", "1", R"({"device": "cuda", "sm": 90, "precision": "high"})"),
              Not(Contains(true)))
      << "no sweep packs for it";
}

// What a backward pass has: a gradient by a product, behind an activation, and `sums` of columns.
std::string with_sums(int sums) {
  std::string text = R"({"ingot_graph": 1, "name": "sums", "values": [
    {"op": "input", "name": "g", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 512, 1, 384]},
    {"op": "input", "name": "h", "dtype": "f32", "shape": ["B", 1, 1, 384]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": false}},
    {"op": "mul", "args": [3, 2]}, {"op": "mul", "args": [4, 2]}, {"op": "mul", "args": [5, 2]})";
  std::string results = R"({"value": 4, "name": "d"})";
  for (int i = 0; i < sums; ++i) {
    text += R"(, {"op": "sum", "args": [)" + std::to_string(4 + i) +
            R"(], "attributes": {"axes": ["batch"]}})";
    results +=
        R"(, {"value": )" + std::to_string(7 + i) + R"(, "name": "s)" + std::to_string(i) + R"("})";
  }
  return text + R"(], "results": [)" + results + "]}";
}

TEST(LaunchProgram, SumsColumnsOfAProductInItsEpilogue) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  for (const int sums : {1, 2, 3}) {
    const json program = program_of(with_sums(sums));
    std::vector<std::string> behind = kinds(program);
    std::erase(behind, "pack");
    if (sums < 3) {
      EXPECT_THAT(behind, ElementsAre("product", "merge")) << sums;
    } else {
      EXPECT_THAT(behind, ElementsAre("product", "merge", "sweep", "merge"))
          << "an epilogue has room for two";
    }
    std::vector<json> partials;
    for (const json& buffer : program["buffers"]) {
      if (buffer["name"] == "partial sums") partials.push_back(buffer);
    }
    ASSERT_EQ(partials.size(), static_cast<size_t>(std::min(sums, 2)));
    const int64_t bytes = partials[0]["bytes"];
    EXPECT_EQ(bytes % (384 * 4), 0) << "a float a feature and tile of samples";
    EXPECT_GE(bytes / (384 * 4), 4096 / 192);
    if (sums > 1) {
      EXPECT_EQ(partials[1]["offset"], partials[0]["offset"].get<int64_t>() + bytes)
          << "where the merging kernel looks";
    }
  }
}

TEST(LaunchProgram, NamesTheMemoryOfItsSteps) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const json program = program_of(two_products("0"));
  const json& last = program["steps"].back();
  EXPECT_EQ(last["kind"], "product");
  const std::vector<std::string> memory = last["memory"];
  EXPECT_THAT(memory, Contains("x packed"));
  // One of the two products, its weight and its result.
  EXPECT_THAT(memory, AnyOf(AllOf(Contains("v"), Contains("a"), Not(Contains("b"))),
                            AllOf(Contains("w"), Contains("b"), Not(Contains("a")))));
  EXPECT_EQ(program["buffers"][0]["bytes"], 4096 * 16 * 128) << "128 bytes for 32 of K";
}

TEST(LaunchProgram, FollowsThePolicy) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  EXPECT_THAT(kinds(program_of(two_products("0"), R"({"device": "cuda", "precision": "ieee"})")),
              ElementsAre("library_product", "library_product", "sweep"));
  // Operands in another type than they have in memory are copied.
  EXPECT_THAT(kinds(program_of(two_products("0"), R"({"device": "cuda", "precision": "bf16"})")),
              Contains("copy"));
}

// y = x · w + b of 16 bits, w as the library alone reads it, and what is made of it.
std::string with_bias(const char* bias, const std::string& behind, const std::string& result) {
  return R"({"ingot_graph": 1, "name": "biased", "values": [
    {"op": "input", "name": "x", "dtype": "bf16", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "bf16", "shape": [1, 512, 1, 1024]},
    {"op": "parameter", "name": "b", "dtype": ")" +
         std::string(bias) + R"(", "shape": [1, 1, 1, 1024]},
    {"op": "cast", "args": [2], "attributes": {"dtype": "bf16"}},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": false}},
    {"op": "add", "args": [3, 4]})" +
         behind + R"(], "results": [)" + result + "]}";
}

json library_step(const json& program) {
  for (const json& step : program["steps"]) {
    if (step["kind"] == "library_product") return step;
  }
  return {};
}

TEST(LaunchProgram, TheLibraryAddsABias) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const char* sum = R"({"value": 5, "name": "y"})";
  const json alone = program_of(with_bias("bf16", "", sum));
  EXPECT_THAT(kinds(alone), ElementsAre("library_product"));
  EXPECT_EQ(library_step(alone)["bias"], true);
  EXPECT_THAT(library_step(alone)["memory"], Contains("b"));
  // Of another type it is converted, by a kernel of its own.
  const json converted = program_of(with_bias("f32", "", sum));
  EXPECT_THAT(kinds(converted), ElementsAre("copy", "library_product"));
  EXPECT_EQ(library_step(converted)["bias"], true);
  // Rounded once, the sum is what follows finds.
  const char* relu = R"(, {"op": "relu", "args": [5]})";
  const char* after = R"({"value": 6, "name": "y"})";
  const json behind = program_of(with_bias("bf16", relu, after));
  EXPECT_THAT(kinds(behind), ElementsAre("library_product", "sweep"));
  EXPECT_EQ(library_step(behind)["bias"], true);
  EXPECT_THAT(behind["steps"].back()["memory"], Not(Contains("b")));
  const json both = program_of(with_bias("f32", relu, after));
  EXPECT_THAT(kinds(both), ElementsAre("copy", "library_product", "sweep"));
  EXPECT_EQ(library_step(both)["bias"], true);
}

// Of it, a GPU that uses less need not have the rest.
TEST(LaunchProgram, TheLibrarysOwnMemoryIsTheLast) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const char* wider = R"(, {"op": "relu", "args": [5]},
    {"op": "cast", "args": [6], "attributes": {"dtype": "f32"}})";
  const json program = program_of(with_bias("bf16", wider, R"({"value": 7, "name": "y"})"));
  const std::vector<std::string> product = library_step(program)["memory"];
  constexpr int kBias = 1024 * 2;  // for its copy, where it lies otherwise
  EXPECT_THAT(product, Contains(fmt::format("workspace + {}", kBias))) << "what relu reads";
  EXPECT_THAT(product, Contains(fmt::format("workspace + {}", kBias + 4096 * 1024 * 2)));
}

// Where what is made of it lies in the end, element by element, a product needs no memory more.
TEST(LaunchProgram, ALibrarysProductLiesWhereWhatFollowsIsWritten) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto is_in_y = [](const std::string& behind, int result) {
    const json program = program_of(
        with_bias("bf16", behind, fmt::format(R"({{"value": {}, "name": "y"}})", result)));
    const std::vector<std::string> memory = library_step(program)["memory"];
    return std::find(memory.begin(), memory.end(), "y") != memory.end();
  };
  EXPECT_TRUE(is_in_y(R"(, {"op": "relu", "args": [5]})", 6));
  EXPECT_TRUE(is_in_y(R"(, {"op": "sigmoid", "args": [5]}, {"op": "mul", "args": [5, 6]})", 7));
  // Of other bytes an element, or no element for each of the product's.
  EXPECT_FALSE(is_in_y(R"(, {"op": "cast", "args": [5], "attributes": {"dtype": "f32"}})", 6));
  EXPECT_FALSE(is_in_y(R"(, {"op": "reduce", "args": [5], "attributes":
      {"axes": ["features"], "finish": "max"}})",
                       6));
}

// Statistics beside it are partial states of their own.
TEST(LaunchProgram, ALibrarysProductLiesThereBesideItsStatistics) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const char* behind = R"(, {"op": "relu", "args": [5]},
    {"op": "cast", "args": [6], "attributes": {"dtype": "f32"}},
    {"op": "reduce", "args": [7], "attributes": {"axes": ["batch"], "finish": "sum"}})";
  const json program = program_of(
      with_bias("bf16", behind, R"({"value": 6, "name": "y"}, {"value": 8, "name": "sum"})"));
  EXPECT_THAT(kinds(program), ElementsAre("library_product", "sweep", "merge"));
  EXPECT_THAT(library_step(program)["memory"], Contains("y"));
}

TEST(LaunchProgram, AProductThatIsReadItselfHasNoBias) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const json given = program_of(
      with_bias("bf16", "", R"({"value": 5, "name": "y"}, {"value": 4, "name": "product"})"));
  EXPECT_EQ(library_step(given)["bias"], false);
  const json read = program_of(
      with_bias("bf16", R"(, {"op": "mul", "args": [4, 5]})", R"({"value": 6, "name": "y"})"));
  EXPECT_EQ(library_step(read)["bias"], false);
}

// Whatever way the tensors of a call lie, there is a product of them.
TEST(LaunchProgram, ALibrarysOperandsAreCopiedWhereItCannotReadThem) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const char* graph = R"({"ingot_graph": 1, "name": "batched", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 9, 1, 512]},
    {"op": "input", "name": "w", "dtype": "f32", "shape": ["B", 768, 1, 512]},
    {"op": "linear", "args": [0, 1, -1]}], "results": [{"value": 2, "name": "y"}]})";
  const auto program = abi::make_program(graph, R"({"device": "cuda", "sm": 90})");
  // step: between the numbers of a row.
  const auto tensor = [](int64_t rows, int64_t features, int64_t step) {
    const int64_t row = features * step;
    return ingot_tensor{reinterpret_cast<void*>(uintptr_t{1} << 30),
                        {8, rows, 1, features},
                        {rows * row, row, row, step},
                        INGOT_F32,
                        0};
  };
  for (const auto& [x_step, w_step] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    const std::array<ingot_tensor, 3> tensors = {tensor(9, 512, x_step), tensor(768, 512, w_step),
                                                 tensor(9, 768, 1)};
    EXPECT_NO_THROW(program->executable->uses_library(8, tensors)) << x_step << ", " << w_step;
  }
}

TEST(LaunchProgram, HashesAllThatIsLaunched) {
  if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto hash = [](const std::string& graph, int64_t batch) {
    return program_of(graph, kOnHopper, batch)["hash"].get<std::string>();
  };
  EXPECT_EQ(hash(two_products("0"), 4096), hash(two_products("0"), 4096));
  EXPECT_NE(hash(two_products("0"), 4096), hash(two_products("0"), 4095));
  EXPECT_NE(hash(two_products("0"), 4096), hash(two_products("1"), 4096));
}

TEST(LaunchProgram, HashesEveryNumberOfAStep) {
  LaunchProgram program;
  Step step;
  step.kernel = "kernel";
  step.blocks = 4;
  step.threads = 128;
  program.steps = {step};
  const std::string before = hash_of(program);
  const auto differs = [&](auto change) {
    LaunchProgram other = program;
    change(other.steps[0]);
    return hash_of(other) != before;
  };
  EXPECT_FALSE(differs([](Step&) {}));
  EXPECT_TRUE(differs([](Step& s) { s.kernel = "other"; }));
  EXPECT_TRUE(differs([](Step& s) { s.text = 1; }));
  EXPECT_TRUE(differs([](Step& s) { s.function = 1; }));
  EXPECT_TRUE(differs([](Step& s) { s.blocks = 5; }));
  EXPECT_TRUE(differs([](Step& s) { s.threads = 256; }));
  EXPECT_TRUE(differs([](Step& s) { s.shared_bytes = 1024; }));
  EXPECT_TRUE(differs([](Step& s) { s.cluster = 2; }));
  EXPECT_TRUE(differs([](Step& s) { s.arguments.add(int64_t{7}); }));
}

TEST(LaunchProgram, KnowsTheBuffersThatNoStepIsToldOf) {
  Plan plan;
  const Shape shape{true, 1, 1, 64};
  plan.buffers = {{shape, DType::f32, 0, 1}, {shape, DType::f32, 1, 2}, {shape, DType::f32, 3, 4}};
  const std::vector<size_t> offsets = {0, 2560, 0};  // of a batch of 10
  LaunchProgram program;
  const auto add = [&](int sweep, const Address& address) {
    program.steps.emplace_back().sweep = sweep;
    program.steps.back().arguments.add_address(address);
  };
  add(0, {Address::Base::workspace, 0, 256});
  add(1, {Address::Base::tensor, 0, 2560});
  add(1, {Address::Base::workspace, 0, 5120});  // behind all of them
  EXPECT_THAT(unused_buffers(program, plan, 10, offsets), ElementsAre(false, true, true));
  add(4, {Address::Base::workspace, 0, 0});
  add(3, {Address::Base::workspace, 0, 5119});  // as a sweep lowered behind its own
  EXPECT_THAT(unused_buffers(program, plan, 10, offsets), ElementsAre(false, false, false));
}

TEST(LaunchProgram, DenseTensorsHaveTheStridesOfTheirSizes) {
  const auto dense = [](std::array<int64_t, kAxes> strides, std::array<int64_t, kAxes> sizes) {
    ingot_tensor tensor{};
    std::copy(sizes.begin(), sizes.end(), tensor.sizes);
    std::copy(strides.begin(), strides.end(), tensor.strides);
    return is_dense(tensor);
  };
  EXPECT_TRUE(dense({12, 12, 4, 1}, {5, 1, 3, 4}));
  EXPECT_TRUE(dense({12, 99, 4, 1}, {5, 1, 3, 4})) << "nobody walks along an axis of one element";
  EXPECT_FALSE(dense({0, 12, 4, 1}, {5, 1, 3, 4})) << "one sample for all";
  EXPECT_FALSE(dense({24, 12, 4, 1}, {5, 1, 3, 4})) << "every second sample";
  EXPECT_FALSE(dense({12, 12, 1, 3}, {5, 1, 3, 4})) << "transposed";
}

TEST(LaunchProgram, KeepsArgumentsApart) {
  Arguments arguments;
  arguments.add(int64_t{7});
  arguments.add_address({Address::Base::workspace, 0, 256});
  arguments.add_tensors({});
  EXPECT_THAT(arguments.starts, ElementsAre(0, 64, 128));
  EXPECT_EQ(arguments.bytes.size(), 128u + 40u) << "no operand: one that nobody reads";
  ASSERT_EQ(arguments.addresses.size(), 1u);
  EXPECT_EQ(arguments.addresses[0].at, 64u);
  EXPECT_THROW(arguments.add_zeros(Arguments::kMostBytes), std::logic_error);
}

}  // namespace
}  // namespace ingot
