// What a product stores for the next product alone: when it is handed on as halves, and where these
// lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "api/program.h"
#include "cuda/driver.h"
#include "graph_testing.h"
#include "product/hopper/candidates.h"

namespace ingot {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kOnHopper = R"({"device": "cuda", "sm": 90})";
constexpr int64_t kSamples = 8192;

// Linear layers with a ReLU between them, and further operators and results behind: value 0 is the
// input, 1 … n the weights, then a product and a ReLU in turn.
std::string layers(const std::vector<int64_t>& widths, const std::string& behind = "",
                   const std::string& results = "") {
  std::string values = fmt::format(
      R"({{"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, {}]}})", widths[0]);
  const size_t count = widths.size() - 1;
  for (size_t i = 0; i < count; ++i) {
    values += fmt::format(
        R"(, {{"op": "parameter", "name": "w{}", "dtype": "f32", "shape": [1, {}, 1, {}]}})", i,
        widths[i + 1], widths[i]);
  }
  size_t last = 0, next = count + 1;
  for (size_t i = 0; i < count; ++i) {
    values += fmt::format(R"(, {{"op": "linear", "args": [{}, {}, -1]}})", last, i + 1);
    last = next++;
    if (i + 1 == count) break;
    values += fmt::format(R"(, {{"op": "relu", "args": [{}], "origin": "h{}"}})", last, i);
    last = next++;
  }
  return fmt::format(
      R"({{"ingot_graph": 1, "name": "layers", "values": [{}{}],
         "results": [{{"value": {}, "name": "y"}}{}]}})",
      values, behind, last + (behind.empty() ? 0 : 1), results);
}

json program_of(const std::string& graph, const std::string& options = kOnHopper,
                int64_t batch = kSamples) {
  return abi::make_program(graph, options)->executable->describe(batch);
}

// Names of the memory that the steps of a kind read and write.
std::vector<std::string> memory_of(const json& described, const std::string& kind) {
  std::vector<std::string> names;
  for (const json& step : described["program"]["steps"]) {
    if (step["kind"] != kind) continue;
    for (const json& name : step["memory"]) names.push_back(name);
  }
  return names;
}

bool hands_on(const json& described) {
  const std::vector<std::string> names = memory_of(described, "product");
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.ends_with("'s factors"); });
}

// Where a buffer of a program begins and ends.
std::pair<size_t, size_t> place_of(const json& program, const std::string& name) {
  for (const json& buffer : program["buffers"]) {
    const size_t at = buffer["offset"];
    if (buffer["name"] == name) return {at, at + buffer["bytes"].get<size_t>()};
  }
  return {0, 0};
}

class HandedHalves : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  }
};

TEST_F(HandedHalves, AreNotPackedBetweenTwoProducts) {
  const json described = program_of(layers({1024, 4096, 1024}));
  ASSERT_TRUE(hands_on(described));
  EXPECT_THAT(memory_of(described, "pack"), Not(Contains(HasSubstr("h0"))));
  EXPECT_THAT(described["sweeps"][0]["provider"].get<std::string>(), HasSubstr("packs the result"));
  EXPECT_THAT(described["sweeps"][1]["provider"].get<std::string>(), HasSubstr("come packed"));
  const json without =
      program_of(layers({1024, 4096, 1024}),
                 R"({"device": "cuda", "sm": 90, "capabilities": {"handed_halves": false}})");
  EXPECT_FALSE(hands_on(without));
  EXPECT_THAT(memory_of(without, "pack"), Contains(HasSubstr("h0")));
}

TEST_F(HandedHalves, AreOfWholeGroupsOfFeaturesOnHopperAlone) {
  EXPECT_TRUE(hands_on(program_of(layers({1024, 4032, 1024}))));
  EXPECT_FALSE(hands_on(program_of(layers({1024, 4064, 1024})))) << "half a group of 64";
  EXPECT_FALSE(hands_on(program_of(layers({1024, 4096, 1024}), R"({"device": "cuda", "sm": 80})")));
  for (const char* precision : {"tf32", "high", "ieee"}) {
    const std::string options =
        fmt::format(R"({{"device": "cuda", "sm": 90, "precision": "{}"}})", precision);
    EXPECT_FALSE(hands_on(program_of(layers({1024, 4096, 1024}), options))) << precision;
  }
  EXPECT_FALSE(hands_on(program_of(layers({1024, 4096, 1024}), kOnHopper, 64)))
      << "few samples are not packed at all";
}

