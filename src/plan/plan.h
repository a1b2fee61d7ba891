// The plan: a graph cut into sweeps over its iteration space, with where every value lives and what
// each sweep costs.
//
// A value that needs a column's statistics waits for all rows; one that needs a row's reduction
// waits for all its features. Those waits cut the graph: within a sweep, each element flows through
// the body once, in registers or cache.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/readers.h"

namespace ingot {

enum class SweepKind : uint8_t {
  product,  // a matrix product, and behind it everything that needs no wait (its epilogue)
  columns,  // partial states over the batch for every kept element, merged, then the tail
  rows,     // one team owns all features of a row: row reductions resolve inside the sweep
  map,      // pointwise only
  scan      // one team goes through a row in order, and stores its running sums
};
std::string_view name_of(SweepKind kind);

enum class Precision : uint8_t { fp32, ieee, high, tf32, bf16, fp16 };
Precision precision_from(std::string_view name);
std::string_view name_of(Precision precision);
Precision least_accurate(Precision a, Precision b);

// What a backend can do, so that the plan can ask for it. Rates are used for predictions only.
struct Target {
  enum class Device : uint8_t { cpu, cuda } device = Device::cpu;
  int sm = 90;  // CUDA compute capability ×10
  // f32 product sweeps may carry a pointwise body, and emit partial column states; and those of
  // fp16 or bf16 operands both.
  bool fused_epilogue = false, fused_statistics = false;
  bool fused_half = false;
  bool streams_products = false;  // Unpacked::any
  double product_flops = 1e12;    // sustained, for the chosen precision
  double bandwidth = 2e10;        // bytes per second of device or main memory
  double cache_bytes = 32e6;      // last-level cache
  double launch_seconds = 0;      // fixed cost of a sweep
  int shared_bytes = 0;           // CUDA: shared memory that a thread block may have
  int units = 1;                  // SMs or cores
  std::string name;

