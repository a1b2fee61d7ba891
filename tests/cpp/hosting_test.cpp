// Buffers that lie in results until these are written: which, and that nobody is given less memory
// who has not promised that results overlap with nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "api/program.h"
#include "plan/hosting.h"

namespace ingot {
namespace {

using nlohmann::json;

constexpr int64_t kHostedSamples = 4096;

json hosted_program(const std::string& values, const std::string& results, bool scratch_results) {
  const std::string graph = fmt::format(
      R"({{"ingot_graph": 1, "name": "g", "values": [{}], "results": [{}]}})", values, results);
  const std::string options =
      fmt::format(R"({{"device": "cuda", "sm": 90, "scratch_results": {}}})", scratch_results);
  return abi::make_program(graph, options)->executable->describe(kHostedSamples)["program"];
}

// By the value's origin, where the plan's buffers lie.
std::map<std::string, std::string> hosted_places(const json& program) {
  std::map<std::string, std::string> places;
  for (const json& buffer : program["buffers"]) {
    const std::string name = buffer["name"];
    const size_t open = name.find(" (");
    if (open == std::string::npos) continue;
    places[name.substr(open + 2, name.size() - open - 3)] = buffer["in"];
  }
  return places;
}

std::string leaf_of(const std::string& op, const std::string& name, const std::string& batch,
                    int64_t rows, int64_t features) {
  return fmt::format(R"({{"op": "{}", "name": "{}", "dtype": "f32", "shape": [{}, {}, 1, {}]}})",
                     op, name, batch, rows, features);
}

// A gradient that a map makes two others of, each element of its own.
const std::string kTwoOfOne = leaf_of("input", "x", "\"B\"", 1, 256) + "," +
                              leaf_of("input", "g", "\"B\"", 1, 512) + "," +
                              leaf_of("parameter", "w", "1", 512, 256) +
                              R"(, {"op": "linear", "args": [0, 2, -1], "origin": "m"},
       {"op": "mul", "args": [3, 1], "origin": "a"}, {"op": "exp", "args": [1], "origin": "e"},
       {"op": "mul", "args": [3, 5], "origin": "b"})";
constexpr const char* kBoth = R"({"value": 4, "name": "y"}, {"value": 6, "name": "z"})";

TEST(Hosting, AMapReadsEachElementBeforeItWritesThere) {
  EXPECT_EQ(hosted_places(hosted_program(kTwoOfOne, kBoth, true))["m"], "y");
  EXPECT_EQ(hosted_places(hosted_program(kTwoOfOne, kBoth, false))["m"], "workspace");
}

// Softmax, layer, softmax, of rows that no sweep packs: what the layer reads is read no more when
// the result is written; what it writes is read row by row, by whole teams.
TEST(Hosting, RowsAreReadWhileOthersAreWritten) {
  const std::string values = leaf_of("input", "x", "\"B\"", 1, 64) + "," +
                             leaf_of("parameter", "w", "1", 64, 64) +
                             R"(, {"op": "softmax", "args": [0], "origin": "s"},
         {"op": "linear", "args": [2, 1, -1], "origin": "t"},
         {"op": "softmax", "args": [3], "origin": "u"})";
  const auto places = hosted_places(hosted_program(values, R"({"value": 4, "name": "y"})", true));
  EXPECT_EQ(places.at("s"), "y");
  EXPECT_EQ(places.at("t"), "workspace");
}

class HostingPlan : public ::testing::Test {
 protected:
  // Sweep 0 makes the buffers' values, sweep 1 reads them and writes the result.
  void SetUp() override {
    plan_.graph.nodes.resize(4);
    for (const ValueId value : {0, 1, 2})
      plan_.graph.nodes[static_cast<size_t>(value)].shape = kRow;
    plan_.graph.results = {{2, "y"}};
    plan_.placements = {{Placement::Kind::workspace, 0},
                        {Placement::Kind::workspace, 1},
                        {Placement::Kind::result, 0},
                        {Placement::Kind::none, -1}};
    plan_.buffers = {{kRow, DType::f32, 0, 1, 0}, {kRow, DType::f32, 0, 0, 1}};
    Sweep first, last;
    first.stores = {0, 1};
    last.space = kRow;
    last.loads = {0};
    last.stores = {2};
    last.shapes = {{0, kRow}, {2, kRow}};
    plan_.sweeps = {first, last};
  }
  std::vector<int> hosts(bool may = true, std::vector<bool> left_out = {}) const {
    return hosting_results(plan_, {may}, left_out);
  }

