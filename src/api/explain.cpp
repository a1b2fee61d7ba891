#include "api/explain.h"

#include <algorithm>
#include <set>

#include "api/optimisations.h"
#include "api/options.h"
#include "graph/importer.h"
#include "plan/cost.h"
#include "support/error.h"

namespace ingot::abi {
namespace {

using nlohmann::json;

constexpr std::string_view kPlacementNames[] = {"none", "leaf", "result", "update", "workspace"};

json describe_graph(const Graph& graph) {
  return {{"json", export_graph(graph)}, {"text", to_string(graph)}};
}

json describe_value(const Plan& plan, ValueId id, int64_t batch) {
  const Node& node = plan.graph[id];
  const Placement& placement = plan.placements[static_cast<size_t>(id)];
  json value = {{"value", id},
                {"name", node.name},
                {"dtype", name_of(node.dtype)},
                {"shape", to_string(node.shape)},
                {"bytes", bytes_of(plan.graph, id, batch)},
                {"in", kPlacementNames[static_cast<size_t>(placement.kind)]}};
  if (placement.index >= 0) value["index"] = placement.index;
  return value;
}

std::string_view operator_name(const Node& node) {
  switch (node.kind) {
    case NodeKind::pointwise:
      return name_of(node.op);
    case NodeKind::reduce:
      return name_of(node.finish);
    case NodeKind::matmul:
      return "matmul";
    case NodeKind::view:
      return "view";
    case NodeKind::scan:
      return "scan";
    default:
      return "value";
  }
}

json describe_nodes(const Graph& graph, const std::vector<ValueId>& ids) {
  json list = json::array();
  for (const ValueId id : ids) {
    const Node& node = graph[id];
    list.push_back({{"value", id},
                    {"op", operator_name(node)},
                    {"args", node.args},
                    {"origin", node.name},
                    {"source", node.source}});
  }
  return list;
}

json describe_sweep(const Plan& plan, size_t index, int64_t batch) {
  const Sweep& sweep = plan.sweeps[index];
  const Cost cost = plan.cost(sweep, batch);
  const auto values = [&](const std::vector<ValueId>& ids) {
    json list = json::array();
    for (const ValueId id : ids) list.push_back(describe_value(plan, id, batch));
    return list;
  };
  json result = {{"index", index},
                 {"kind", name_of(sweep.kind)},
                 {"name", sweep.name},
                 {"space", to_string(sweep.space)},
                 {"loads", values(sweep.loads)},
                 {"body", describe_nodes(plan.graph, sweep.body)},
                 {"statistics", describe_nodes(plan.graph, sweep.statistics)},
                 {"tail", describe_nodes(plan.graph, sweep.tail)},
                 {"stores", values(sweep.stores)},
                 {"reasons", sweep.reasons},
                 {"flops", cost.flops},
                 {"bytes_read", cost.bytes_read},
                 {"bytes_written", cost.bytes_written},
                 {"predicted_ms", cost.seconds * 1e3},
                 {"limit_ms", cost.limit_seconds * 1e3}};
  if (sweep.matmul != kNoValue) {
    result["product"] = describe_nodes(plan.graph, {sweep.matmul})[0];
  }
  return result;
}

json describe_target(const Target& target) {
  return {{"name", target.name},
          {"device", target.device == Target::Device::cuda ? "cuda" : "cpu"},
          {"sm", target.sm},
          {"fused_epilogue", target.fused_epilogue},
          {"fused_statistics", target.fused_statistics},
          {"fused_half", target.fused_half},
          {"product_flops", target.product_flops},
          {"bandwidth", target.bandwidth},
          {"launch_seconds", target.launch_seconds},
          {"shared_bytes", target.shared_bytes},
          {"units", target.units}};
}

json describe_rewrites(const Program& program) {
  json list = json::array();
  for (const AppliedRewrite& applied : program.rewrites) {
    list.push_back(
        {{"rule", applied.rule}, {"identity", applied.identity}, {"where", applied.where}});
  }
  return list;
}

// Names of the sweeps that evaluate nodes of one operator of the caller, by origin and source.
std::vector<std::string> sweeps_of(const Plan& plan, const SourceOperator& op) {
  std::vector<std::string> names;
  for (const Sweep& sweep : plan.sweeps) {
    const auto from_op = [&](ValueId id) {
      const Node& node = plan.graph[id];
      return node.name == op.origin && node.source == op.source;
    };
    const auto any = [&](const std::vector<ValueId>& ids) {
      return std::any_of(ids.begin(), ids.end(), from_op);
    };
    if (any(sweep.body) || any(sweep.statistics) || any(sweep.tail) ||
        (sweep.matmul != kNoValue && from_op(sweep.matmul))) {
      names.push_back(sweep.name);
    }
  }
  return names;
}

bool is_leaf(const std::string& op) {
  return op == "input" || op == "parameter" || op == "buffer" || op == "constant" || op == "view";
}

json operators_replaced(const Program& program) {
  json list = json::array();
  for (const SourceOperator& op : program.operators) {
    if (is_leaf(op.op)) continue;
    const std::vector<std::string> sweeps = sweeps_of(program.plan, op);
    if (sweeps.empty()) continue;
    const bool both = !op.origin.empty() && !op.source.empty();
    list.push_back({{"what", op.op},
                    {"where", op.origin + (both ? ", " : "") + op.source},
                    {"by", fmt::format("{}", fmt::join(sweeps, ", "))}});
  }
  return list;
}

}  // namespace

json explain(Program& program, int64_t batch) {
  const Plan& plan = program.plan;
  json sweeps = json::array();
  double predicted = 0, limit = 0;
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    sweeps.push_back(describe_sweep(plan, i, batch));
    predicted += sweeps.back()["predicted_ms"].get<double>();
    limit += sweeps.back()["limit_ms"].get<double>();
  }
  return {{"ingot_explain", 1},
          {"name", program.original.name},
          {"batch", batch},
          {"options", to_json(program.options)},
          {"target", describe_target(plan.target)},
          {"graph",
           {{"before", describe_graph(program.original)}, {"after", describe_graph(plan.graph)}}},
          {"rewrites", describe_rewrites(program)},
          {"sweeps", sweeps},
          {"plan_text", to_string(plan)},
          {"predicted_ms", predicted},
          {"limit_ms", limit},
          {"workspace_bytes", program.executable->workspace_size(batch)},
          {"executable", program.executable->describe(batch)},
          {"operators_replaced", operators_replaced(program)},
          {"optimisations", optimisations(program, batch)}};
}

}  // namespace ingot::abi
