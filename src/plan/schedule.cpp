#include "plan/schedule.h"

#include <algorithm>
#include <map>
#include <set>

#include "plan/shapes.h"
#include "support/error.h"

namespace ingot {
namespace {

// Rows that are owned whole by one team must fit near it (shared memory, a core's cache).
constexpr int64_t kLargestOwnedRow = int64_t{1} << 17;
// Where reductions run over unlike parts of a sample, one thread block of a GPU owns it and reads
// it again for each of them: larger ones are better cut into sweeps that all of the GPU shares.
constexpr int64_t kLargestSharedSample = int64_t{1} << 15;
// Different values that one sweep of rows on a GPU reduces: each brings operands and results of its
// own, and a launch takes only so many. (A network's norms, computed again for its gradient, all
// follow from what was stored.)
constexpr size_t kMostReduced = 4;

// Of longer rows weights, one an element, leave the L2 cache of a GPU before the next row's sweep
// reads them: a sweep of its own over all samples (the map's blocks share what these have in
// common) reads them once, and the elements again. (H200, a layer norm of 16 rows of 16 MB: 2.25
// times a copy of its bytes, 1.58 in two sweeps.)
constexpr int64_t kLongestWeightedRow = int64_t{1} << 20;

// Products of 16 bits whose K is shorter gain by an epilogue that reads what another one gave. Of
// longer ones it waits for that longer than one sweep over both takes: a gate and an up projection
// in bf16 on an H100, epilogues' time over two bare products' and a sweep's: 1.15 and 1.08 at
// K = 1024, 1.06 and 1.00 at 4096, 0.98 at 768, 0.96 at 512.
constexpr int64_t kShortHalfProduct = 1024;

AxisMask changed_axes(const Shape& from, const Shape& to) {
  AxisMask axes = 0;
  for (const Axis axis : {kBatch, kRows, kGroups, kFeatures}) {
    if (from.extent(axis, 2) != to.extent(axis, 2)) {
      axes = static_cast<AxisMask>(axes | axis_bit(axis));
    }
  }
  return axes;
}

bool fits(const Shape& shape, const Shape& space) {
  return (!shape.batched || space.batched) && extents_fit(shape, space);
}

// What an earlier scheduling of the graph has taught.
struct Lessons {
  std::map<ValueId, int> delays;  // products that wait longer than their operands make them
  std::set<ValueId> bare;         // products without an epilogue
};

class Scheduler {
 public:
  Scheduler(const Graph& graph, const Target& target, bool cut_views, const Lessons& lessons)
      : graph_(graph), target_(target), cut_views_(cut_views), lessons_(lessons) {
    schedule_.labels.resize(graph.nodes.size());
    schedule_.factorings.resize(graph.nodes.size());
    find_kept();
  }

  // Nothing where views leave values without one factoring in which all can be seen.
  std::optional<Schedule> run(const std::vector<ValueId>& deferred) {
    const auto is_deferred = [&](ValueId id) {
      return std::find(deferred.begin(), deferred.end(), id) != deferred.end();
    };
    int last = 0;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const auto id = static_cast<ValueId>(i);
      if (is_deferred(id)) continue;
      label(id) = label_node(id);
      if (!seen_) return std::nullopt;
      last = std::max(last, label(id).time);
    }
    for (const ValueId id : deferred) {
      label(id) = {last + 1, Via::free, -1};
      factoring(id) = Factoring(graph_[id].shape);
    }
    return std::move(schedule_);
  }

  // A product in whose epilogue more could be computed if it came later than another of the same
  // time; or kNoValue.
  ValueId better_later() const { return better_later_; }
  // Products that had better have no epilogues: one sweep is to do what follows from them.
  const std::vector<ValueId>& better_bare() const { return better_bare_; }

 private:
  Label& label(ValueId id) { return schedule_.labels[static_cast<size_t>(id)]; }
  Factoring& factoring(ValueId id) { return schedule_.factorings[static_cast<size_t>(id)]; }
  Group& group_of(const Label& label) { return schedule_.groups[static_cast<size_t>(label.group)]; }