TEST_F(HandedHalves, HaveNoOtherReader) {
  // Value 4 is what both products meet in: read again behind, and given back.
  EXPECT_FALSE(
      hands_on(program_of(layers({1024, 4096, 4096}, R"(, {"op": "add", "args": [4, 5]})"))));
  EXPECT_FALSE(
      hands_on(program_of(layers({1024, 4096, 1024}, "", R"(, {"value": 4, "name": "h"})"))));
}

// What a product was handed and what it hands on are there at once, beside its own operands.
TEST_F(HandedHalves, GoFromLayerToLayer) {
  const json described =
      program_of(layers({1024, 2048, 1024, 2048, 1024, 1024, 1024}), kOnHopper, 16384);
  const std::vector<std::string> packed = memory_of(described, "pack");
  EXPECT_THAT(packed, Not(Contains(::testing::StartsWith("h"))));
  const json& program = described["program"];
  const size_t workspace = described["workspace_bytes"];
  for (size_t layer = 0; layer < 4; ++layer) {
    const auto [first, first_end] = place_of(program, fmt::format("h{}'s factors", layer));
    const auto [second, second_end] = place_of(program, fmt::format("h{}'s factors", layer + 1));
    const auto [weight, weight_end] = place_of(program, fmt::format("w{} packed", layer + 1));
    EXPECT_LT(first, first_end);
    EXPECT_TRUE(first_end <= second || second_end <= first) << layer;
    EXPECT_LE(weight_end, first) << layer;
    EXPECT_LE(second_end, workspace) << layer;
  }
}

TEST_F(HandedHalves, LieBehindWhatBothProductsUse) {
  const json described = program_of(layers({1024, 4096, 1024}));
  const auto [factors, factors_end] = place_of(described["program"], "h0's factors");
  for (const json& buffer : described["program"]["buffers"]) {
    if (buffer["name"] == "h0's factors") continue;
    EXPECT_LE(buffer["offset"].get<size_t>() + buffer["bytes"].get<size_t>(), factors) << buffer;
  }
  EXPECT_EQ(factors_end - factors, hopper::factor_bytes(kSamples, 4096));
  EXPECT_LE(factors_end, described["workspace_bytes"].get<size_t>());
}

// A norm's rows are packed where they are made, and nobody reads them as they are.
TEST_F(HandedHalves, RowsThatASweepPacksAreReadFromTheirPackedFormAlone) {
  const auto graph = [](const std::string& results) {
    return R"({"ingot_graph": 1, "name": "made", "values": [
      {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1024]},
      {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 1024, 1, 1024]},
      {"op": "softmax", "args": [0], "origin": "s"}, {"op": "linear", "args": [2, 1, -1]}],
      "results": [{"value": 3, "name": "y"})" +
           results + "]}";
  };
  const json alone = program_of(graph("")),
             also = program_of(graph(R"(, {"value": 2, "name": "p"})"));
  const std::vector<std::string> read = memory_of(alone, "product");
  EXPECT_THAT(read, Contains(HasSubstr("packed")));
  EXPECT_THAT(read, Not(Contains(::testing::AllOf(HasSubstr("(s)"), Not(HasSubstr("packed"))))));
  EXPECT_THAT(memory_of(also, "product"), Contains("p")) << "what is not finite is read there";
}

