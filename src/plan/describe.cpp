#include "plan/describe.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include "plan/cost.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr size_t kLongestName = 6;  // parts

// Whether a node belongs to a softmax's definition: its two reductions, x − max, exp, the quotient.
bool in_softmax(const Graph& graph, const Node& node) {
  const auto reduces = [&](ValueId id, Finish finish) {
    return graph[id].kind == NodeKind::reduce && graph[id].finish == finish;
  };
  if (node.kind == NodeKind::reduce) {
    return node.finish == Finish::max_exponent || node.finish == Finish::sum_exp;
  }
  if (node.kind != NodeKind::pointwise) return false;
  if (node.op == PointwiseOp::sub_) return reduces(node.args[1], Finish::max_exponent);
  if (node.op == PointwiseOp::div_) return reduces(node.args[1], Finish::sum_exp);
  return node.op == PointwiseOp::exp_ && in_softmax(graph, graph[node.args[0]]);
}

std::string part_of(const Graph& graph, const Node& node) {
  std::string text = node.name;
  if (const size_t dot = text.rfind('.'); dot != std::string::npos) text = text.substr(dot + 1);
  if (text.empty() && in_softmax(graph, node)) return "softmax";
  if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0]))) {
    switch (node.kind) {
      case NodeKind::matmul:
        text = "linear";
        break;
      case NodeKind::pointwise:
        text = name_of(node.op);
        break;
      case NodeKind::reduce:
        text = name_of(node.finish);
        break;
      case NodeKind::scan:
        text = "cumsum";
        break;
      default:
        return "";
    }
  }
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

std::string name_sweep(const Graph& graph, const Sweep& sweep) {
  std::vector<std::string> parts;
  const auto add = [&](ValueId id) {
    const std::string part = part_of(graph, graph[id]);
    if (!part.empty() && std::find(parts.begin(), parts.end(), part) == parts.end()) {
      parts.push_back(part);
    }
  };
  if (sweep.matmul != kNoValue) add(sweep.matmul);
  for (const ValueId id : sweep.body) add(id);
  if (parts.empty()) {
    for (const ValueId id : sweep.statistics) add(id);
  }
  if (parts.size() > kLongestName) parts.resize(kLongestName);
  if (!sweep.statistics.empty()) parts.emplace_back("statistics");
  if (parts.empty()) parts.emplace_back("copy");
  return fmt::format("{}", fmt::join(parts, "_"));
}

std::string value_text(const Graph& graph, ValueId id) {
  const Node& node = graph[id];
  const std::string part = node.kind == NodeKind::leaf ? node.name : part_of(graph, node);
  return part.empty() ? fmt::format("%{}", id) : fmt::format("%{} ({})", id, part);
}