  Label label_node(ValueId id) {
    const Node& node = graph_[id];
    factoring(id) = Factoring(node.shape);
    switch (node.kind) {
      case NodeKind::leaf:
      case NodeKind::constant:
        return {};
      case NodeKind::matmul:
        return label_matmul(id);
      case NodeKind::pointwise:
        return label_pointwise(id);
      case NodeKind::view:
        return label_view(id);
      case NodeKind::reduce:
        return changed_axes(graph_[node.args[0]].shape, node.shape) & axis_bit(kBatch)
                   ? label_statistic(id)
                   : label_row_reduction(id);
      case NodeKind::scan:
        return label_scan(id);
    }
    return {};
  }

  // Each element waits for those before it: what sums them computes them, and stores the sums.
  Label label_scan(ValueId id) {
    const ValueId arg = graph_[id].args[0];
    seen_ = factoring(arg) == factoring(id);
    const int time = label(arg).via == Via::free ? label(arg).time : loadable(arg);
    const int index = add_group({.kind = SweepKind::scan, .time = time, .space = graph_[id].shape});
    return {time + 1, Via::stored, index};
  }

  // Results, and what products load.
  void find_kept() {
    kept_.assign(graph_.nodes.size(), false);
    for (const auto& result : graph_.results) kept_[static_cast<size_t>(result.value)] = true;
    for (const Node& node : graph_.nodes) {
      if (node.kind != NodeKind::matmul) continue;
      for (const ValueId arg : node.args) {
        kept_[static_cast<size_t>(operand_source(graph_, arg))] = true;
      }
    }
    if (target_.device != Target::Device::cuda) return;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (graph_.nodes[i].kind == NodeKind::matmul) keep_common(static_cast<ValueId>(i));
    }
  }

  // Where what would be kept of a product is not what all else follows from that a later sweep
  // wants, keeps the last value that is: y for tanh(y) and Σ y², of which neither follows from the
  // other.
  void keep_common(ValueId matmul) {
    if (kept_[static_cast<size_t>(matmul)]) return;
    // Whether a value follows from the product's elements, at once or beside what is reduced of
    // them or multiplied on, or from the latter alone.
    enum class Way { none, aside, late, direct };
    const size_t count = graph_.nodes.size();
    std::vector<Way> ways(count, Way::none);
    std::vector<ValueId> before(count, kNoValue);  // the last value on all ways from the product
    ways[static_cast<size_t>(matmul)] = Way::direct;
    ValueId common = kNoValue, first = kNoValue;
    const auto join = [&](ValueId a, ValueId b) {
      while (a != b && a != kNoValue) {
        ValueId& later = a > b ? a : b;
        later = before[static_cast<size_t>(later)];
      }
      return a == kNoValue ? b : a;
    };
    for (size_t i = static_cast<size_t>(matmul) + 1; i < count; ++i) {
      const Node& node = graph_.nodes[i];
      const bool element = node.kind == NodeKind::pointwise || node.kind == NodeKind::view;
      bool reached = false, waits = false;
      for (const ValueId arg : node.args) {
        const Way way = ways[static_cast<size_t>(arg)];
        waits = waits || way == Way::aside || way == Way::late;
        if (way < Way::late) continue;
        reached = true;
        if (element) before[i] = join(before[i], arg);
      }
      if (reached || waits) ways[i] = Way::aside;
      if (reached && element) ways[i] = waits ? Way::late : Way::direct;
      if (ways[i] >= Way::late && kept_[i]) {
        common = join(common, static_cast<ValueId>(i));
        if (first == kNoValue && ways[i] == Way::direct) first = static_cast<ValueId>(i);
      }
      if (node.kind == NodeKind::reduce && reached &&
          !(changed_axes(graph_[node.args[0]].shape, node.shape) & axis_bit(kBatch))) {
        common = join(common, node.args[0]);
      }
    }
    if (first == kNoValue || common == first) return;
    while (graph_[common].dtype != graph_[matmul].dtype) {
      common = before[static_cast<size_t>(common)];
    }
    kept_[static_cast<size_t>(common)] = true;
  }

