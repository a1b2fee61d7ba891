#include "api/optimisations.h"

#include <algorithm>
#include <map>

#include "plan/cost.h"
#include "support/error.h"

namespace ingot::abi {
namespace {

using nlohmann::json;

class Sentences {
 public:
  Sentences(const Plan& plan, int64_t batch) : plan_(plan), graph_(plan.graph), batch_(batch) {}

  json take() { return std::move(list_); }

  void add(std::string what, std::string reason, std::string where) {
    list_.push_back({{"what", std::move(what)},
                     {"identity_or_reason", std::move(reason)},
                     {"where", std::move(where)}});
  }

  void about(const Sweep& sweep) {
    about_fusion(sweep);
    about_statistics(sweep);
    about_rows(sweep);
    about_tail(sweep);
  }

 private:
  // "bn (model.py:16), scale": where nodes came from, each once.
  std::string where(const std::vector<ValueId>& ids) const {
    std::vector<std::string> places;
    for (const ValueId id : ids) {
      const Node& node = graph_[id];
      std::string place = node.name;
      if (!node.source.empty()) place += place.empty() ? node.source : " (" + node.source + ")";
      if (place.empty() || std::find(places.begin(), places.end(), place) != places.end()) continue;
      places.push_back(place);
    }
    return fmt::format("{}", fmt::join(places, ", "));
  }

  bool full(const Sweep& sweep, ValueId id) const {
    return graph_[id].kind == NodeKind::pointwise && sweep.shapes.at(id) == sweep.space;
  }

  static std::string megabytes(double bytes) { return fmt::format("{:.3g} MB", bytes * 1e-6); }

  // Full-size values that are used where they are made and never reach memory.
  void about_fusion(const Sweep& sweep) {
    std::vector<ValueId> nodes, kept_out;
    if (sweep.matmul != kNoValue) nodes.push_back(sweep.matmul);
    for (const ValueId id : sweep.body) {
      if (full(sweep, id)) nodes.push_back(id);
    }
    double bytes = 0;
    for (const ValueId id : nodes) {
      if (std::find(sweep.stores.begin(), sweep.stores.end(), id) != sweep.stores.end()) continue;
      kept_out.push_back(id);
      bytes += bytes_of(graph_, id, batch_);
    }
    if (nodes.size() < 2 || kept_out.empty()) return;
    const std::string ops = sweep.matmul != kNoValue
                                ? fmt::format("the product and {} operators", nodes.size() - 1)
                                : fmt::format("{} operators", nodes.size());
    add(fmt::format("{} run as one pass, `{}`", ops, sweep.name),
        fmt::format("{} intermediate tensors ({} at batch {}) are never written", kept_out.size(),
                    megabytes(bytes), batch_),
        where(nodes));
  }

  void about_statistics(const Sweep& sweep) {
    if (sweep.statistics.empty()) return;
    const auto states = statistics_states(plan_, sweep);
    const bool moments = std::any_of(states.begin(), states.end(), [](const SharedState& state) {
      return state.monoid == MonoidKind::moments;
    });
    const bool fused = sweep.matmul != kNoValue;
    add(fmt::format("{} statistics over the batch from {} state(s) a column, {}",
                    sweep.statistics.size(), states.size(),
                    fused ? "taken from the product's accumulators" : "in one pass"),
        moments ? "count, mean and M2 merge exactly (Chan et al.); E[x²] − E[x]² is never formed, "
                  "since it cancels where the mean is large"
                : "partial results merge in a fixed order: equal input gives equal bits",
        where(sweep.statistics));
  }

  void about_rows(const Sweep& sweep) {
    if (sweep.kind != SweepKind::rows) return;
    std::vector<ValueId> reductions, exponents;
    for (const ValueId id : sweep.body) {
      if (graph_[id].kind != NodeKind::reduce) continue;
      reductions.push_back(id);
      if (monoid_of(graph_[id].finish) == MonoidKind::log_sum_exp) exponents.push_back(id);
    }
    if (!exponents.empty()) {
      add(fmt::format("online softmax in `{}`: the maximum and Σ exp in one pass", sweep.name),
          "(m, s) merge as (max, s₁·e^(m₁−m) + s₂·e^(m₂−m)) (Milakov and Gimelshein 2018)",
          where(exponents));
    }
    const size_t states = shared_states(graph_, sweep, reductions).size();
    if (states > 1) {
      add(fmt::format("{} row reductions share one pass over memory, `{}`", states, sweep.name),
          "one team owns a row, so nothing is stored between them", where(reductions));
    }
  }

  void about_tail(const Sweep& sweep) {
    if (sweep.tail.empty()) return;
    std::vector<ValueId> updated;
    for (const Update& update : graph_.updates) {
      if (std::find(sweep.stores.begin(), sweep.stores.end(), update.value) != sweep.stores.end()) {
        updated.push_back(update.buffer);
      }
    }
    std::string what =
        fmt::format("{} operators on statistics run once a column", sweep.tail.size());
    if (!updated.empty()) what += fmt::format(", and {} buffers are updated there", updated.size());
    add(std::move(what),
        "per-column factors such as rstd·γ are ready before the next pass, with no launch of "
        "their own",
        where(sweep.tail));
  }

  const Plan& plan_;
  const Graph& graph_;
  int64_t batch_;
  json list_ = json::array();
};

}  // namespace

json optimisations(const Program& program, int64_t batch) {
  Sentences sentences(program.plan, batch);
  std::map<std::string, std::pair<std::string, std::string>> rules;  // identity, places
  for (const AppliedRewrite& applied : program.rewrites) {
    auto& [identity, places] = rules[applied.rule];
    identity = applied.identity;
    if (places.find(applied.where) == std::string::npos) {
      places += (places.empty() ? "" : "; ") + applied.where;
    }
  }
  for (const auto& [rule, found] : rules) {
    sentences.add("rewrite: " + rule, found.first, found.second);
  }
  for (const Sweep& sweep : program.plan.sweeps) sentences.about(sweep);
  return sentences.take();
}

}  // namespace ingot::abi
