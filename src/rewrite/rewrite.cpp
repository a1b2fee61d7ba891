#include "rewrite/rewrite.h"

#include "rewrite/edit.h"
#include "support/error.h"

namespace ingot {
namespace {

// Each rule leaves less to do; this only guards against two that undo one another.
constexpr int kMostRounds = 32;

}  // namespace

Graph rewrite(Graph graph, RewriteLevel level, std::vector<AppliedRewrite>* applied) {
  for (int round = 0; round < kMostRounds; ++round) {
    int changes = 0;
    for (const Rule& rule : rules()) {
      if (rule.level == RewriteLevel::real && level != RewriteLevel::real) continue;
      std::vector<std::string> where;
      const int found = rewrite_nodes(graph, where, rule.begin());
      changes += found;
      if (found != 0) graph = without_dead_values(graph);
      if (applied == nullptr) continue;
      for (std::string& place : where) {
        applied->push_back({std::string(rule.name), std::string(rule.identity), std::move(place)});
      }
    }
    if (changes == 0) break;
  }
  graph = without_dead_values(graph);
  graph.validate();
  return graph;
}

}  // namespace ingot