  // An epilogue on a GPU stores one value of every element: a second one is left to a later sweep,
  // which can follow from the first.
  bool keeps(Group& group, ValueId id) const {
    if (target_.device != Target::Device::cuda || !kept_[static_cast<size_t>(id)]) return true;
    if (group.kept != kNoValue) return false;
    group.kept = id;
    return true;
  }

  int add_group(Group group) {
    group.factoring = Factoring(group.space);
    schedule_.groups.push_back(std::move(group));
    return static_cast<int>(schedule_.groups.size()) - 1;
  }

  // The time from which a sweep can load the value.
  int loadable(ValueId id) {
    if (graph_[id].kind == NodeKind::leaf || graph_[id].kind == NodeKind::constant) return 0;
    const Label& own = label(id);
    return own.via == Via::stored ? own.time : own.time + 1;
  }

  Label label_matmul(ValueId id) {
    const Node& node = graph_[id];
    Group group{.kind = SweepKind::product, .space = node.shape, .matmul = id};
    for (const ValueId arg : node.args) {
      group.time = std::max(group.time, loadable(operand_source(graph_, arg)));
    }
    const auto delay = lessons_.delays.find(id);
    if (delay != lessons_.delays.end()) {
      group.time += delay->second;
      group.reasons.push_back("comes after the product whose result its epilogue reads");
    }
    if (lessons_.bare.contains(id)) {
      group.reasons.push_back(
          "what follows from it and from another product of 16 bits is one sweep: an epilogue "
          "would wait for the other's result");
    }
    keeps(group, id);
    const int index = add_group(group);
    return {group.time, Via::product, index};
  }

  // Latest time among the arguments, and the group that those of that time are bound to, if one.
  struct Meeting {
    int time = 0;
    Via via = Via::free;
    int group = -1;
    bool several = false;
  };
  Meeting meet(const Node& node) {
    Meeting meeting;
    for (const ValueId arg : node.args) meeting.time = std::max(meeting.time, label(arg).time);
    for (const ValueId arg : node.args) {
      const Label& own = label(arg);
      if (own.time < meeting.time || own.via == Via::free || own.via == Via::stored) continue;
      if (meeting.group >= 0 && (meeting.group != own.group || meeting.via != own.via)) {
        meeting.several = true;
      }
      meeting.via = own.via;
      meeting.group = own.group;
    }
    return meeting;
  }

  // Finds the factoring under which the node and all its arguments with as many elements can be
  // seen, where they are evaluated in one sweep; false where there is none.
  bool see_jointly(ValueId id) {
    const Node& node = graph_[id];
    Factoring joint = Factoring(node.shape);
    seen_ = false;
    for (const ValueId arg : node.args) {
      const bool same_size = graph_[arg].shape.static_elements() == node.shape.static_elements();
      if (label(arg).via == Via::stored) continue;
      if (!same_size) {
        // Spread over a larger space, an operand is seen by its own axes alone.
        if (factoring(arg) != Factoring(graph_[arg].shape)) return false;
        continue;
      }
      const auto common = Factoring::common(joint, factoring(arg), node.shape.static_elements());
      if (!common) return false;
      joint = *common;
    }
    factoring(id) = joint;
    return seen_ = true;
  }

  Label label_pointwise(ValueId id) {
    const Node& node = graph_[id];
    if (!see_jointly(id)) return {};
    const Meeting meeting = meet(node);
    const Label next{meeting.time + 1, Via::free, -1};
    if (meeting.several) {
      note_products_that_meet(node, meeting.time);
      return next;
    }
    if (meeting.group < 0) return {meeting.time, Via::free, -1};
    return joins(id, meeting) ? Label{meeting.time, meeting.via, meeting.group} : next;
  }

