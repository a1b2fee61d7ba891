#include "plan/plan.h"

#include <algorithm>

#include "support/align.h"
#include "support/checked.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr std::string_view kSweepNames[] = {"product", "columns", "rows", "map", "scan"};
constexpr std::string_view kPrecisionNames[] = {"fp32", "ieee", "high", "tf32", "bf16", "fp16"};

constexpr Axis kStaticAxes[] = {kFeatures, kGroups, kRows};  // innermost first

}  // namespace

std::string_view name_of(SweepKind kind) {
  return kSweepNames[static_cast<size_t>(kind)];
}
std::string_view name_of(Precision precision) {
  return kPrecisionNames[static_cast<size_t>(precision)];
}

Precision precision_from(std::string_view name) {
  const auto found = std::find(std::begin(kPrecisionNames), std::end(kPrecisionNames), name);
  if (found == std::end(kPrecisionNames)) {
    fail(INGOT_INVALID_ARGUMENT, "there is no precision '{}'; known are {}", name,
         fmt::join(kPrecisionNames, ", "));
  }
  return static_cast<Precision>(found - std::begin(kPrecisionNames));
}

Precision least_accurate(Precision a, Precision b) {
  constexpr Precision kFromTheBest[] = {Precision::ieee, Precision::fp32, Precision::high,
                                        Precision::tf32, Precision::fp16, Precision::bf16};
  const auto rank = [&](Precision p) {
    return std::find(std::begin(kFromTheBest), std::end(kFromTheBest), p);
  };
  return rank(a) < rank(b) ? b : a;
}

ValueId behind_views(const Graph& graph, ValueId value) {
  while (graph[value].kind == NodeKind::view) value = graph[value].args[0];
  return value;
}

DType dtype_in_memory(const Plan& plan, ValueId value) {
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  if (placement.kind != Placement::Kind::workspace) return plan.graph[value].dtype;
  return plan.buffers[static_cast<size_t>(placement.index)].dtype;
}

ValueId product_operand(const Graph& graph, const Sweep& sweep, int index) {
  ValueId value = graph[sweep.matmul].args[static_cast<size_t>(index)];
  const auto loaded = [&](ValueId id) {
    return std::find(sweep.loads.begin(), sweep.loads.end(), id) != sweep.loads.end();
  };
  while (!loaded(value) && graph[value].kind == NodeKind::view) value = graph[value].args[0];
  return value;
}

bool packs_samples_alone(const Plan& plan, const Sweep& product) {
  const ValueId samples = product_operand(plan.graph, product, 0);
  const int64_t row = plan.graph[plan.graph[product.matmul].args[0]].shape.features;
  const auto may_pack = [&](const Sweep& sweep) {
    const bool has_rows = sweep.kind == SweepKind::map || sweep.kind == SweepKind::rows;
    return has_rows && &sweep + 1 == &product && row >= kLeastPackedRow;
  };
  return std::none_of(plan.sweeps.begin(), plan.sweeps.end(), [&](const Sweep& other) {
    const bool multiplies = other.matmul != kNoValue;
    if (&other == &product) return false;
    if (multiplies) return product_operand(plan.graph, other, 0) == samples;
    return may_pack(other) && contains(other.stores, samples);
  });
}

size_t lone_readers(const Plan& plan, size_t sweep) {
  const size_t first = sweep + 1;
  if (first >= plan.sweeps.size() || plan.sweeps[first].kind != SweepKind::product) return 0;
  const ValueId samples = product_operand(plan.graph, plan.sweeps[first], 0);
  const Placement& place = plan.placements[static_cast<size_t>(samples)];
  if (place.kind != Placement::Kind::workspace) return 0;
  if (!contains(plan.sweeps[sweep].stores, samples)) return 0;
  const auto has_samples = [&](const std::vector<ValueId>& values) {
    return std::any_of(values.begin(), values.end(), [&](ValueId value) {
      return behind_views(plan.graph, value) == behind_views(plan.graph, samples);
    });
  };
  const auto read = [&](const std::vector<ValueId>& nodes) {
    return std::any_of(nodes.begin(), nodes.end(),
                       [&](ValueId node) { return has_samples(plan.graph[node].args); });
  };
  const auto reads_rows_alone = [&](const Sweep& s) {
    return s.kind == SweepKind::product && product_operand(plan.graph, s, 0) == samples &&
           product_operand(plan.graph, s, 1) != samples &&
           !plan.graph[plan.graph[s.matmul].args[1]].shape.batched && !read(s.body) &&
           !read(s.statistics) && !read(s.tail) && !has_samples(s.stores);
  };
  size_t end = first;
  while (end < plan.sweeps.size() && reads_rows_alone(plan.sweeps[end])) ++end;
  const bool others =
      std::any_of(plan.sweeps.begin() + static_cast<std::ptrdiff_t>(end), plan.sweeps.end(),
                  [&](const Sweep& later) { return has_samples(later.loads); });
  return others ? 0 : end - first;
}