// Layers, activations, norms and sums of random earlier values, some of which are results.
std::string random_layers(std::mt19937& random) {
  constexpr int kWidths[] = {1024, 2048};
  const auto any = [&](size_t below) { return static_cast<size_t>(random() % below); };
  std::string values =
      R"({"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1024]})";
  std::vector<std::pair<size_t, int>> made = {{0, 1024}};  // value and width
  size_t count = 1;
  const size_t steps = 4 + any(8);
  for (size_t i = 0; i < steps; ++i) {
    // Mostly of the last one: a chain.
    const auto [from, width] = any(4) == 0 ? made[any(made.size())] : made.back();
    const size_t kind = any(8);
    const std::string origin = fmt::format(R"("origin": "v{}")", i);
    if (kind < 4) {
      const int to = kWidths[any(2)];
      values += fmt::format(
          R"(, {{"op": "parameter", "name": "w{0}", "dtype": "f32", "shape": [1, {1}, 1, {2}]}},
             {{"op": "linear", "args": [{3}, {4}, -1], {5}}})",
          i, to, width, from, count, origin);
      count += 2;
      made.emplace_back(count - 1, to);
    } else if (kind < 7) {
      const char* op = kind == 4 ? "relu" : kind == 5 ? "tanh" : "softmax";
      values += fmt::format(R"(, {{"op": "{}", "args": [{}], {}}})", op, from, origin);
      made.emplace_back(count++, width);
    } else {
      const auto [other, other_width] = made[any(made.size())];
      if (other_width != width) continue;
      values += fmt::format(R"(, {{"op": "add", "args": [{}, {}], {}}})", from, other, origin);
      made.emplace_back(count++, width);
    }
  }
  std::string results = fmt::format(R"({{"value": {}, "name": "y"}})", made.back().first);
  if (any(3) == 0) {
    results += fmt::format(R"(, {{"value": {}, "name": "z"}})", made[any(made.size())].first);
  }
  return fmt::format(R"({{"ingot_graph": 1, "name": "layers", "values": [{}], "results": [{}]}})",
                     values, results);
}

// Of the steps that name a place, the kinds in order.
std::vector<std::string> kinds_with(const json& program, const std::string& place) {
  std::vector<std::string> kinds;
  for (const json& step : program["steps"]) {
    const json& memory = step["memory"];
    if (std::find(memory.begin(), memory.end(), place) != memory.end())
      kinds.push_back(step["kind"]);
  }
  return kinds;
}

// Packed operands that a sweep makes of values that are neither results nor have memory as they
// are.
std::vector<std::string> packed_alone(const json& program, const json& results) {
  std::vector<std::string> found;
  for (const json& buffer : program["buffers"]) {
    const std::string name = buffer["name"], packed = " packed";
    if (!name.ends_with(packed)) continue;
    const std::string value = name.substr(0, name.size() - packed.size());
    for (const json& step : program["steps"]) {
      const json& memory = step["memory"];
      if (std::find(memory.begin(), memory.end(), name) == memory.end()) continue;
      const bool stored = std::any_of(memory.begin(), memory.end(), [&](const std::string& place) {
        const auto is_it = [&](const json& result) { return result["name"] == place; };
        return place.ends_with(" (" + value + ")") ||
               std::any_of(results.begin(), results.end(), is_it);
      });
      if (step["kind"] == "sweep" && !stored) found.push_back(name);
      break;
    }
  }
  return found;
}

// What lies in memory as halves, or packed alone, is named by the step that makes it and by the
// product that reads it, and by no other.
TEST_F(HandedHalves, AreReadByOneProductWhateverTheGraph) {
  std::mt19937 random(7);
  int handed = 0, alone = 0, shared = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string graph = random_layers(random);
    const json program = program_of(graph, kOnHopper, 16384)["program"];
    for (const json& buffer : program["buffers"]) {
      const std::string name = buffer["name"];
      const size_t open = name.find(" (v"), factors = name.find("'s factors");
      if (factors != std::string::npos) ++handed;
      if (open == std::string::npos) continue;
      const std::string value = name.substr(open + 2, name.size() - open - 3);
      const std::vector<std::string> kinds = kinds_with(program, name);
      if (place_of(program, value + "'s factors").second > 0) {
        EXPECT_THAT(kinds, ElementsAre("product", "product")) << name << graph;
      }
    }
    for (const std::string& name : packed_alone(program, json::parse(graph)["results"])) {
      std::vector<std::string> readers = kinds_with(program, name);
      ASSERT_GE(readers.size(), 2u) << name << graph;
      readers.erase(readers.begin());
      EXPECT_THAT(readers, ::testing::Each("product")) << name << graph;
      shared += readers.size() > 1;
      ++alone;
    }
  }
  EXPECT_GE(handed, 100);
  EXPECT_GE(alone, 50);
  EXPECT_GE(shared, 1) << "several products read the same rows";
}