  // Where a node waits for several products of one time, the last of them could have it in its
  // epilogue and load what the others gave; or one sweep does all that follows from them.
  void note_products_that_meet(const Node& node, int time) {
    if (!target_.fused_epilogue || better_later_ != kNoValue || !better_bare_.empty()) return;
    std::vector<ValueId> products;
    for (const ValueId arg : node.args) {
      const Label& own = label(arg);
      if (own.time < time || own.via == Via::free || own.via == Via::stored) continue;
      if (own.via != Via::product || group_of(own).space != node.shape) return;
      products.push_back(group_of(own).matmul);
    }
    if (products.empty()) return;
    const auto waits = [&](ValueId product) { return waits_for_reads(graph_[product]); };
    if (std::all_of(products.begin(), products.end(), waits) && !has_batch_statistics()) {
      for (const ValueId product : products) {
        if (!lessons_.bare.contains(product)) better_bare_.push_back(product);
      }
      return;
    }
    better_later_ = *std::max_element(products.begin(), products.end());
  }

  // Whether reading a matrix takes the epilogue of a product longer than it takes a sweep.
  bool waits_for_reads(const Node& product) const {
    const bool halves = product.dtype == DType::f16 || product.dtype == DType::bf16;
    return halves && target_.fused_half && !graph_[product.args[1]].shape.batched &&
           graph_[product.args[0]].shape.features >= kShortHalfProduct;
  }

