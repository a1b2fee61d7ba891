#include "cpu/sweep.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/monoid.cuh"
#include "cpu/loops.h"
#include "support/checked.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

constexpr size_t kAlignment = 256;
// Elements of statistics that one task merges.
constexpr int64_t kMergeElements = 2048;
// Below this much work a second thread costs more than it brings.
constexpr int64_t kElementsForThreads = 32768;

size_t align(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// The tiles of one task.
struct TileRange {
  Box strip;
  int64_t begin, end;  // along the batch
};

TileRange range_of(const Tiling& tiling, int64_t task) {
  const int64_t chunk = task / tiling.strips;
  TileRange range{tiling.strip(task % tiling.strips), chunk * tiling.batch_chunk, 0};
  range.end = std::min(tiling.space[kBatch], range.begin + tiling.batch_chunk);
  return range;
}

// Runs the tiles of one task; after_tile(interpreter, tile, batch entries done before it).
template <class AfterTile>
void run_task(const Phase& phase, const Bindings& bindings, Level level, const Tiling& tiling,
              const TileRange& range, AfterTile&& after_tile) {
  Interpreter interpreter(phase, bindings, level, tiling.tile, &thread_scratch());
  Box tile = range.strip;
  interpreter.begin_strip(tile);
  for (int64_t b = range.begin; b < range.end; b += tiling.tile[kBatch]) {
    tile.begin[kBatch] = b;
    tile.size[kBatch] = std::min(tiling.tile[kBatch], range.end - b);
    interpreter.run_tile(tile);
    after_tile(interpreter, tile, b - range.begin);
  }
}

template <class Task>
void for_each_task(const Tiling& tiling, Task&& task) {
  if (tiling.elements() == 0) return;
  const bool small = tiling.elements() < kElementsForThreads;
  parallel_for(
      tiling.tasks(), [&](int64_t index, int) { task(index); }, small ? 1 : 0);
}

Extents dense_over(const Extents& sizes) {
  Extents strides{};
  int64_t stride = 1;
  for (size_t a = kAxes; a-- > 0;) {
    strides[a] = stride;
    stride *= sizes[a];
  }
  return strides;
}

bool contains(const std::vector<ValueId>& values, ValueId value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

template <template <class> class Monoid>
void merge_values(double* first, const double* other, int64_t n) {
  for (int64_t i = 0; i < n; ++i) first[i] = Monoid<double>::merge({first[i]}, {other[i]}).value;
}

// Merges partial states of `other_count` elements into states of `count`.
void merge_states(ReduceMonoid monoid, TileStates into, double count, TileStates other,
                  double other_count, int64_t n) {
  switch (monoid) {
    case ReduceMonoid::sum:
      return merge_values<Sum>(into.first, other.first, n);
    case ReduceMonoid::max:
      return merge_values<Max>(into.first, other.first, n);
    case ReduceMonoid::min:
      return merge_values<Min>(into.first, other.first, n);
    case ReduceMonoid::argmax:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged =
            ArgMax<double>::merge({into.first[i], static_cast<i64>(into.second[i])},
                                  {other.first[i], static_cast<i64>(other.second[i])});
        into.first[i] = merged.value;
        into.second[i] = static_cast<double>(merged.index);
      }
      return;
    case ReduceMonoid::moments:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged = Moments<double>::merge({count, into.first[i], into.second[i]},
                                                   {other_count, other.first[i], other.second[i]});
        into.first[i] = merged.mean;
        into.second[i] = merged.m2;
      }
      return;
    case ReduceMonoid::log_sum_exp:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged = LogSumExp<double>::merge({into.first[i], into.second[i]},
                                                     {other.first[i], other.second[i]});
        into.first[i] = merged.max;
        into.second[i] = merged.sum;
      }
      return;
    case ReduceMonoid::count_:
      return;
  }
}

}  // namespace

Memory Addresses::tensor(size_t position, const Shape& own, const Shape& seen) const {
  const ingot_tensor& t = tensors_[position];
  std::array<int64_t, kAxes> strides;
  std::copy_n(t.strides, kAxes, strides.begin());
  return {static_cast<std::byte*>(t.data), strides_in(own, strides, seen),
          static_cast<DType>(t.dtype)};
}

Memory Addresses::leaf(ValueId value, const Shape& seen) const {
  const std::vector<ValueId> leaves = plan_.graph.leaves();
  const auto at = std::find(leaves.begin(), leaves.end(), value);
  return tensor(static_cast<size_t>(at - leaves.begin()), plan_.graph[value].shape, seen);
}