std::string list_text(const Graph& graph, const std::vector<ValueId>& ids) {
  std::vector<std::string> texts;
  for (const ValueId id : ids) texts.push_back(value_text(graph, id));
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string axes_text(AxisMask axes) {
  std::vector<std::string_view> names;
  for (const Axis axis : {kBatch, kRows, kGroups, kFeatures}) {
    if (axes & axis_bit(axis)) names.push_back(name_of(axis));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void explain_kind(const Plan& plan, Sweep& sweep) {
  const Graph& graph = plan.graph;
  switch (sweep.kind) {
    case SweepKind::product:
      if (!sweep.body.empty()) {
        sweep.reasons.push_back(
            fmt::format("{} operators follow on the accumulators, before anything is stored",
                        sweep.body.size()));
      } else if (!plan.target.fuses_epilogue(graph[sweep.matmul].dtype)) {
        sweep.reasons.push_back(
            "this product takes no epilogue: what follows it rides on the next sweep that reads "
            "it");
      }
      break;
    case SweepKind::columns:
      break;
    case SweepKind::rows: {
      AxisMask axes = 0;
      for (const ValueId id : sweep.body) {
        if (graph[id].kind == NodeKind::reduce) {
          axes = static_cast<AxisMask>(axes | reduced_axes(graph, sweep, id));
        }
      }
      sweep.reasons.push_back(fmt::format(
          "reductions over {} resolve inside: one team owns all the elements", axes_text(axes)));
      break;
    }
    case SweepKind::map:
      break;
    case SweepKind::scan:
      sweep.reasons.push_back("each element waits for those before it: one team owns their row");
      break;
  }
  if (!sweep.statistics.empty()) {
    sweep.reasons.push_back(
        fmt::format("{} must wait for every row: {} monoid state(s) per kept element{}",
                    list_text(graph, sweep.statistics), statistics_states(plan, sweep).size(),
                    sweep.kind == SweepKind::product ? ", taken from the accumulators" : ""));
  }
  if (!sweep.tail.empty()) {
    sweep.reasons.push_back(
        fmt::format("{} values follow once per column after the merge", sweep.tail.size()));
  }
}

// first: the first sweep whose body has a value.
void explain_stores(Plan& plan, size_t index, const std::map<ValueId, size_t>& first) {
  Sweep& sweep = plan.sweeps[index];
  const Graph& graph = plan.graph;
  std::vector<ValueId> again;
  for (const ValueId id : sweep.body) {
    if (first.at(id) < index && graph[id].kind == NodeKind::pointwise) again.push_back(id);
  }
  if (!again.empty()) {
    sweep.reasons.push_back(fmt::format("{} computed again: cheaper than storing and reading",
                                        list_text(graph, again)));
  }
  std::vector<ValueId> kept;
  for (const ValueId id : sweep.stores) {
    const auto kind = plan.placements[static_cast<size_t>(id)].kind;
    if (kind == Placement::Kind::workspace) kept.push_back(id);
  }
  if (!kept.empty()) {
    sweep.reasons.push_back(fmt::format("{} stored for a later sweep", list_text(graph, kept)));
  }
}

}  // namespace

void describe_sweeps(Plan& plan) {
  std::set<std::string> names;
  std::map<std::string, int> copies;  // by name, of the last sweep that had it
  std::map<ValueId, size_t> first;
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    for (const ValueId id : plan.sweeps[i].body) first.emplace(id, i);
  }
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    Sweep& sweep = plan.sweeps[i];
    const std::string base = name_sweep(plan.graph, sweep);
    sweep.name = base;
    int& copy = copies.try_emplace(base, 1).first->second;
    while (!names.insert(sweep.name).second) sweep.name = fmt::format("{}_{}", base, ++copy);
    explain_kind(plan, sweep);
    explain_stores(plan, i, first);
  }
}

std::string to_string(const Plan& plan) {
  std::string text = fmt::format("plan of {} for {} ({})\n", plan.graph.name,
                                 plan.target.name.empty() ? "an unnamed target" : plan.target.name,
                                 name_of(plan.precision));
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    const Sweep& sweep = plan.sweeps[i];
    const Cost cost = plan.cost(sweep, kPlanningBatch);
    text += fmt::format("sweep {}: {} {} over {}\n", i, name_of(sweep.kind), sweep.name,
                        to_string(sweep.space));
    const auto line = [&](std::string_view what, const std::vector<ValueId>& ids) {
      if (!ids.empty()) text += fmt::format("  {}: {}\n", what, list_text(plan.graph, ids));
    };
    line("loads", sweep.loads);
    if (sweep.matmul != kNoValue) line("product", {sweep.matmul});
    line("body", sweep.body);
    line("statistics", sweep.statistics);
    line("tail", sweep.tail);
    line("stores", sweep.stores);
    text += fmt::format(
        "  at batch {}: {:.3g} MB read, {:.3g} MB written, {:.3g} GFLOP, {:.3g} ms predicted, "
        "{:.3g} ms at the limit\n",
        kPlanningBatch, cost.bytes_read * 1e-6, cost.bytes_written * 1e-6, cost.flops * 1e-9,
        cost.seconds * 1e3, cost.limit_seconds * 1e3);
    for (const std::string& reason : sweep.reasons) text += fmt::format("  because: {}\n", reason);
  }
  return text;
}

}  // namespace ingot