  // Epilogues take them along: without, they are a pass of their own.
  bool has_batch_statistics() const {
    return std::any_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const Node& node) {
      return node.kind == NodeKind::reduce &&
             (changed_axes(graph_[node.args[0]].shape, node.shape) & axis_bit(kBatch));
    });
  }

  Label label_view(ValueId id) {
    const Node& node = graph_[id];
    const Shape& from = graph_[node.args[0]].shape;
    const bool renames = renames_only(from, node.shape);
    if (cut_views_) {
      const int time =
          label(node.args[0]).via == Via::free ? label(node.args[0]).time : loadable(node.args[0]);
      const int index = add_group({.kind = SweepKind::map,
                                   .time = time,
                                   .space = from,
                                   .reasons = {"regroups elements into a dense copy"}});
      return {time + 1, Via::stored, index};
    }
    if (!see_jointly(id)) return {};
    const Meeting meeting = meet(node);
    if (meeting.group < 0) return {meeting.time, Via::free, -1};
    if (meeting.via == Via::tail && !renames) return {meeting.time + 1, Via::free, -1};
    return joins(id, meeting) ? Label{meeting.time, meeting.via, meeting.group}
                              : Label{meeting.time + 1, Via::free, -1};
  }

  // Whether a pointwise node or view can be evaluated in the sweep that its arguments are bound to.
  bool joins(ValueId id, const Meeting& meeting) {
    const Node& node = graph_[id];
    Group& group = schedule_.groups[static_cast<size_t>(meeting.group)];
    const int64_t total = group.space.static_elements();
    // One per column or per row of a larger space, a value is seen by its own axes alone.
    const bool whole = factoring(id) == Factoring(node.shape);
    if (meeting.via == Via::tail) {
      const Shape& kept = graph_[group.statistics.front()].shape;
      return whole && (renames_only(kept, node.shape) || fits(node.shape, kept));
    }
    if (node.shape.batched && !group.space.batched) return false;
    if (meeting.via == Via::product && (!target_.fuses_epilogue(graph_[group.matmul].dtype) ||
                                        lessons_.bare.contains(group.matmul))) {
      return false;
    }
    if (node.shape.static_elements() != total) {
      return meeting.via == Via::rows && whole && fits(node.shape, group.space);
    }
    if (cut_views_ && node.shape != group.space) return false;
    if (meeting.via == Via::rows && forgets_weights(group)) return false;
    const auto common = Factoring::common(group.factoring, factoring(id), total);
    if (!common || (meeting.via == Via::product && *common != group.factoring)) return false;
    if (meeting.via == Via::product && !keeps(group, id)) return false;
    group.factoring = *common;
    return true;
  }

  // Whether what follows from the group's rows is computed apart from them.
  bool forgets_weights(const Group& group) const {
    if (target_.device != Target::Device::cuda || !group.space.batched) return false;
    const int64_t row = group.space.only(group.axes).static_elements();
    if (row <= kLongestWeightedRow) return false;
    return std::any_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const Node& node) {
      return node.kind == NodeKind::leaf && !node.shape.batched &&
             node.shape.static_elements() >= row;
    });
  }

  Label label_row_reduction(ValueId id) {
    const Node& node = graph_[id];
    const ValueId arg = node.args[0];
    const Shape& space = graph_[arg].shape;
    const AxisMask axes = changed_axes(space, node.shape);
    if (axes == 0) {
      fail(INGOT_UNSUPPORTED,
           "value {} ({}, {}): a reduction over axes of extent 1 was not removed", id, node.name,
           node.source);
    }
    const Label& own = label(arg);
    if (own.via == Via::rows && takes(group_of(own), arg) && may_own(group_of(own), arg, axes)) {
      Group& group = group_of(own);
      group.axes = static_cast<AxisMask>(group.axes | axes);
      group.reductions.push_back(id);
      return own;
    }
    const int time = own.via == Via::free || own.via == Via::stored ? own.time : own.time + 1;
    const int index = rows_group(time, arg, axes);
    Group& group = schedule_.groups[static_cast<size_t>(index)];
    group.reductions.push_back(id);
    return {group.time, Via::rows, index};
  }

  bool takes(const Group& group, ValueId arg) const {
    if (target_.device != Target::Device::cuda) return true;
    std::set<ValueId> reduced = {arg};
    for (const ValueId id : group.reductions) reduced.insert(graph_[id].args[0]);
    return reduced.size() <= kMostReduced;
  }

  // Whether the team of a rows sweep can reduce `arg` over `axes` as well.
  bool may_own(const Group& group, ValueId arg, AxisMask axes) {
    const Shape& shape = graph_[arg].shape;
    if (shape.batched != group.space.batched ||
        shape.static_elements() != group.space.static_elements()) {
      return false;
    }
    // Seen in another factoring, the owned elements are at most all of a batch entry.
    if (shape != group.space && cut_views_) return false;
    const bool cuda = target_.device == Target::Device::cuda;
    const int64_t largest = cuda ? kLargestSharedSample : kLargestOwnedRow;
    if (shape != group.space) return shape.static_elements() <= largest;
    if (axes == group.axes) return true;
    return (cuda ? shape : group.space.only(static_cast<AxisMask>(group.axes | axes)))
               .static_elements() <= largest;
  }

  // Of this time, or of a later one where those of this time are full.
  int rows_group(int time, ValueId arg, AxisMask axes) {
    const Shape& space = graph_[arg].shape;
    const Factoring own = factoring(arg);
    for (size_t i = 0; i < schedule_.groups.size(); ++i) {
      Group& group = schedule_.groups[i];
      if (group.kind != SweepKind::rows || group.time != time || !may_own(group, arg, axes)) {
        continue;
      }
      const auto common = Factoring::common(group.factoring, own, space.static_elements());
      if (!common) continue;
      if (!takes(group, arg)) return rows_group(time + 1, arg, axes);
      group.factoring = *common;
      group.axes = static_cast<AxisMask>(group.axes | axes);
      return static_cast<int>(i);
    }
    const int index =
        add_group({.kind = SweepKind::rows, .time = time, .space = space, .axes = axes});
    schedule_.groups[static_cast<size_t>(index)].factoring = own;
    return index;
  }

  Label label_statistic(ValueId id) {
    const Node& node = graph_[id];
    const ValueId arg = node.args[0];
    const Shape& space = graph_[arg].shape;
    const AxisMask axes = changed_axes(space, node.shape);
    const Label& own = label(arg);
    if (own.via == Via::product && fuses_statistic(group_of(own), id, axes)) {
      Group& group = group_of(own);
      group.axes = axes;
      group.statistics.push_back(id);
      return {own.time, Via::tail, own.group};
    }
    const int time = own.via == Via::free || own.via == Via::stored ? own.time : own.time + 1;
    for (size_t i = 0; i < schedule_.groups.size(); ++i) {
      Group& group = schedule_.groups[i];
      if (group.kind == SweepKind::columns && group.time == time && group.space == space &&
          group.axes == axes) {
        const auto common =
            Factoring::common(group.factoring, factoring(arg), space.static_elements());
        if (!common) continue;
        group.factoring = *common;
        group.statistics.push_back(id);
        return {time, Via::tail, static_cast<int>(i)};
      }
    }
    const int index =
        add_group({.kind = SweepKind::columns, .time = time, .space = space, .axes = axes});
    Group& group = schedule_.groups[static_cast<size_t>(index)];
    group.factoring = factoring(arg);
    group.statistics.push_back(id);
    return {time, Via::tail, index};
  }

  bool fuses_statistic(const Group& group, ValueId id, AxisMask axes) {
    const Node& node = graph_[id];
    const AxisMask wanted = group.space.rows > 1
                                ? static_cast<AxisMask>(axis_bit(kBatch) | axis_bit(kRows))
                                : axis_bit(kBatch);
    return target_.fuses_statistics(graph_[group.matmul].dtype) &&
           graph_[node.args[0]].shape == group.space && axes == wanted && merges(group, node);
  }

  // The products' kernels on a GPU merge two states, moments or sums of fp32, and nothing else.
  bool merges(const Group& group, const Node& node) const {
    if (target_.device != Target::Device::cuda) return node.finish != Finish::argmax;
    constexpr size_t kMostStates = 2;
    const MonoidKind monoid = monoid_of(node.finish);
    std::set<std::pair<MonoidKind, ValueId>> states = {{monoid, node.args[0]}};
    for (const ValueId id : group.statistics) {
      if (graph_[id].kind != NodeKind::reduce) continue;
      states.emplace(monoid_of(graph_[id].finish), graph_[id].args[0]);
    }
    if (states.size() > kMostStates) return false;
    const DType dtype = graph_[node.args[0]].dtype;
    const bool floats = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
    return monoid == MonoidKind::moments || (monoid == MonoidKind::sum && floats);
  }

  const Graph& graph_;
  const Target& target_;
  bool cut_views_;
  const Lessons& lessons_;
  ValueId better_later_ = kNoValue;
  std::vector<ValueId> better_bare_;
  bool seen_ = true;  // by joint factorings
  std::vector<bool> kept_;
  Schedule schedule_;
};

}  // namespace