Memory Addresses::result(size_t ordinal, const Shape& seen) const {
  const size_t position = tensors_.size() - plan_.graph.results.size() + ordinal;
  return tensor(position, plan_.graph[plan_.graph.results[ordinal].value].shape, seen);
}

bool Addresses::is_placed(ValueId value) const {
  return plan_.placements[static_cast<size_t>(value)].kind != Placement::Kind::none;
}

Memory Addresses::locate(ValueId value, const Shape& seen) const {
  const Placement& placement = plan_.placements[static_cast<size_t>(value)];
  const auto index = static_cast<size_t>(placement.index);
  switch (placement.kind) {
    case Placement::Kind::leaf:
      return tensor(index, plan_.graph[value].shape, seen);
    case Placement::Kind::result:
      return result(index, seen);
    case Placement::Kind::update:
      return {workspace_ + update_offsets_[index], dense_strides(seen), plan_.graph[value].dtype};
    case Placement::Kind::workspace:
      return {workspace_ + buffer_offsets_[index], dense_strides(seen), plan_.buffers[index].dtype};
    case Placement::Kind::none:
      break;
  }
  fail(INGOT_FAILED, "CPU: value {} of '{}' has no place in memory", value, plan_.graph.name);
}

SweepRunner::SweepRunner(const Plan& plan, const Sweep& sweep, const Isa& isa)
    : plan_(plan), sweep_(sweep), isa_(isa) {
  const Graph& graph = plan.graph;
  const std::vector<SharedState> statistics = shared_states(graph, sweep, sweep.statistics);
  std::vector<ValueId> body_reductions;
  for (const ValueId value : sweep.body) {
    if (graph[value].kind == NodeKind::reduce) body_reductions.push_back(value);
  }
  std::vector<ValueId> loads = sweep.loads;
  if (sweep.matmul != kNoValue) {
    loads.push_back(sweep.matmul);
    product_unplaced_ =
        plan.placements[static_cast<size_t>(sweep.matmul)].kind == Placement::Kind::none;
  }
  std::vector<ValueId> body_stores, tail_stores;
  for (const ValueId value : sweep.stores) {
    if (value == sweep.matmul) continue;
    const bool late = contains(sweep.tail, value) || contains(sweep.statistics, value);
    (late ? tail_stores : body_stores).push_back(value);
  }
  has_body_ = !statistics.empty() || !body_stores.empty();
  if (has_body_) {
    body_ = lower_phase(graph, sweep.space, sweep.shapes, loads, sweep.body,
                        shared_states(graph, sweep, body_reductions), statistics, body_stores);
    for (const SharedState& state : statistics) {
      body_.whole_axes = static_cast<AxisMask>(body_.whole_axes | (state.axes & ~axis_bit(kBatch)));
    }
  }
  AxisMask reduced = 0;
  for (const SharedState& state : statistics) reduced |= state.axes;
  kept_ = sweep.space.without(reduced);
  has_tail_ = !tail_stores.empty();
  added_row_ = find_added_row();
  for (const ValueId value : sweep.statistics) statistic_.emplace(value, statistic_.size());
  if (!has_tail_) return;
  std::vector<ValueId> tail_reductions;
  for (const ValueId value : sweep.tail) {
    if (graph[value].kind == NodeKind::reduce) tail_reductions.push_back(value);
  }
  std::vector<ValueId> tail_loads = sweep.loads;
  tail_loads.insert(tail_loads.end(), sweep.statistics.begin(), sweep.statistics.end());
  tail_ = lower_phase(graph, kept_, sweep.shapes, tail_loads, sweep.tail,
                      shared_states(graph, sweep, tail_reductions), {}, tail_stores);
}

Tiling SweepRunner::tiling(int64_t batch) const {
  return make_tiling(sweep_.space, batch, body_.whole_axes, !body_.statistics.empty(),
                     thread_count());
}

int64_t SweepRunner::kept_elements(int64_t batch) const {
  return product_of(extents_of(kept_, batch));
}

