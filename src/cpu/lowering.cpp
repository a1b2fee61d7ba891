#include "cpu/lowering.h"

#include <fmt/format.h>

#include <algorithm>

#include "cpu/program_lowering.h"
#include "support/align.h"
#include "support/checked.h"
#include "support/threads.h"

namespace ingot::cpu {

ProgramLowering::ProgramLowering(const HostPlan& host, int64_t batch,
                                 std::span<const ingot_tensor> tensors,
                                 std::span<const size_t> frozen)
    : host_(host),
      plan_(host.plan),
      graph_(host.plan.graph),
      batch_(batch),
      frozen_(frozen),
      offsets_(plan_.workspace_layout(batch, &used_)),
      places_{plan_, batch, tensors, host.leaf_count, offsets_} {
  program_.workspace_bytes = used_ = align_up(used_, kWorkspaceAlignment);
  program_.level = host.isa.level;
  for (const Update& update : graph_.updates) {
    const auto elements = static_cast<size_t>(graph_[update.value].shape.elements(batch));
    updates_.push_back(
        take(graph_[update.buffer].name + " to come", checked_product(elements, sizeof(double))));
  }
  scratch_ = used_;
}

HostProgram ProgramLowering::run() {
  for (const Turn& turn : host_.turns) {
    used_ = scratch_;
    for (const int sweep : {turn.sweep, turn.next}) {
      add_plan_buffers(places_, sweep, program_.steps.size(), program_.buffers);
    }
    const bool is_product = sweep_at(turn.sweep).sweep.matmul != kNoValue;
    const bool with_next = is_product && lower_product(turn);
    const int last = is_product ? turn.next : turn.sweep;
    if (last < 0) continue;
    if (!with_next) lower_body(last);
    finish(last);
  }
  copy_remaining();
  return std::move(program_);
}

void ProgramLowering::name(std::string what, const Address& address, size_t bytes) {
  if (bytes == 0 || what.empty()) return;
  program_.buffers.push_back({std::move(what), address, bytes, program_.steps.size()});
}

Address ProgramLowering::take(std::string what, size_t bytes) {
  const Address address = {Address::Base::workspace, 0, used_};
  name(std::move(what), address, bytes);
  used_ = checked_sum(used_, align_up(bytes, kWorkspaceAlignment));
  program_.workspace_bytes = std::max(program_.workspace_bytes, used_);
  return address;
}

BoundMemory ProgramLowering::bind(ValueId value, const Shape& seen) const {
  const Placement& placement = plan_.placements[static_cast<size_t>(value)];
  const auto index = static_cast<size_t>(placement.index);
  if (placement.kind == Placement::Kind::update) {
    return {updates_[index], dense_strides(seen), graph_[value].dtype};
  }
  const BoundTensor bound = places_.bind(value, seen);
  if (placement.kind != Placement::Kind::workspace) return in_tensor(bound);
  return {bound.address, bound.strides, plan_.buffers[index].dtype};
}

BoundMemory ProgramLowering::in_tensor(const BoundTensor& bound) const {
  const ingot_tensor& tensor = places_.tensors[static_cast<size_t>(bound.address.tensor)];
  return {bound.address, bound.strides, static_cast<DType>(tensor.dtype)};
}

BoundMemory ProgramLowering::bind_load(const Sweep& sweep, ValueId value) const {
  const Shape& seen = sweep.shapes.at(value);
  const auto statistic = statistics_.find(value);
  if (statistic == statistics_.end()) return bind(value, seen);
  return {statistic->second, dense_strides(seen), DType::f64};
}

bool ProgramLowering::is_aligned(const BoundMemory& memory) const {
  return places_.low_bits(memory.address) % size_of(memory.dtype) == 0;
}

Tiling ProgramLowering::tiling(const HostSweep& host) const {
  return make_tiling(host.sweep.space, batch_, host.body.whole_axes, host.gathers(),
                     thread_count());
}

PhaseStep ProgramLowering::phase_step(const HostSweep& host, const Phase& phase,
                                      const Tiling& tiles) const {
  PhaseStep step;
  step.phase = &phase;
  step.tail = &phase == &host.tail;
  step.tiles = tiles;
  for (const ValueId value : phase.loads) step.loads.push_back(bind_load(host.sweep, value));
  for (const Phase::Store& store : phase.stores) {
    step.stores.push_back(bind(store.value, host.sweep.shapes.at(store.value)));
  }
  return step;
}

PhaseStep ProgramLowering::body_step(const HostSweep& host, const Tiling& tiles) {
  statistics_.clear();
  PhaseStep step = phase_step(host, host.body, tiles);
  if (!host.gathers()) return step;
  step.kept = extents_of(host.kept, batch_);
  const auto kept = static_cast<size_t>(product_of(step.kept));
  const size_t bytes = checked_product(kept, sizeof(double));
  Address statistic = take({}, checked_product(bytes, host.sweep.statistics.size()));
  for (const ValueId value : host.sweep.statistics) {
    statistics_.emplace(value, statistic);
    name(called(graph_, value), statistic, bytes);
    statistic = statistic + bytes;
  }
  const size_t states = checked_product(kept, 2 * sizeof(double) * host.body.statistics.size());
  states_ = take("states", states);
  const auto chunks = static_cast<size_t>(std::max<int64_t>(1, tiles.chunks));
  step.partials = partials_ = take("partial states", checked_product(states, chunks));
  gathered_ = tiles;
  return step;
}

void ProgramLowering::lower_body(int sweep) {
  sweep_ = sweep;
  const HostSweep& host = sweep_at(sweep);
  if (!host.has_body) return statistics_.clear();
  PhaseStep step = body_step(host, tiling(host));
  if (step.tiles.elements() != 0) add(std::move(step));
}

void ProgramLowering::finish(int sweep) {
  sweep_ = sweep;
  const HostSweep& host = sweep_at(sweep);
  if (host.gathers()) {
    MergeStep step;
    step.phase = &host.body;
    step.tiles = gathered_;
    step.kept = product_of(extents_of(host.kept, batch_));
    step.partials = partials_;
    step.states = states_;
    for (const StateStep& statistic : host.body.statistics) {
      for (const StateStep::Read& read : statistic.reads) {
        step.finished.push_back(statistics_.at(read.value));
      }
    }
    add(std::move(step));
  }
  if (!host.has_tail) return;
  const Tiling tiles = make_tiling(host.kept, batch_, host.tail.whole_axes, false, thread_count());
  if (tiles.elements() != 0) add(phase_step(host, host.tail, tiles));
}

void ProgramLowering::copy_remaining() {
  sweep_ = -1;
  const auto add_copy = [&](ValueId value, const BoundMemory& to, std::string why) {
    const Shape& shape = graph_[value].shape;
    CopyStep step{{}, to, extents_of(shape, batch_), {}};
    if (product_of(step.sizes) == 0) return;
    const bool placed = plan_.placements[static_cast<size_t>(value)].kind != Placement::Kind::none;
    const ValueId real = placed ? value : behind_views(graph_, value);
    if (graph_[real].kind == NodeKind::constant) {
      step.from.dtype = DType::f64;
      step.constant = graph_[real].constant;
    } else {
      step.from = bind(real, shape);
    }
    add(std::move(step), std::move(why));
  };
  for (size_t i = 0; i < graph_.results.size(); ++i) {
    const ValueId value = graph_.results[i].value;
    const Placement& placement = plan_.placements[static_cast<size_t>(value)];
    const int ordinal = static_cast<int>(i);
    if (placement.kind == Placement::Kind::result && placement.index == ordinal) continue;
    const Shape& shape = graph_[value].shape;
    const int tensor = static_cast<int>(host_.leaf_count) + ordinal;
    add_copy(value, in_tensor(places_.bind_tensor(tensor, shape, shape)),
             fmt::format("result '{}'", graph_.results[i].name));
  }
  for (const Update& update : graph_.updates) {
    add_copy(update.value, bind(update.buffer, graph_[update.value].shape),
             fmt::format("update of '{}'", graph_[update.buffer].name));
  }
}

HostPlan::HostPlan(Plan from, const Isa& offered)
    : plan(std::move(from)), isa(offered), leaf_count(plan.graph.leaves().size()) {
  for (const Sweep& sweep : plan.sweeps) sweeps.emplace_back(plan, sweep);
  turns = turns_of(sweeps, &plan);
}

HostProgram lower(const HostPlan& host, int64_t batch, std::span<const ingot_tensor> tensors,
                  std::span<const size_t> frozen) {
  return ProgramLowering(host, batch, tensors, frozen).run();
}

HostProgram lower_packing(const HostPlan& host, int64_t batch,
                          std::span<const ingot_tensor> tensors, std::span<const size_t> frozen) {
  return ProgramLowering(host, batch, tensors, frozen).packing();
}

}  // namespace ingot::cpu
