#include "api/signature.h"

#include <xxhash.h>

#include <algorithm>
#include <set>

#include "graph/importer.h"
#include "support/error.h"

namespace ingot::abi {
namespace {

using nlohmann::json;

constexpr std::string_view kRoles[] = {"input", "parameter", "buffer"};

json shape_of(const Shape& shape) {
  return {shape.batched ? json("B") : json(1), shape.rows, shape.groups, shape.features};
}

// Placements of products' weights, and of products that are results, by kind and position.
std::set<std::pair<Placement::Kind, int>> matrices_of(const Program& program) {
  std::set<std::pair<Placement::Kind, int>> found;
  const Plan& plan = program.plan;
  if (!program.executable->wants_matrices()) return found;
  const auto add = [&](ValueId value) {
    const Placement& placement = plan.placements[static_cast<size_t>(value)];
    found.emplace(placement.kind, placement.index);
  };
  for (const Sweep& sweep : plan.sweeps) {
    if (sweep.matmul == kNoValue) continue;
    add(product_operand(plan.graph, sweep, 1));
    add(sweep.matmul);
  }
  return found;
}

json describe_tensor(const Node& node, const std::string& name, bool matrix) {
  return {{"name", name},
          {"dtype", name_of(node.dtype)},
          {"shape", shape_of(node.shape)},
          {"layout", matrix ? "matrix" : "any"}};
}

json describe_leaves(const Program& program) {
  const auto matrices = matrices_of(program);
  json list = json::array();
  for (const ValueId id : program.leaves) {
    const Node& node = program.original[id];
    const auto index = static_cast<int>(list.size());
    list.push_back(
        describe_tensor(node, node.name, matrices.contains({Placement::Kind::leaf, index})));
    list.back()["role"] = kRoles[static_cast<size_t>(node.role)];
  }
  return list;
}

json describe_results(const Program& program) {
  const auto matrices = matrices_of(program);
  json list = json::array();
  for (const Result& result : program.original.results) {
    const auto index = static_cast<int>(list.size());
    list.push_back(describe_tensor(program.original[result.value], result.name,
                                   matrices.contains({Placement::Kind::result, index})));
  }
  return list;
}

json describe_updates(const Program& program) {
  json list = json::array();
  for (const Update& update : program.original.updates) {
    const auto at = std::lower_bound(program.leaves.begin(), program.leaves.end(), update.buffer);
    list.push_back(at - program.leaves.begin());
  }
  return list;
}

// For a batch size, in the expressions that the format describes.
std::string bytes_text(const WorkspaceBuffer& buffer) {
  const size_t bytes = static_cast<size_t>(buffer.shape.static_elements()) * size_of(buffer.dtype);
  return fmt::format("{}{}", buffer.shape.batched ? "B * " : "", bytes);
}

json describe_workspace(const Plan& plan) {
  json buffers = json::array();
  for (const WorkspaceBuffer& buffer : plan.buffers) {
    buffers.push_back({{"bytes", bytes_text(buffer)},
                       {"first_step", buffer.first_sweep},
                       {"last_step", buffer.last_sweep}});
  }
  return {{"alignment", 256}, {"buffers", buffers}};
}

json describe_frozen(const Program& program) {
  const Plan& plan = program.plan;
  const std::vector<size_t>& bytes = program.executable->frozen_bytes();
  json weights = json::array();
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0) continue;
    const Node& product = plan.graph[plan.sweeps[i].matmul];
    const ValueId leaf = behind_views(plan.graph, product.args[1]);
    weights.push_back(
        {{"leaf", plan.placements[static_cast<size_t>(leaf)].index}, {"bytes", bytes[i]}});
  }
  return {{"bytes", program.executable->frozen_size()}, {"weights", weights}};
}

json describe_structure(const Sweep& sweep) {
  json shapes = json::array();
  for (const auto& [value, shape] : sweep.shapes) shapes.push_back({value, shape_of(shape)});
  return {name_of(sweep.kind), sweep.name,       shape_of(sweep.space), sweep.loads,
          sweep.matmul,        sweep.body,       sweep.statistics,      sweep.tail,
          sweep.stores,        std::move(shapes)};
}

// Of what is computed, in which sweeps: whatever predictions, and whatever it was planned for.
std::string hash_of(const Program& program) {
  json structure = {export_graph(program.plan.graph), name_of(program.executable->precision())};
  for (const Sweep& sweep : program.plan.sweeps) structure.push_back(describe_structure(sweep));
  const std::string text = structure.dump(-1, ' ', false, json::error_handler_t::replace);
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

}  // namespace

json signature(const Program& program) {
  return {{"ingot_signature", 1},
          {"name", program.original.name},
          {"device", program.options.device == Target::Device::cuda ? "cuda" : "cpu"},
          {"precision", name_of(program.executable->precision())},
          {"leaves", describe_leaves(program)},
          {"results", describe_results(program)},
          {"updates", describe_updates(program)},
          {"workspace", describe_workspace(program.plan)},
          {"frozen", describe_frozen(program)},
          {"hash", hash_of(program)}};
}

}  // namespace ingot::abi
