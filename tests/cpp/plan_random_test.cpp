// Random graphs: what a plan does, sweep by sweep, is what the graph means.
#include <gtest/gtest.h>

#include <cstdlib>

#include "graph/evaluate.h"
#include "graph_testing.h"
#include "plan/plan.h"
#include "plan_interpreter.h"

namespace ingot {
namespace {

Target target_with(bool epilogue, bool statistics, bool slow_memory,
                   Target::Device device = Target::Device::cpu) {
  Target target;
  target.device = device;
  target.name = "test";
  target.fused_epilogue = epilogue;
  target.fused_statistics = statistics;
  // Cheap or dear memory tips the choice between storing and computing again.
  target.bandwidth = slow_memory ? 1e6 : 1e15;
  return target;
}

// More can be asked for: INGOT_RANDOM_SEEDS=100000.
uint64_t seeds() {
  const char* wanted = std::getenv("INGOT_RANDOM_SEEDS");
  return wanted == nullptr ? 1500 : std::strtoull(wanted, nullptr, 10);
}

void check_seed(uint64_t seed) {
  const Graph graph = testing::random_graph(seed);
  const Target targets[] = {target_with(false, false, true),
                            target_with(true, false, false),
                            target_with(true, true, true),
                            target_with(true, true, false),
                            target_with(true, true, true, Target::Device::cuda),
                            target_with(true, true, false, Target::Device::cuda)};
  for (const Target& target : targets) {
    Plan plan;
    try {
      plan = make_plan(graph, target, Precision::fp32);
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << ": " << error.what() << "\n" << to_string(graph);
    }
    for (const int64_t batch : {3, 1}) {
      testing::Bindings expected(graph, batch, seed, seed % 2 == 0);
      testing::Bindings actual(graph, batch, seed, seed % 2 == 0);
      evaluate(graph, batch, expected.tensors());
      testing::interpret(plan, batch, actual.tensors());
      ASSERT_TRUE(testing::agree(expected, actual))
          << "seed " << seed << ", batch " << batch << "\n"
          << to_string(graph) << to_string(plan.graph) << to_string(plan);
    }
  }
}

TEST(PlanOfRandomGraphs, ComputesWhatTheGraphMeans) {
  for (uint64_t seed = 0; seed < seeds(); ++seed) {
    check_seed(seed);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace ingot
