#include "api/program.h"

#include <algorithm>
#include <cstdlib>

#include "api/options.h"
#include "graph/importer.h"
#include "graph/limits.h"
#include "support/error.h"
#include "support/json.h"

namespace ingot::abi {
namespace {

std::vector<SourceOperator> source_operators(const nlohmann::json& graph) {
  std::vector<SourceOperator> operators;
  for (const auto& value : graph.value("values", nlohmann::json::array())) {
    operators.push_back(
        {value.value("op", ""), value.value("origin", ""), value.value("source", "")});
  }
  return operators;
}

void check_extents(const ingot_tensor& tensor, const Shape& shape, int64_t batch,
                   std::string_view what, const std::string& name) {
  bool equal = true;
  for (int axis = 0; axis < kAxes; ++axis) {
    equal = equal && tensor.sizes[axis] == shape.extent(static_cast<Axis>(axis), batch);
  }
  if (equal) return;
  fail(INGOT_INVALID_ARGUMENT, "{} '{}' has sizes [{}], but the graph has {} with batch {}", what,
       name, fmt::join(tensor.sizes, tensor.sizes + kAxes, ", "), to_string(shape), batch);
}

void check_memory(const ingot_tensor& tensor, const Node& node, int device, std::string_view what,
                  const std::string& name) {
  if (tensor.dtype != static_cast<int32_t>(node.dtype)) {
    const bool known = tensor.dtype >= INGOT_F32 && tensor.dtype <= INGOT_BOOL;
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' has dtype {}, but the graph has {}", what, name,
         known ? std::string(name_of(static_cast<DType>(tensor.dtype)))
               : std::to_string(tensor.dtype),
         name_of(node.dtype));
  }
  if (tensor.device != device) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' is on {}, but this call runs on {}", what, name,
         tensor.device < 0 ? "the host" : fmt::format("CUDA device {}", tensor.device),
         device < 0 ? "the host" : fmt::format("CUDA device {}", device));
  }
}

// Each element of what is written must have a place of its own.
void check_written(const ingot_tensor& tensor, std::string_view what, const std::string& name) {
  std::array<int, kAxes> order = {0, 1, 2, 3};
  const auto distance = [&](int axis) { return std::abs(tensor.strides[axis]); };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return distance(a) < distance(b); });
  int64_t reach = 0;  // from the first element to the last, along the axes so far
  for (const int axis : order) {
    if (tensor.sizes[axis] == 0) return;
    if (tensor.sizes[axis] == 1) continue;
    if (distance(axis) <= reach) {
      fail(INGOT_INVALID_ARGUMENT,
           "{} '{}' is written, but its strides [{}] lay elements over one another", what, name,
           fmt::join(tensor.strides, tensor.strides + kAxes, ", "));
    }
    reach += distance(axis) * (tensor.sizes[axis] - 1);
  }
}

void check_tensor(const ingot_tensor& tensor, const Node& node, int64_t batch, int device,
                  std::string_view what, const std::string& name) {
  check_extents(tensor, node.shape, batch, what, name);
  check_memory(tensor, node, device, what, name);
  if (tensor.data == nullptr && node.shape.elements(batch) != 0) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' has no data", what, name);
  }
}

}  // namespace

std::unique_ptr<Program> make_program(std::string_view graph_json, std::string_view options_json) {
  auto program = std::make_unique<Program>();
  program->options = parse_options(options_json);
  const ProgramOptions& options = program->options;
  const nlohmann::json json = parse_json(graph_json, "the text of the graph");
  program->original = graph_from(json);
  program->leaves = program->original.leaves();
  program->operators = source_operators(json);
  const RewriteLevel level = options.real_rewrites ? RewriteLevel::real : RewriteLevel::ieee;
  Graph graph = rewrite(program->original, level, &program->rewrites);
  const bool cuda = options.device == Target::Device::cuda;
  const Target target = cuda ? cuda_target(options) : cpu_target(options);
  program->plan = make_plan(std::move(graph), target, options.precision);
  program->largest_batch =
      std::min(largest_batch(program->original), largest_batch(program->plan.graph));
  program->executable = cuda ? make_cuda_executable(program->plan, options)
                             : make_cpu_executable(program->plan, options);
  return program;
}

void check_batch(const Program& program, int64_t batch) {
  if (batch >= 0 && batch <= program.largest_batch) return;
  ingot::check_batch(program.original, batch);
  ingot::check_batch(program.plan.graph, batch);
}

void check_tensors(const Program& program, int64_t batch, std::span<const ingot_tensor> tensors) {
  const Graph& graph = program.original;
  const size_t results = graph.results.size();
  const std::vector<ValueId>& leaves = program.leaves;
  check_batch(program, batch);
  if (tensors.size() != leaves.size() + results) {
    fail(INGOT_INVALID_ARGUMENT, "graph '{}' takes {} leaves and {} results, got {} tensors",
         graph.name, leaves.size(), results, tensors.size());
  }
  const bool cuda = program.options.device == Target::Device::cuda;
  if (cuda && !tensors.empty() && tensors[0].device < 0) {
    fail(INGOT_INVALID_ARGUMENT,
         "this program was made for CUDA, but its first tensor is on the host; make it with "
         "\"device\": \"cpu\" or move the tensors");
  }
  const int device = cuda ? tensors[0].device : -1;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Node& leaf = graph[leaves[i]];
    check_tensor(tensors[i], leaf, batch, device, "leaf", leaf.name);
  }
  for (size_t i = 0; i < results; ++i) {
    const Result& result = graph.results[i];
    const ingot_tensor& tensor = tensors[leaves.size() + i];
    check_tensor(tensor, graph[result.value], batch, device, "result", result.name);
    check_written(tensor, "result", result.name);
  }
  for (const Update& update : graph.updates) {
    const auto at = std::lower_bound(leaves.begin(), leaves.end(), update.buffer);
    check_written(tensors[static_cast<size_t>(at - leaves.begin())], "buffer",
                  graph[update.buffer].name);
  }
}

}  // namespace ingot::abi