SweepRunner::Layout SweepRunner::layout(int64_t batch) const {
  Layout l;
  const auto take = [&](size_t bytes) {
    const size_t at = l.total;
    l.total = checked_sum(l.total, align(bytes));
    return at;
  };
  if (product_unplaced_) {
    // Eight bytes an element serve every dtype.
    const Shape& shape = plan_.graph[sweep_.matmul].shape;
    l.product = take(checked_product(static_cast<size_t>(shape.elements(batch)), sizeof(double)));
  }
  const auto kept = static_cast<size_t>(kept_elements(batch));
  const size_t states = checked_product(kept, 2 * sizeof(double) * body_.statistics.size());
  l.statistics = take(checked_product(kept, sizeof(double) * statistic_.size()));
  l.states = take(states);
  if (!body_.statistics.empty()) {
    const int64_t chunks = std::max<int64_t>(1, tiling(batch).chunks);
    l.partials = take(checked_product(states, static_cast<size_t>(chunks)));
  }
  return l;
}

size_t SweepRunner::workspace_size(int64_t batch) const {
  return layout(batch).total;
}

Memory SweepRunner::product_memory(const Addresses& addresses, std::byte* workspace) const {
  const Node& node = plan_.graph[sweep_.matmul];
  if (!product_unplaced_) return addresses.locate(sweep_.matmul, node.shape);
  return {workspace + layout(addresses.batch()).product, dense_strides(node.shape), node.dtype};
}

Bindings SweepRunner::bind(const Phase& phase, const Addresses& addresses, std::byte* workspace,
                           const Layout& l) const {
  Bindings bindings;
  for (const ValueId value : phase.loads) {
    const Shape& seen = sweep_.shapes.at(value);
    if (const auto statistic = statistic_.find(value); statistic != statistic_.end()) {
      const auto kept = static_cast<size_t>(kept_elements(addresses.batch()));
      bindings.loads.push_back(
          {workspace + l.statistics + statistic->second * kept * sizeof(double),
           dense_strides(seen), DType::f64});
    } else if (value == sweep_.matmul && product_unplaced_) {
      bindings.loads.push_back(
          {workspace + l.product, dense_strides(seen), plan_.graph[value].dtype});
    } else {
      bindings.loads.push_back(addresses.locate(value, seen));
    }
  }
  for (const Phase::Store& store : phase.stores) {
    bindings.stores.push_back(addresses.locate(store.value, sweep_.shapes.at(store.value)));
  }
  return bindings;
}

void SweepRunner::run(const Addresses& addresses, std::byte* workspace,
                      const std::byte* packed) const {
  const Layout l = layout(addresses.batch());
  if (sweep_.matmul != kNoValue) run_product(addresses, workspace, packed, {});
  if (has_body_) run_body(addresses, workspace, l);
  finish(addresses, workspace, l);
}

void SweepRunner::finish(const Addresses& addresses, std::byte* workspace, const Layout& l) const {
  if (!body_.statistics.empty()) merge_statistics(addresses.batch(), workspace, l);
  if (has_tail_) run_tail(addresses, workspace, l);
}

void SweepRunner::run_body(const Addresses& addresses, std::byte* workspace,
                           const Layout& l) const {
  const Bindings bindings = bind(body_, addresses, workspace, l);
  const Tiling tiles = tiling(addresses.batch());
  auto* partials = reinterpret_cast<double*>(workspace + l.partials);
  for_each_task(tiles, [&](int64_t task) { run_body_task(bindings, tiles, task, partials); });
}

void SweepRunner::run_body_task(const Bindings& bindings, const Tiling& tiles, int64_t task,
                                double* partials) const {
  const TileRange range = range_of(tiles, task);
  const size_t count = body_.statistics.size();
  if (count == 0) {
    run_task(body_, bindings, isa_.level, tiles, range, [](auto&&...) {});
    return;
  }
  const int64_t batch = tiles.space[kBatch];
  const Extents all_kept = extents_of(kept_, batch);
  Extents begin = range.strip.begin, sizes = range.strip.size;
  for (size_t a = 0; a < kAxes; ++a) {
    if (all_kept[a] == 1) sizes[a] = 1;
  }
  // A task's states, dense, until it is done; then they go to their place among all.
  const int64_t n = product_of(sizes), kept = product_of(all_kept);
  static thread_local std::vector<double> local;
  local.resize(static_cast<size_t>(n) * 2 * count);
  const auto states_of = [&](size_t s) {
    double* const first = local.data() + static_cast<int64_t>(2 * s) * n;
    return TileStates{first, first + n};
  };
  for (size_t s = 0; s < count; ++s) clear_states(body_.statistics[s].monoid, states_of(s), n);
  run_task(body_, bindings, isa_.level, tiles, range,
           [&](Interpreter& interpreter, const Box&, int64_t done) {
             for (size_t s = 0; s < count; ++s) {
               const StateStep& statistic = body_.statistics[s];
               const auto each =
                   static_cast<double>(sweep_.space.only(statistic.axes).static_elements());
               interpreter.gather(statistic, states_of(s), static_cast<double>(done) * each);
             }
           });
  const int64_t chunk = task / tiles.strips;
  const Extents kept_strides = dense_over(all_kept);
  for (size_t s = 0; s < count; ++s) {
    double* to =
        partials + (chunk * static_cast<int64_t>(count) + static_cast<int64_t>(s)) * 2 * kept;
    Loops<2> loops;
    loops.build(sizes, {kept_strides, dense_over(sizes)});
    int64_t base = 0;
    for (size_t a = 1; a < kAxes; ++a) base += begin[a] * kept_strides[a];
    loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
      std::copy_n(states_of(s).first + offset[1], loops.size[0], to + base + offset[0]);
      std::copy_n(states_of(s).second + offset[1], loops.size[0], to + kept + base + offset[0]);
    });
  }
}