ValueId operand_source(const Graph& graph, ValueId operand) {
  const ValueId base = behind_views(graph, operand);
  const bool splits = Factoring(graph[operand].shape).splits(Factoring(graph[base].shape));
  return graph[base].kind == NodeKind::leaf && !splits ? operand : base;
}

bool renames_only(const Shape& from, const Shape& to) {
  const auto extents = [](const Shape& shape) {
    std::vector<int64_t> list;
    for (const int64_t extent : {shape.rows, shape.groups, shape.features}) {
      if (extent != 1) list.push_back(extent);
    }
    return list;
  };
  return from.batched == to.batched && extents(from) == extents(to);
}

std::optional<Schedule> make_schedule(const Graph& graph, const Target& target, bool cut_views,
                                      const std::vector<ValueId>& deferred) {
  Lessons lessons;
  // Each product waits for each other one at most.
  size_t products = 0;
  for (const Node& node : graph.nodes) products += node.kind == NodeKind::matmul ? 1 : 0;
  for (size_t round = 0;; ++round) {
    Scheduler scheduler(graph, target, cut_views, lessons);
    std::optional<Schedule> schedule = scheduler.run(deferred);
    const bool learns = scheduler.better_later() != kNoValue || !scheduler.better_bare().empty();
    if (!schedule || !learns || round >= products * products) return schedule;
    lessons.bare.insert(scheduler.better_bare().begin(), scheduler.better_bare().end());
    if (scheduler.better_later() != kNoValue) ++lessons.delays[scheduler.better_later()];
  }
}

}  // namespace ingot