// Queries, keys and values of the same rows: packed once, by the sweep that makes them.
TEST_F(HandedHalves, RowsOfSeveralProductsArePackedAlone) {
  const auto read = [](const std::vector<int64_t>& widths, const std::string& behind) {
    std::string values =
        R"({"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 1024]},
           {"op": "softmax", "args": [0], "origin": "s"})";
    std::string results;
    size_t count = 2;
    for (const int64_t width : widths) {
      values += fmt::format(
          R"(, {{"op": "parameter", "name": "w{0}", "dtype": "f32", "shape": [1, {1}, 1, 1024]}},
             {{"op": "linear", "args": [1, {0}, -1]}})",
          count, width);
      count += 2;
      results += fmt::format(R"({}{{"value": {}, "name": "y{}"}})", results.empty() ? "" : ", ",
                             count - 1, count - 1);
    }
    const json program = program_of(
        fmt::format(R"({{"ingot_graph": 1, "name": "heads", "values": [{}], "results": [{}{}]}})",
                    values, results, behind),
        kOnHopper, 16384)["program"];
    EXPECT_EQ(kinds_with(program, "s packed").front(), "sweep");
    std::string plain = "p";  // the result, or a buffer of the plan's
    for (const json& buffer : program["buffers"]) {
      const std::string name = buffer["name"];
      if (name.ends_with(" (s)")) plain = name;
    }
    return kinds_with(program, plain);
  };
  EXPECT_THAT(read({1024, 1024, 1024}, ""), ElementsAre());  // no memory as it is
  EXPECT_THAT(read({1024, 256, 256}, ""), ElementsAre());
  EXPECT_THAT(read({1024, 1024}, R"(, {"value": 1, "name": "p"})"),
              ElementsAre("sweep", "product", "product"));
}

// Plans of a shape that is handed halves, that hands some on, and of the same packed.
TEST(HandedHalvesPlans, HaveTheSameTilesWithoutThePacking) {
  for (const int64_t m : {2048, 4096, 6272, 7168, 16384}) {
    hopper::ProductShape shape;
    shape.m = m;
    shape.n = 1024, shape.k = 4096;
    shape.x = {4096, 1, true}, shape.w = {4096, 1, true};
    shape.y_stride = 1024;
    const hopper::DeviceLimits device;
    hopper::ProductShape handed = shape, handing = shape;
    handed.x_halves = handing.y_halves = true;
    const hopper::ProductPlan taken = hopper::plan_product(handed, device);
    const hopper::ProductPlan given = hopper::plan_product(handing, device);
    EXPECT_EQ(taken.variant, hopper::Variant::packed);
    EXPECT_EQ(given.variant, hopper::Variant::packed);
    EXPECT_THAT(taken.config, ::testing::EndsWith(", false, true, false>"));
    EXPECT_THAT(given.config, ::testing::EndsWith(", false, false, true>"));
    ASSERT_EQ(taken.splits.size(), 1u);
    EXPECT_EQ(taken.splits[0].operand, hopper::SplitStep::Operand::w);
    EXPECT_EQ(taken.x_map.source, hopper::TensorMapSpec::Source::x);
    EXPECT_EQ(taken.x_map.row_bytes, 4096u * 4) << "a packed row is as long as the fp32 row";
    EXPECT_EQ(given.splits.size(), 2u);
    EXPECT_TRUE(given.tma_store);
    EXPECT_LE(taken.shared_bytes, 232448u);
    EXPECT_LE(given.shared_bytes, 232448u);
    EXPECT_EQ(hopper::args_of(taken, handed).factor_rows, (m + 7) / 8 * 8);
  }
}

}  // namespace
}  // namespace ingot