AxisMask reduced_axes(const Graph& graph, const Sweep& sweep, ValueId reduce) {
  const Shape& from = sweep.shapes.at(graph[reduce].args[0]);
  const Shape& to = sweep.shapes.at(reduce);
  AxisMask axes = 0;
  for (int axis = 0; axis < kAxes; ++axis) {
    // Any batch above 1 tells a batched extent from a single one.
    if (from.extent(static_cast<Axis>(axis), 2) != to.extent(static_cast<Axis>(axis), 2)) {
      axes = static_cast<AxisMask>(axes | axis_bit(static_cast<Axis>(axis)));
    }
  }
  return axes;
}

std::vector<SharedState> shared_states(const Graph& graph, const Sweep& sweep,
                                       std::span<const ValueId> reductions) {
  std::vector<SharedState> states;
  for (const ValueId id : reductions) {
    const Node& node = graph[id];
    if (node.kind != NodeKind::reduce) continue;
    const MonoidKind monoid = monoid_of(node.finish);
    const AxisMask axes = reduced_axes(graph, sweep, id);
    const auto same = std::find_if(states.begin(), states.end(), [&](const SharedState& state) {
      return state.monoid == monoid && state.arg == node.args[0] && state.axes == axes;
    });
    if (same != states.end()) {
      same->finishes.push_back(id);
    } else {
      states.push_back({monoid, node.args[0], axes, {id}});
    }
  }
  return states;
}

std::vector<SharedState> statistics_states(const Plan& plan, const Sweep& sweep) {
  std::vector<SharedState> states = shared_states(plan.graph, sweep, sweep.statistics);
  if (plan.target.device != Target::Device::cuda || sweep.kind != SweepKind::columns) return states;
  const auto is_mean = [&](ValueId id) { return plan.graph[id].finish == Finish::mean; };
  for (SharedState& sum : states) {
    if (sum.monoid != MonoidKind::sum) continue;
    const auto mean = std::find_if(states.begin(), states.end(), [&](const SharedState& other) {
      return other.monoid == MonoidKind::moments && other.arg == sum.arg &&
             other.axes == sum.axes &&
             std::all_of(other.finishes.begin(), other.finishes.end(), is_mean);
    });
    if (mean == states.end()) continue;
    sum.monoid = MonoidKind::average;
    sum.finishes.insert(sum.finishes.end(), mean->finishes.begin(), mean->finishes.end());
    mean->finishes.clear();
  }
  std::erase_if(states, [](const SharedState& state) { return state.finishes.empty(); });
  return states;
}

std::array<int64_t, kAxes> dense_strides(const Shape& seen) {
  const int64_t full[] = {seen.static_elements(), seen.groups * seen.features, seen.features, 1};
  std::array<int64_t, kAxes> strides{};
  for (int axis = 0; axis < kAxes; ++axis) {
    strides[static_cast<size_t>(axis)] =
        seen.extent(static_cast<Axis>(axis), 2) == 1 ? 0 : full[axis];
  }
  return strides;
}

std::array<int64_t, kAxes> strides_in(const Shape& own, const std::array<int64_t, kAxes>& strides,
                                      const Shape& seen) {
  std::array<int64_t, kAxes> result{};
  if (seen.batched) result[kBatch] = strides[kBatch];
  size_t from = 0;      // walks own's axes, innermost first
  int64_t covered = 1;  // elements of own's current axis that seen's axes account for
  for (const Axis axis : kStaticAxes) {
    const int64_t extent = seen.extent(axis, 1);
    if (extent == 1) continue;
    while (from < 3 && covered == own.extent(kStaticAxes[from], 1)) {
      ++from;
      covered = 1;
    }
    if (from == 3 || own.extent(kStaticAxes[from], 1) % (covered * extent) != 0) {
      throw std::logic_error("strides_in: " + to_string(seen) + " does not split " +
                             to_string(own));
    }
    result[axis] = strides[kStaticAxes[from]] * covered;
    covered *= extent;
  }
  return result;
}

std::vector<size_t> Plan::workspace_layout(int64_t batch, size_t* total,
                                           const std::vector<bool>& left_out) const {
  const auto bytes_of = [&](const WorkspaceBuffer& buffer) {
    const size_t bytes =
        checked_product(static_cast<size_t>(buffer.shape.elements(batch)), size_of(buffer.dtype));
    return align_up(bytes, kWorkspaceAlignment);
  };
  // Largest first, each at the lowest offset where no buffer alive at the same time lies.
  std::vector<size_t> order, offsets(buffers.size(), kNowhere);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (left_out.empty() || !left_out[i]) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes_of(buffers[a]) > bytes_of(buffers[b]); });
  size_t end = 0;
  std::vector<size_t> placed;  // by offset
  for (const size_t i : order) {
    size_t offset = 0;
    for (const size_t other : placed) {
      if (buffers[other].last_sweep < buffers[i].first_sweep ||
          buffers[i].last_sweep < buffers[other].first_sweep) {
        continue;
      }
      if (offset + bytes_of(buffers[i]) <= offsets[other]) break;
      offset = std::max(offset, offsets[other] + bytes_of(buffers[other]));
    }
    offsets[i] = offset;
    end = std::max(end, checked_sum(offset, bytes_of(buffers[i])));
    const auto place = std::upper_bound(placed.begin(), placed.end(), i, [&](size_t a, size_t b) {
      return offsets[a] < offsets[b];
    });
    placed.insert(place, i);
  }
  if (total != nullptr) *total = end;
  return offsets;
}

}  // namespace ingot
