// The plan: a graph cut into sweeps over its iteration space, with where every value lives and what
// each sweep costs.
//
// A value that needs a column's statistics waits for all rows; one that needs a row's reduction
// waits for all its features. Those waits cut the graph: within a sweep, each element flows through
// the body once, in registers or cache.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace ingot {

enum class SweepKind : uint8_t {
  product,  // a matrix product, and behind it everything that needs no wait (its epilogue)
  columns,  // partial states over the batch for every kept element, merged, then the tail
  rows,     // one team owns all features of a row: row reductions resolve inside the sweep
  map       // pointwise only
};
std::string_view name_of(SweepKind kind);

enum class Precision : uint8_t { fp32, ieee, high, tf32, bf16, fp16 };
Precision precision_from(std::string_view name);
std::string_view name_of(Precision precision);

// What a backend can do, so that the plan can ask for it. Rates are used for predictions only.
struct Target {
  enum class Device : uint8_t { cpu, cuda } device = Device::cpu;
  int sm = 90;                    // CUDA compute capability ×10
  bool fused_epilogue = false;    // product sweeps may carry a pointwise body
  bool fused_statistics = false;  // product sweeps may emit partial column states
  double product_flops = 1e12;    // sustained, for the chosen precision
  double bandwidth = 2e10;        // bytes per second of device or main memory
  double cache_bytes = 32e6;      // last-level cache
  double launch_seconds = 0;      // fixed cost of a sweep
  int units = 1;                  // SMs or cores
  std::string name;
};

struct Cost {
  double flops = 0, bytes_read = 0, bytes_written = 0;
  double seconds = 0;        // predicted
  double limit_seconds = 0;  // flops at the peak rate, or bytes over bandwidth: whichever is larger
};

struct Sweep {
  SweepKind kind = SweepKind::map;
  std::string name;            // for kernels and tables: "gemm_scale_statistics"
  Shape space;                 // what it iterates over
  std::vector<ValueId> loads;  // leaves and earlier sweeps' stores that the body or tail reads
  ValueId matmul = kNoValue;   // product: the node; its operands are in `loads`
  std::vector<ValueId>
      body;  // nodes evaluated per element (and per row, for row reductions), in order
  std::vector<ValueId> statistics;  // reduce nodes over the batch, merged when the sweep ends
  std::vector<ValueId> tail;        // nodes evaluated once per reduced element, after the merge
  std::vector<ValueId> stores;  // values written for later sweeps, results, updates (body or tail)
  std::vector<std::string> reasons;  // why it was cut, fused, stored or recomputed so
};

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
};

struct Plan {
  Graph graph;  // after rewriting
  Target target;
  Precision precision = Precision::fp32;
  std::vector<Sweep> sweeps;
  std::vector<Placement> placements;  // by ValueId
  std::vector<WorkspaceBuffer> buffers;

  // Byte offsets of `buffers` and the total, 256-byte aligned, for a batch size.
  std::vector<size_t> workspace_layout(int64_t batch, size_t* total) const;
  Cost cost(const Sweep& sweep, int64_t batch) const;
};

// Throws Error (INGOT_UNSUPPORTED, naming the node and its source line) where the graph asks for
// something that no sweep can do.
Plan make_plan(Graph graph, const Target& target, Precision precision);
std::string to_string(const Plan& plan);

}  // namespace ingot