  bool fuses_epilogue(DType product) const {
    return product == DType::f16 || product == DType::bf16 ? fused_half : fused_epilogue;
  }
  bool fuses_statistics(DType product) const {
    return product == DType::f16 || product == DType::bf16 ? fused_half : fused_statistics;
  }
};

struct Cost {
  double flops = 0, bytes_read = 0, bytes_written = 0;
  double seconds = 0;        // predicted
  double limit_seconds = 0;  // flops at the peak rate, or bytes over bandwidth: whichever is larger
};

// Rules that every sweep keeps (validate() checks them):
//  - Each value of a sweep is seen in the sweep's own factoring of rows, groups and features: an
//    extent of shapes.at(v) is the space's or 1. A view in a body is therefore only another name
//    for its argument, and an operand's index follows from the element's coordinates alone.
//  - `loads` are leaves and stores of earlier sweeps, never constants: those are read in place.
//  `body`, `statistics` and `tail` are in an order in which they can be computed.
//  - A value whose extent is 1 along an axis where the space's is not is written once.
//  - rows: the argument of every row reduction fills the space.
//  - scan: the body ends in one, of what fills the space; it is stored, and nothing else is.
//  - Statistics of a sweep all reduce the same axes, and their arguments fill the space. The tail
//    reads statistics, loads that do not vary along the reduced axes, and earlier tail values.
//  - A buffer that an update overwrites is read by no later sweep; a sweep that itself reads it
//    does so at the element it writes, or in its body while the update is in its tail.
struct Sweep {
  SweepKind kind = SweepKind::map;
  std::string name;  // for kernels and tables: "gemm_scale_statistics"
  Shape space;       // what it iterates over
  // Leaves and earlier sweeps' stores that the body, the tail or the product reads.
  std::vector<ValueId> loads;
  // product: the node; its operands, seen through views, are among the loads.
  ValueId matmul = kNoValue;
  // Nodes evaluated per element (and per row, for row reductions), in order.
  std::vector<ValueId> body;
  // Reductions over the batch, merged when the sweep ends.
  std::vector<ValueId> statistics;
  // Nodes evaluated once per reduced element, after the merge.
  std::vector<ValueId> tail;
  // Values of body, statistics or tail (or a load: a copy) that are written: for later sweeps,
  // as results, as updates.
  std::vector<ValueId> stores;
  // Extents of every value above in this sweep's factoring (the product's operands excepted).
  std::map<ValueId, Shape> shapes;
  std::vector<std::string> reasons;  // why it was cut, fused, stored or recomputed so
};

// Axes of the sweep's space over which one of its reductions runs.
AxisMask reduced_axes(const Graph& graph, const Sweep& sweep, ValueId reduce);
// One monoid state, and the reductions that are read off it (mean and variance share Moments).
struct SharedState {
  MonoidKind monoid = MonoidKind::sum;
  ValueId arg = kNoValue;
  AxisMask axes = 0;
  std::vector<ValueId> finishes;
};
// The states behind some reductions of a sweep (its statistics, or those of its body), in order.
std::vector<SharedState> shared_states(const Graph& graph, const Sweep& sweep,
                                       std::span<const ValueId> reductions);
// Element strides of a tensor over the axes of a sweep, given those over the value's own axes.
// `seen` (shapes.at(v)) splits the axes of `own` but merges none. 0 where an extent is 1.
std::array<int64_t, kAxes> strides_in(const Shape& own, const std::array<int64_t, kAxes>& strides,
                                      const Shape& seen);
// The same for a dense tensor (a workspace buffer), for any factoring.
std::array<int64_t, kAxes> dense_strides(const Shape& seen);
// The load that holds operand `index` of a product sweep: the operand itself, or what is behind its
// views.
ValueId product_operand(const Graph& graph, const Sweep& sweep, int index);
// The value behind a chain of views.
ValueId behind_views(const Graph& graph, ValueId value);

// Where a value that crosses sweeps lives.
struct Placement {
  enum class Kind : uint8_t { none, leaf, result, update, workspace } kind = Kind::none;
  int index = -1;  // leaf ordinal, result ordinal, update ordinal, or workspace buffer
};
struct WorkspaceBuffer {
  Shape shape;
  DType dtype = DType::f32;
  int first_sweep = 0,
      last_sweep = 0;  // lifetime; buffers whose lifetimes are disjoint may overlap
  ValueId value = kNoValue;
};

struct Plan {
  Graph graph;  // after rewriting
  Readers readers;
  Target target;
  Precision precision = Precision::fp32;
  std::vector<Sweep> sweeps;
  std::vector<Placement> placements;  // by ValueId
  std::vector<WorkspaceBuffer> buffers;

  // Byte offsets of `buffers` and the total, 256-byte aligned, for a batch size. left_out: by
  // buffer, those that nobody uses, which lie at kNowhere; none of them where it is empty.
  static constexpr size_t kNowhere = size_t{1} << 62;
  std::vector<size_t> workspace_layout(int64_t batch, size_t* total,
                                       const std::vector<bool>& left_out = {}) const;
  Cost cost(const Sweep& sweep, int64_t batch) const;
};

// How a value lies in memory: as its place has it.
DType dtype_in_memory(const Plan& plan, ValueId value);

// The states behind a sweep's statistics. On a GPU a columns sweep reads a mean off the state of
// the sum of the same values, where no variance of them is asked for.
std::vector<SharedState> statistics_states(const Plan& plan, const Sweep& sweep);

// Of rows that a sweep packs on the way: they are a warp's, of which shorter ones would use less
// than three quarters.
inline constexpr int64_t kLeastPackedRow = 96;
// Whether packing a product's samples would be a pass for this product alone: no other reads them,
// and they come from outside, from another product, or from a sweep that does not pack on the way.
bool packs_samples_alone(const Plan& plan, const Sweep& product);

// Of the products right behind a sweep, those that multiply rows that it stores and nobody else
// reads: as many as follow one another, each with one weight for all samples; 0 where somebody
// does.
size_t lone_readers(const Plan& plan, size_t sweep);

// Throws std::logic_error naming the rule and the sweep where a plan breaks one.
void validate(const Plan& plan);

// Throws Error (INGOT_UNSUPPORTED, naming the node and its source line) where the graph asks for
// something that no sweep can do.
Plan make_plan(Graph graph, const Target& target, Precision precision);
std::string to_string(const Plan& plan);

}  // namespace ingot
