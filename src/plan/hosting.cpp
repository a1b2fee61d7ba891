#include "plan/hosting.h"

#include <algorithm>

#include "plan/cost.h"

namespace ingot {
namespace {

size_t bytes_of_sample(const Shape& shape, DType dtype) {
  return static_cast<size_t>(shape.static_elements()) * size_of(dtype);
}

class Hosting {
 public:
  explicit Hosting(const Plan& plan) : plan_(plan), held_(plan.graph.results.size()) {
    for (const Result& result : plan.graph.results) written_by_.push_back(writer(result.value));
  }

  bool hosts(size_t result, size_t buffer) const {
    const WorkspaceBuffer& guest = plan_.buffers[buffer];
    const ValueId value = plan_.graph.results[result].value;
    const Node& node = plan_.graph[value];
    if (guest.shape.batched != node.shape.batched) return false;
    if (bytes_of_sample(guest.shape, guest.dtype) > bytes_of_sample(node.shape, node.dtype)) {
      return false;
    }
    const int written = written_by_[result];
    if (guest.last_sweep > written) return false;
    if (guest.last_sweep == written && !is_read_where_written(guest, value)) return false;
    return std::none_of(held_[result].begin(), held_[result].end(), [&](size_t other) {
      const WorkspaceBuffer& there = plan_.buffers[other];
      return there.first_sweep <= guest.last_sweep && guest.first_sweep <= there.last_sweep;
    });
  }

  void take(size_t result, size_t buffer) { held_[result].push_back(buffer); }

 private:
  // The sweep that writes a value as a result; -1: none, or its place is another's.
  int writer(ValueId value) const {
    const auto is_its = [&](const Result& result) { return result.value == value; };
    const std::vector<Result>& results = plan_.graph.results;
    if (plan_.placements[static_cast<size_t>(value)].kind != Placement::Kind::result) return -1;
    if (std::count_if(results.begin(), results.end(), is_its) > 1) return -1;
    for (size_t i = 0; i < plan_.sweeps.size(); ++i) {
      if (contains(plan_.sweeps[i].stores, value)) return static_cast<int>(i);
    }
    return -1;
  }

  // By the sweep that writes the value: which then does both with each element at once.
  bool is_read_where_written(const WorkspaceBuffer& guest, ValueId value) const {
    const Sweep& sweep = plan_.sweeps[static_cast<size_t>(guest.last_sweep)];
    if (sweep.kind != SweepKind::map || guest.first_sweep == guest.last_sweep) return false;
    if (size_of(guest.dtype) != size_of(plan_.graph[value].dtype)) return false;
    const auto read = sweep.shapes.find(guest.value);
    return read != sweep.shapes.end() && read->second == sweep.space &&
           sweep.shapes.at(value) == sweep.space;
  }

  const Plan& plan_;
  std::vector<std::vector<size_t>> held_;  // by result
  std::vector<int> written_by_;            // results
};

}  // namespace

std::vector<int> hosting_results(const Plan& plan, const std::vector<bool>& may_host,
                                 const std::vector<bool>& left_out) {
  std::vector<int> found(plan.buffers.size(), -1);
  std::vector<size_t> order;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (left_out.empty() || !left_out[i]) order.push_back(i);
  }
  const auto size = [&](size_t i) {
    const WorkspaceBuffer& buffer = plan.buffers[i];
    const auto elements = static_cast<size_t>(buffer.shape.elements(kPlanningBatch));
    return elements * size_of(buffer.dtype);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size(a) > size(b); });
  Hosting hosting(plan);
  for (const size_t buffer : order) {
    for (size_t result = 0; result < may_host.size() && found[buffer] < 0; ++result) {
      if (!may_host[result] || !hosting.hosts(result, buffer)) continue;
      hosting.take(result, buffer);
      found[buffer] = static_cast<int>(result);
    }
  }
  return found;
}

}  // namespace ingot
