#include "cpu/tiling.h"

#include <algorithm>

namespace ingot::cpu {
namespace {

// 32 KB of floats: a few registers of it fit in a level-2 cache, one or two in level 1.
constexpr int64_t kTileElements = 8192;
// A strip's run in memory. Statistics take more rows at once, so that partial states merge seldom.
constexpr int64_t kStripFeatures = 2048;
constexpr int64_t kStatisticsFeatures = 512;
constexpr int64_t kStatisticsRows = 256;
constexpr int64_t kTasksPerThread = 8;
// Shorter runs are reduced across vectors rather than along them.
constexpr int64_t kShortRun = 48;
constexpr int64_t kFewestLanes = 8;

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t static_elements(const Extents& e) {
  return e[kRows] * e[kGroups] * e[kFeatures];
}

}  // namespace

int64_t product_of(const Extents& e) {
  return e[kBatch] * static_elements(e);
}

Extents extents_of(const Shape& shape, int64_t batch) {
  return {shape.batched ? batch : 1, shape.rows, shape.groups, shape.features};
}

int64_t Tiling::elements() const {
  return product_of(space);
}

Box Tiling::strip(int64_t s) const {
  Box box;
  box.size[kBatch] = tile[kBatch];
  for (const int axis : {kFeatures, kGroups, kRows}) {
    const auto a = static_cast<size_t>(axis);
    const int64_t count = ceil_divide(space[a], tile[a]);
    box.begin[a] = s % count * tile[a];
    box.size[a] = std::min(tile[a], space[a] - box.begin[a]);
    s /= count;
  }
  return box;
}

Tiling make_tiling(const Shape& space, int64_t batch, AxisMask whole_axes, bool statistics,
                   int threads) {
  Tiling t;
  t.space = extents_of(space, batch);
  t.tile = t.space;
  const auto may_cut = [&](Axis axis) { return (whole_axes & axis_bit(axis)) == 0; };
  const auto shrink = [&](Axis axis, int64_t least) {
    if (!may_cut(axis) || static_elements(t.tile) <= kTileElements) return;
    const int64_t others = std::max<int64_t>(1, static_elements(t.tile) / t.tile[axis]);
    t.tile[axis] =
        std::clamp(kTileElements / others, std::min(least, t.space[axis]), t.space[axis]);
  };
  // Outer axes first: runs in memory stay long.
  shrink(kRows, 1);
  shrink(kGroups, 1);
  const int64_t features = statistics ? kStatisticsFeatures : kStripFeatures;
  if (may_cut(kFeatures) && static_elements(t.tile) > features) {
    const int64_t others = std::max<int64_t>(1, static_elements(t.tile) / t.tile[kFeatures]);
    t.tile[kFeatures] = std::clamp<int64_t>(
        features / others, std::min<int64_t>(features, t.space[kFeatures]), t.space[kFeatures]);
  }
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    t.tile[axis] = std::max<int64_t>(1, t.tile[axis]);
    t.strips *= ceil_divide(t.space[axis], t.tile[axis]);
  }
  const int64_t rows =
      std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, static_elements(t.tile)));
  t.tile[kBatch] = std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, t.space[kBatch]));
  int64_t tiles = ceil_divide(kStatisticsRows, t.tile[kBatch]);
  if (!statistics) {
    const int64_t all = ceil_divide(t.space[kBatch], t.tile[kBatch]);
    tiles = std::max<int64_t>(1, all * t.strips / (kTasksPerThread * threads));
  }
  t.batch_chunk = tiles * t.tile[kBatch];
  t.chunks = ceil_divide(t.space[kBatch], t.batch_chunk);
  return t;
}

AxisOrder register_order(const Extents& tile, AxisMask reduced) {
  const auto is_reduced = [&](size_t axis) { return (reduced >> axis & 1) != 0; };
  int64_t run = 1;
  for (size_t axis = kAxes; axis-- > 0;) {
    if (tile[axis] > 1 && !is_reduced(axis)) break;
    run *= tile[axis];
  }
  if (run == 1 || run >= kShortRun) return kNaturalOrder;
  size_t lanes = kAxes;
  for (size_t axis = 0; axis < kAxes; ++axis) {
    if (is_reduced(axis)) continue;
    if (lanes == kAxes || tile[axis] > tile[lanes]) lanes = axis;
  }
  if (lanes == kAxes || tile[lanes] < kFewestLanes) return kNaturalOrder;
  AxisOrder order = kNaturalOrder;
  std::rotate(order.begin() + static_cast<std::ptrdiff_t>(lanes),
              order.begin() + static_cast<std::ptrdiff_t>(lanes) + 1, order.end());
  return order;
}

}  // namespace ingot::cpu