  static constexpr Shape kRow{true, 1, 1, 64}, kHalf{true, 1, 1, 32};
  Plan plan_;
};

using ::testing::ElementsAre;

TEST_F(HostingPlan, OneBufferLiesInAResultAtATime) {
  EXPECT_THAT(hosts(), ElementsAre(0, -1));
  EXPECT_THAT(hosts(true, {true, false}), ElementsAre(-1, 0));
  EXPECT_THAT(hosts(false), ElementsAre(-1, -1));
  plan_.buffers[0].first_sweep = 1;  // made where it is read
  EXPECT_THAT(hosts(), ElementsAre(-1, 0));
}

TEST_F(HostingPlan, ElementsAreReadWhereTheResultsAreWritten) {
  plan_.sweeps[1].shapes[0] = kHalf;  // a broadcast
  EXPECT_THAT(hosts(), ElementsAre(-1, 0));
  plan_.sweeps[1].shapes[0] = kRow;
  plan_.buffers[0].dtype = DType::f16;
  EXPECT_THAT(hosts(), ElementsAre(-1, 0));
}

TEST_F(HostingPlan, AResultHasRoomAndMemoryOfItsOwn) {
  plan_.graph.nodes[2].shape = plan_.sweeps[1].shapes[2] = kHalf;
  EXPECT_THAT(hosts(), ElementsAre(-1, -1));
  SetUp();
  plan_.graph.nodes[2].shape = {false, 1, 1, 1 << 20};  // whatever the batch
  EXPECT_THAT(hosts(), ElementsAre(-1, -1));
  SetUp();
  plan_.placements[2].kind = Placement::Kind::update;
  EXPECT_THAT(hosts(), ElementsAre(-1, -1));
  SetUp();
  plan_.graph.results.push_back({2, "z"});
  EXPECT_THAT(hosting_results(plan_, {true, true}, {}), ElementsAre(-1, -1));
}

TEST_F(HostingPlan, NothingLiesThereWhileTheResultIsRead) {
  plan_.buffers[1].last_sweep = plan_.buffers[1].first_sweep = 2;
  EXPECT_THAT(hosts(), ElementsAre(0, -1));
  plan_.sweeps[1].kind = SweepKind::rows;
  EXPECT_THAT(hosts(), ElementsAre(-1, -1));
}

// A sum over columns is made by a sweep that packs nothing, and few features are too short a row.
TEST(Hosting, AProductPacksAloneWhatNoSweepPacks) {
  const auto packs = [](int64_t features, const std::string& results) {
    const std::string values = leaf_of("input", "x", "\"B\"", 1, features) + "," +
                               leaf_of("parameter", "w", "1", 256, features) +
                               R"(, {"op": "exp", "args": [0], "origin": "e"},
                                   {"op": "linear", "args": [2, 1, -1]},
                                   {"op": "sum", "args": [2], "attributes": {"axes": ["batch"]}})";
    const std::string graph = fmt::format(
        R"({{"ingot_graph": 1, "name": "g", "values": [{}], "results": [{}]}})", values, results);
    const auto program = abi::make_program(graph, R"({"device": "cuda", "sm": 90})");
    const Plan& plan = program->plan;
    for (const Sweep& sweep : plan.sweeps) {
      if (sweep.kind == SweepKind::product) return packs_samples_alone(plan, sweep);
    }
    return false;
  };
  const std::string product = R"({"value": 3, "name": "y"})";
  const std::string sum = product + R"(, {"value": 4, "name": "s"})";
  EXPECT_FALSE(packs(1024, product));
  EXPECT_TRUE(packs(64, product));
  EXPECT_TRUE(packs(1024, sum));
}

}  // namespace
}  // namespace ingot
