// Random graphs: what a plan does, sweep by sweep, is what the graph means.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "graph/evaluate.h"
#include "graph_testing.h"
#include "plan/hosting.h"
#include "plan/plan.h"
#include "plan_interpreter.h"
#include "program/program.h"

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

// Where the interpreter has room: it has an element of a result for one of a buffer, whatever the
// dtypes.
std::vector<int> hosts_of(const Plan& plan, int64_t batch, std::span<const ingot_tensor> tensors) {
  std::vector<bool> may_host;
  for (const ingot_tensor& tensor : tensors.subspan(plan.graph.leaves().size())) {
    may_host.push_back(is_dense(tensor));
  }
  std::vector<int> hosts = hosting_results(plan, may_host, {});
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i] < 0) continue;
    const ValueId value = plan.graph.results[static_cast<size_t>(hosts[i])].value;
    const int64_t room = plan.graph[value].shape.elements(batch);
    if (plan.buffers[i].shape.elements(batch) > room) hosts[i] = -1;
  }
  return hosts;
}

// hosted: grows by the buffers that lay in results.
void check_seed(uint64_t seed, size_t& hosted) {
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
      testing::Bindings other(graph, batch, seed, seed % 2 == 0);
      const std::vector<int> hosts = hosts_of(plan, batch, other.tensors());
      const auto there = std::count_if(hosts.begin(), hosts.end(), [](int r) { return r >= 0; });
      if (there == 0) continue;
      hosted += static_cast<size_t>(there);
      testing::interpret(plan, batch, other.tensors(), hosts);
      ASSERT_TRUE(testing::agree(expected, other))
          << "with buffers in results, seed " << seed << ", batch " << batch << "\n"
          << to_string(graph) << to_string(plan.graph) << to_string(plan);
    }
  }
}

TEST(PlanOfRandomGraphs, ComputesWhatTheGraphMeans) {
  size_t hosted = 0;
  for (uint64_t seed = 0; seed < seeds(); ++seed) {
    check_seed(seed, hosted);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(hosted, seeds() / 10);
}

}  // namespace
}  // namespace ingot
