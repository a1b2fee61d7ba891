// How a phase's iteration space is cut: into tiles that fit in cache, and tiles into tasks for
// threads. Where statistics are gathered the cut depends on shapes alone, so that partial states,
// and with them every bit of the result, do not depend on the number of threads.
#pragma once

#include <array>
#include <cstdint>

#include "graph/graph.h"

namespace ingot::cpu {

using Extents = std::array<int64_t, kAxes>;

struct Box {
  Extents begin{}, size{};
};

// Axes from the outermost to the innermost in a tile's registers.
using AxisOrder = std::array<size_t, kAxes>;
inline constexpr AxisOrder kNaturalOrder{kBatch, kRows, kGroups, kFeatures};

struct Tiling {
  Extents space{};          // extents of the iteration space
  Extents tile{};           // largest tile
  int64_t batch_chunk = 1;  // batch entries of a task, a multiple of tile[kBatch]
  int64_t chunks = 1;       // tasks along the batch
  int64_t strips = 1;       // tiles along the other axes: a task takes one of them
  int64_t tasks() const { return chunks * strips; }
  int64_t elements() const;
  // The tile's range along the axes but the batch, for strip s.
  Box strip(int64_t s) const;
};

// Elements that a run of pointwise steps takes at a time: a handful of buffers of so many floats
// stay in a level-1 cache.
inline constexpr int64_t kBlockElements = 1024;

Extents extents_of(const Shape& shape, int64_t batch);
int64_t product_of(const Extents& extents);

// whole_axes: axes that no tile may cut (but never the batch). statistics: the cut may not depend
// on `threads`.
Tiling make_tiling(const Shape& space, int64_t batch, AxisMask whole_axes, bool statistics,
                   int threads);

// The order in which a tile's registers lie when reductions over `reduced` are resolved in it.
// Runs too short to fill vectors with are turned: another axis becomes the innermost, so that
// vectors hold one element of many runs each.
AxisOrder register_order(const Extents& tile, AxisMask reduced);

}  // namespace ingot::cpu