void SweepRunner::merge_statistics(int64_t batch, std::byte* workspace, const Layout& l) const {
  const Tiling tiles = tiling(batch);
  const int64_t kept = kept_elements(batch);
  auto* states = reinterpret_cast<double*>(workspace + l.states);
  auto* finished = reinterpret_cast<double*>(workspace + l.statistics);
  const auto* partials = reinterpret_cast<const double*>(workspace + l.partials);
  const auto count = static_cast<int64_t>(body_.statistics.size());
  const int64_t chunks = tiles.elements() == 0 ? 0 : tiles.chunks;
  const Primitives<double>& finishes = primitives<double>(isa_.level);
  const auto merge = [&](int64_t task, int) {
    const int64_t begin = task * kMergeElements, n = std::min(kMergeElements, kept - begin);
    for (int64_t s = 0; s < count; ++s) {
      const StateStep& statistic = body_.statistics[static_cast<size_t>(s)];
      const TileStates into{states + 2 * s * kept + begin, states + (2 * s + 1) * kept + begin};
      clear_states(statistic.monoid, into, n);
      const auto each = static_cast<double>(sweep_.space.only(statistic.axes).static_elements());
      double merged = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        // Read only: merge_states changes its first argument alone.
        auto* partial = const_cast<double*>(partials) + (chunk * count + s) * 2 * kept + begin;
        const int64_t rows =
            std::min(tiles.batch_chunk, tiles.space[kBatch] - chunk * tiles.batch_chunk);
        const double more = static_cast<double>(rows) * each;
        merge_states(statistic.monoid, into, merged, {partial, partial + kept}, more, n);
        merged += more;
      }
      for (const StateStep::Read& read : statistic.reads) {
        double* out = finished + static_cast<int64_t>(statistic_.at(read.value)) * kept + begin;
        finishes.read[static_cast<int>(reading_of(read.finish))](into.first, into.second, merged,
                                                                 out, n);
      }
    }
  };
  const bool small = kept * chunks * count < kElementsForThreads;
  parallel_for((kept + kMergeElements - 1) / kMergeElements, merge, small ? 1 : 0);
}

void SweepRunner::run_tail(const Addresses& addresses, std::byte* workspace,
                           const Layout& l) const {
  const Bindings bindings = bind(tail_, addresses, workspace, l);
  const Tiling tiles =
      make_tiling(kept_, addresses.batch(), tail_.whole_axes, false, thread_count());
  for_each_task(tiles, [&](int64_t task) {
    run_task(tail_, bindings, isa_.level, tiles, range_of(tiles, task), [](auto&&...) {});
  });
}

nlohmann::json SweepRunner::describe(int64_t batch) const {
  nlohmann::json out{{"name", sweep_.name}, {"kind", name_of(sweep_.kind)}};
  if (sweep_.matmul != kNoValue) {
    const ProductCall call = typical_call(batch);
    for (const auto& provider : product_providers(isa_)) {
      if (!provider->takes(call)) continue;
      out["product"] = provider->name();
      break;
    }
  }
  if (has_body_) {
    const Tiling tiles = tiling(batch);
    out["tile"] = tiles.tile;
    out["tasks"] = tiles.tasks();
    out["operations"] = body_.steps.size();
    out["registers"] = body_.buffers.size();
  }
  if (has_tail_) out["tail_operations"] = tail_.steps.size();
  return out;
}

}  // namespace ingot::cpu
