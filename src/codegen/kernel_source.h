// Code generation: each sweep of a plan becomes one translation unit: a functor written from the
// graph, instantiations of a template of kernels/sweeps/, and their extern "C" names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "product/hopper/tiles.h"
#include "sweeps/splits.h"

namespace ingot {

// A field of the functor's Operands, in order: what the host binds to it, with the strides of the
// value as the sweep sees it.
struct KernelOperand {
  ValueId value = kNoValue;
  bool written = false;
  bool vector = false;  // accessed V features at a time: width > 1 asks for alignment
  int bytes = 4;        // of an element in memory
  Shape seen;           // extents in the sweep's factoring
};

enum class KernelRole : uint8_t {
  map,            // (operands, samples)
  columns,        // (operands, samples, samples of a split, partials)
  columns_inner,  // the same
  columns_whole,  // (operands, samples)
  merge,          // (operands, partials, splits)
  rows,           // (operands, rows)
  rows_packed,    // (operands, rows, packed, exponents, plain)
  waves_begin,    // (operands, memory, bytes)
  waves,          // (operands, rows, memory)
  groups,         // (operands, samples)
};

// One extern "C" kernel. Blocks for a batch: see blocks_of().
struct KernelEntry {
  std::string name;
  KernelRole role = KernelRole::map;
  int width = 1;             // vector width V
  bool odd = false;          // whole vectors lie where sweeps/odd_rows.cuh says
  bool across_rows = false;  // vectors go on from one row of a sample into the next
  int threads = 0;
  int64_t tiles = 1;  // blocks along a sample's elements, columns or a row's; pieces of waves, and
                      // the most of any variant (waves_begin)
  int64_t stay = 0;   // waves: where blocks stay, and draw one piece after another, their number
  int64_t per_block = 1;  // samples (map), samples of one step (columns) or rows (rows)
  // Shared memory that it makes use of where it is launched with it: the right results need none.
  int64_t shared_bytes = 0;
};

struct KernelSource {
  std::string name;  // of the main kernel, and of the file that explain() writes
  std::string text;
  int sweep = 0;  // index into Plan::sweeps
  std::vector<KernelOperand> operands;
  // In launch order. Where two of one role follow each other, the first that the operands'
  // alignment admits is launched; the last one is of width 1 and always does.
  std::vector<KernelEntry> entries;

  bool batched = true;          // whether the sweep's space has the batch
  int64_t rows_per_sample = 1;  // rows
  AxisMask row_axes = 0;        // rows, map: what generate_turned() takes for a row; 0: it does not
  int64_t leading = 1;          // columns: reduced extent besides the batch, in leading axes
  int64_t columns = 0;          // columns: kept elements
  int64_t state_bytes = 0;      // columns, waves: upper bound of one partial state
  int phases = 0;               // waves
};

// Rows of a batch.
int64_t rows_of(const KernelSource& source, int64_t batch);
// How the samples of a columns sweep are cut for a batch.
SampleSplits splits_of(const KernelSource& source, const KernelEntry& entry, int64_t batch);
// Blocks of the grid (one-dimensional).
int64_t blocks_of(const KernelSource& source, const KernelEntry& entry, int64_t batch);

// The sources of every sweep of the plan, in launch order; of a product's, what follows it where a
// library computes it (codegen/product_epilogue.h has the rest). Throws Error (INGOT_UNSUPPORTED)
// where a sweep has no template.
std::vector<KernelSource> generate(const Plan& plan);
// The same for one sweep.
std::vector<KernelSource> generate_sweep(const Plan& plan, int sweep);
// The same as one kernel that also packs a value that the sweep stores, row by row, for the product
// that reads it under a scheme of one packing a row (split, scaled). Nothing where the sweep does
// not own such rows.
std::optional<KernelSource> generate_packing(const Plan& plan, int sweep, ValueId value,
                                             hopper::Scheme scheme);

}  // namespace ingot
