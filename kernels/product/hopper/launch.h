// Host-side description of a product on Hopper: which kernels run, in what order, with which
// template arguments, grids, shared memory, tensor maps and workspace. Plain C++, no CUDA header:
// the run-time encodes the maps and launches, the bench program does the same.
//
// Steps of a plan, in order:
//   1. every entry of `splits` (fills the workspace's packed operands and exponents),
//   2. where slices of K meet in memory, `sliced` (fills the workspace's sums),
//   3. the product kernel.
// All may be launched with programmatic dependent launch: each waits for its predecessors before it
// touches memory, and the product lets its dependents start when its last tiles begin.
#pragma once

#include "product/hopper/args.cuh"
#include "product/hopper/scheme_half.h"
#include "product/hopper/scheme_high.h"
#include "product/hopper/scheme_scaled.h"
#include "product/hopper/scheme_split.h"
#include "product/pack_columns.cuh"

namespace ingot::hopper {

struct SplitStep {
  enum class Operand { x, w } operand = Operand::x;
  // A __device__ function of `header`: split_rows<…>, split_columns<…>, scale_rows<…>, ….
  std::string kernel;
  const char* header = "product/split.cuh";
  unsigned grid = 0, threads = 0;
  unsigned resident = 1;  // blocks that a multiprocessor is to hold, which bounds their registers
  unsigned cluster = 0;   // blocks of a cluster; 0: none
  int block_rows = 1;     // that a block, or a cluster, packs
  size_t shared_bytes = 0;
  int64_t rows = 0, k = 0, row_stride = 0, k_stride = 0;
  int64_t entry_rows = 0, entry_skip = 0;         // of a batch: SplitArgs
  size_t packed_offset = 0, exponent_offset = 0;  // in the workspace
};

// The kernel that multiplies slices of K, whose sums the product kernel adds. It takes the maps of
// w and x, and ProductArgs.
struct SlicedStep {
  std::string kernel;  // of the plan's header and configuration; empty without slices
  unsigned grid = 0, threads = 0, resident = 1;
  size_t shared_bytes = 0;
};

struct ProductPlan {
  Variant variant = Variant::unsupported;
  Scheme scheme = Scheme::split;  // of f32 operands
  std::string reason;             // why none
  double estimated_us = 0, library_us = 0;
  bool library_faster = false;  // fusion and accuracy apart, the library's fp32 product is quicker
  std::string kernel;           // the template that computes it: product_packed, ...
  std::string config;           // its Config argument
  std::string header;           // to include
  unsigned grid = 0, threads = 384, cluster = 1;
  unsigned resident = 1;  // blocks that a multiprocessor is to hold, which bounds their registers
  int slices = 1;
  SlicedStep sliced;
  size_t shared_bytes = 0;
  int tile_samples = 0;  // of all blocks that share a weight's tile
  int64_t sample_tiles = 0;
  int64_t entry_tiles = 0;   // of samples, of one entry of a batch
  int64_t moment_tiles = 0;  // partial statistics of a feature: one a sample tile and slice of K
  int raster_feature_tiles = 0, raster_group = 1, chunks = 0;
  bool tma_store = true;
  TensorMapSpec w_map, x_map, y_map;  // y_map only if tma_store
  std::vector<SplitStep> splits;
  size_t workspace_bytes = 0;  // base aligned to 256
  size_t x_packed_offset = 0, x_exponent_offset = 0, w_packed_offset = 0, w_exponent_offset = 0;
  size_t sums_offset = 0, sums_bytes = 0;  // of slices of K
};

// Of the partial states of one statistic, as the merging kernel finds them one behind the other.
inline size_t partial_bytes(const ProductPlan& plan, int64_t features, bool sum) {
  const size_t state = sum ? sizeof(Sum<float>::State) : sizeof(Moments<float>::State);
  return align_up(size_t(plan.moment_tiles * features) * state, 16);
}

inline const SchemeSpec& scheme_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::scaled:
      return scheme_scaled::kSpec;
    case Scheme::high:
      return scheme_high::kSpec;
    case Scheme::split:
      break;
  }
  return scheme_split::kSpec;
}
inline const SchemeSpec& scheme_of(const ProductShape& shape) {
  return shape.element == Element::f32 ? scheme_of(shape.scheme) : scheme_half::kSpec;
}

// Of 128 bytes, in a packed row.
inline int64_t packed_lines(const SchemeSpec& spec, int64_t k) {
  return divide_up(k, spec.whole_k) * (spec.whole_k / spec.line_k);
}

// Packing of a transposed operand: as few blocks for a strip of 32 rows as can keep it on chip, two
// of them a multiprocessor, so that one reads while the other writes; more blocks where they would
// leave multiprocessors idle.
inline void plan_columns(SplitStep& step, const SchemeSpec& spec, bool clusters) {
  constexpr int64_t kBusy = 256;
  const int most = clusters ? 8 : 1, kept = 64 / spec.line_k, slabs = spec.line_k / 32;
  const int64_t lines = packed_lines(spec, step.k), strips = divide_up(step.rows, 32);
  const auto blocks_of = [&](int warps) {
    int blocks = 1;
    while (blocks < most && blocks * warps * 2 * kept < lines) blocks *= 2;
    return blocks;
  };
  int warps = 8;
  if (blocks_of(warps) * warps * 2 * kept < lines) warps = 16;
  int blocks = blocks_of(warps);
  const int held = blocks * warps * 2 * kept < lines ? 0 : kept;  // 0: longer than that
  while (blocks < most && strips * blocks < kBusy && blocks * warps < lines) blocks *= 2;
  const std::string each = std::to_string(held);
  step.kernel = std::string(spec.pack_columns) + "<" + std::to_string(warps) + ", " + each + ", " +
                each + ">";
  step.threads = unsigned(warps) * 32;
  step.resident = warps == 8 || held == 0 ? 2 : 1;
  step.cluster = blocks > 1 ? unsigned(blocks) : 0;
  step.block_rows = 32;
  step.grid = unsigned(strips * blocks);
  step.shared_bytes = size_t(pack_columns_bytes(warps, slabs, held, held));
}

// Blocks of a cluster share a row only where there are clusters.
inline SplitStep plan_split(SplitStep::Operand operand, int64_t rows, int64_t k,
                            const OperandShape& shape, Scheme scheme, bool clusters) {
  const SchemeSpec& spec = scheme_of(scheme);
  SplitStep step;
  step.header = spec.pack_header;
  step.operand = operand;
  step.rows = rows;
  step.k = k;
  step.row_stride = shape.row_stride;
  step.k_stride = shape.k_stride;
  if (shape.k_stride != 1) {
    plan_columns(step, spec, clusters);
    return step;
  }
  const int64_t pieces = divide_up(k, 32) * 8;
  const int lanes = pieces <= 32 * 8 ? 32 : pieces <= 256 * 8 ? 256 : 1024;
  const int64_t loads = divide_up(pieces, spec.vectors);
  int held = 1;
  while (held <= spec.most_loads && int64_t(held) * lanes < loads) held *= 2;
  if (held > spec.most_loads) held = 0;  // longer than the registers of a block: read twice
  step.kernel = std::string(spec.pack_rows) + "<" + std::to_string(lanes) + ", " +
                std::to_string(held) + ", " + (shape.vector_rows(k) ? "true" : "false") + ">";
  step.threads = unsigned(std::max(lanes, 256));
  step.block_rows = int(step.threads) / lanes;
  step.grid = unsigned(divide_up(rows, step.block_rows));
  return step;
}

inline size_t packed_bytes(Scheme scheme, int64_t rows, int64_t k) {
  return size_t(rows) * size_t(packed_lines(scheme_of(scheme), k)) * 128;
}

// Adds the packing of an operand to the plan and to its workspace.
inline void add_split(ProductPlan& plan, SplitStep::Operand operand, const ProductShape& shape,
                      bool clusters) {
  const bool is_x = operand == SplitStep::Operand::x;
  const int64_t rows = is_x ? shape.x_rows() : shape.w_rows();
  const int64_t entry_rows = is_x ? shape.m : shape.n;
  const OperandShape& matrix = is_x ? shape.x : shape.w;
  const auto reserve = [&plan](size_t bytes) {
    const size_t offset = plan.workspace_bytes;
    plan.workspace_bytes = align_up(offset + bytes, 256);
    return offset;
  };
  SplitStep step = plan_split(operand, rows, shape.k, matrix, shape.scheme, clusters);
  const int64_t skip = matrix.batch_stride - entry_rows * matrix.row_stride;
  if (rows > entry_rows && skip != 0) {
    step.entry_rows = entry_rows;
    step.entry_skip = skip;
  }
  step.packed_offset = reserve(packed_bytes(shape.scheme, rows, shape.k));
  step.exponent_offset = reserve(size_t(rows) * 4);
  (is_x ? plan.x_packed_offset : plan.w_packed_offset) = step.packed_offset;
  (is_x ? plan.x_exponent_offset : plan.w_exponent_offset) = step.exponent_offset;
  plan.splits.push_back(step);
}

inline TensorMapSpec from(TensorMapSpec::Source source, TensorMapSpec spec) {
  spec.source = source;
  return spec;
}

// Operands that are read as they are, and the result.
inline void add_half_maps(ProductPlan& plan, const ProductShape& shape, const TileChoice& choice) {
  using Source = TensorMapSpec::Source;
  const auto map = [&](Source source, int64_t columns, int64_t rows, int64_t stride, int box_rows) {
    const uint64_t bytes = uint64_t(stride) * 2;
    return TensorMapSpec{
        shape.element, uint64_t(columns), uint64_t(rows), bytes, 64, uint32_t(box_rows), source};
  };
  plan.w_map = map(Source::w, shape.k, shape.n, shape.w.row_stride, 128);
  plan.x_map =
      map(Source::x, shape.k, shape.m, shape.x.row_stride, choice.samples / choice.cluster);
  plan.y_map = map(Source::y, shape.n, shape.m, shape.y_stride, 64);
}

// Operands of which x at least is packed into lines of 64 halves, and the result.
inline void add_split_maps(ProductPlan& plan, const ProductShape& shape, const TileChoice& choice) {
  using Source = TensorMapSpec::Source;
  const auto row_bytes = int64_t(packed_bytes(shape.scheme, 1, shape.k));
  const int x_rows = choice.samples / choice.cluster, w_rows = 128 / choice.sample_blocks;
  const int64_t weights = shape.w_rows();
  plan.x_map = from(shape.x_halves ? Source::x : Source::x_packed,
                    packed_map(row_bytes, shape.x_rows(), x_rows));
  if (is_fused(choice.variant) && !choice.w_along_k) {
    plan.w_map = from(Source::w, columns_map(weights, shape.k, shape.w.k_stride));
  } else if (is_fused(choice.variant)) {
    plan.w_map = from(Source::w, matrix_map(shape.k, weights, shape.w.row_stride, w_rows));
  } else {
    plan.w_map = from(Source::w_packed, packed_map(row_bytes, weights, 128));
  }
  plan.y_map = from(Source::y, matrix_map(shape.n, shape.batches * shape.m, shape.y_stride, 32));
}

// Of its kernel, a template of product/hopper/NAME.cuh.
inline const char* name_of(Variant variant) {
  switch (variant) {
    case Variant::fused_split:
      return "fused_split";
    case Variant::fused_scaled:
      return "fused_scaled";
    case Variant::scaled:
      return "scaled";
    case Variant::crossed:
      return "crossed";
    case Variant::streamed:
      return "streamed";
    case Variant::split_both:
      return "split_both";
    case Variant::half:
      return "half";
    default:
      return "packed";
  }
}

// K of a chunk, and the steps along it as the kernel counts them.
struct Chunk {
  int k, steps;
};
inline Chunk chunk_of(Variant variant) {
  switch (variant) {
    case Variant::portable:
      return {32, 1};
    case Variant::streamed:
      return {kStreamedChunk, 1};
    case Variant::split_both:
      return {kSplitBothChunk, 1};
    case Variant::half:
    case Variant::scaled:
      return {64, 1};
    default:
      return {is_fused(variant) ? 128 : 64, 2};
  }
}
inline int chunks_of(Variant variant, int64_t k) {
  const Chunk chunk = chunk_of(variant);
  return int(divide_up(k, chunk.k) * chunk.steps);
}

// An operand as TMA reads it unpacked, in boxes of 32 of K; along its rows in the order of
// TensorMapSpec::eights, but for samples that threads convert, one each.
inline TensorMapSpec unpacked_map(TensorMapSpec::Source source, const OperandShape& operand,
                                  int64_t rows, int tile, const ProductShape& shape,
                                  Variant variant) {
  const bool in_order = variant == Variant::split_both && source == TensorMapSpec::Source::x;
  TensorMapSpec spec = operand.k_stride == 1 ? matrix_map(shape.k, rows, operand.row_stride, tile)
                       : in_order            ? matrix_map(rows, shape.k, operand.k_stride, 32)
                                             : columns_map(rows, shape.k, operand.k_stride);
  if (shape.batches > 1) {
    spec.entries = operand.batch_stride == 0 ? 1 : uint64_t(shape.batches);
    spec.entry_bytes = operand.batch_stride == 0 ? 16 : uint64_t(operand.batch_stride) * 4;
  }
  return from(source, spec);
}

inline ProductPlan unpacked_plan(const ProductShape& shape, const TileChoice& choice,
                                 const DeviceLimits& device) {
  using Source = TensorMapSpec::Source;
  ProductPlan plan;
  plan.variant = choice.variant;
  plan.tma_store = false;
  plan.config = config_text(choice, false);
  plan.shared_bytes = shared_bytes(choice);
  plan.tile_samples = choice.samples;
  plan.entry_tiles = divide_up(shape.m, choice.samples);
  plan.sample_tiles = shape.batches * plan.entry_tiles;
  // Of a block's samples, those of a part have a partial statistic of their own.
  plan.moment_tiles = shape.batches * divide_up(shape.m, unpacked_part_samples(choice));
  plan.raster_feature_tiles = int(divide_up(shape.n, choice.features));
  plan.raster_group = std::min(choice.raster_group, plan.raster_feature_tiles);
  const bool streamed = choice.variant == Variant::streamed;
  const std::string name = name_of(choice.variant);
  plan.kernel = "product_" + name;
  plan.header = "product/hopper/" + name + ".cuh";
  plan.threads = unsigned(streamed ? 128 + 32 * streamed_warps(choice) : kSplitBothThreads);
  plan.resident = unsigned(streamed ? streamed_resident(choice) : 1);
  plan.chunks = chunks_of(choice.variant, shape.k);
  plan.slices = choice.slices;
  plan.w_map = unpacked_map(Source::w, shape.w, shape.n, choice.features, shape, choice.variant);
  plan.x_map = unpacked_map(Source::x, shape.x, shape.m, choice.samples, shape, choice.variant);
  const int64_t tiles = tiles_of(shape, choice);
  plan.grid = unsigned(
      std::min(tiles * choice.slices, int64_t(device.multiprocessors) * int64_t(plan.resident)));
  if (!merges(choice)) return plan;
  plan.sliced = {name + "_slices", plan.grid, plan.threads, plan.resident, plan.shared_bytes};
  const int64_t tile_values = int64_t(choice.features) * choice.samples;
  plan.kernel = "product_merged";
  plan.threads = kMergeThreads;
  plan.resident = 1;
  plan.shared_bytes = 0;
  plan.grid = unsigned(tiles * tile_values / (16 * merged_samples(choice)));
  plan.sums_bytes = size_t(tiles * choice.slices * tile_values) * 4;
  plan.workspace_bytes = align_up(plan.sums_bytes, 256);
  return plan;
}

// Fills in everything that follows from the choice of tile.
inline ProductPlan plan_with(const ProductShape& shape, const TileChoice& choice,
                             const DeviceLimits& device) {
  if (shape.scheme == Scheme::high && choice.variant != Variant::crossed) {
    return plan_with(as_split(shape), choice, device);
  }
  if (is_unpacked(choice.variant)) return unpacked_plan(shape, choice, device);
  ProductPlan plan;
  plan.variant = choice.variant;
  plan.scheme = shape.scheme;
  // A box must not reach into the next entry of a batch.
  const bool whole_tiles = shape.batches == 1 || shape.m % choice.samples == 0;
  plan.tma_store = stores_by_tma(shape) && choice.slices == 1 && whole_tiles;
  const std::string name = name_of(choice.variant);
  plan.kernel = "product_" + name;
  plan.header = "product/hopper/" + name + ".cuh";
  plan.config = config_text(choice, plan.tma_store);
  TileChoice stored = choice;
  if (!plan.tma_store && choice.variant != Variant::half) stored.staging = 0;
  plan.shared_bytes = shared_bytes(stored);
  plan.cluster = unsigned(cluster_of(choice));
  plan.tile_samples = choice.samples * choice.sample_blocks;
  plan.entry_tiles = divide_up(shape.m, plan.tile_samples);
  plan.sample_tiles = shape.batches * plan.entry_tiles;
  plan.moment_tiles = plan.sample_tiles * choice.sample_blocks * choice.slices;
  plan.raster_feature_tiles = int(divide_up(shape.n, 128 * choice.cluster));
  plan.raster_group = std::min(choice.raster_group, plan.raster_feature_tiles);
  plan.chunks = chunks_of(choice.variant, shape.k);
  plan.slices = choice.slices;
  plan.grid = unsigned(persistent_blocks(tiles_of(shape, choice), cluster_of(choice), choice.slices,
                                         device.multiprocessors));

  if (choice.variant == Variant::half) {
    add_half_maps(plan, shape, choice);
    return plan;
  }
  if (!shape.x_halves) add_split(plan, SplitStep::Operand::x, shape, true);
  if (!is_fused(choice.variant) && !shape.weight_packed) {
    add_split(plan, SplitStep::Operand::w, shape, true);
  }
  add_split_maps(plan, shape, choice);
  return plan;
}

inline std::vector<TileChoice> tile_choices(const ProductShape& shape, const DeviceLimits& device) {
  std::vector<TileChoice> choices = scheme_of(shape).tiles(shape, device);
  for (TileChoice& choice : choices) choice.batched = shape.batches > 1;
  return choices;
}

// Whether a result can be handed on as halves, and of which K a product takes them.
inline bool can_be_halves(int64_t features) {
  return features % kFactorFeatures == 0;
}
// Samples of a row of factors.
inline int64_t factor_rows(int64_t samples) {
  return divide_up(samples, 8) * 8;
}
inline size_t factor_bytes(int64_t samples, int64_t features) {
  return size_t(factor_rows(samples) * (features / kFactorFeatures)) * 4;
}
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  return scheme_of(shape).estimate(shape, c, device);
}
inline double estimate_library(const ProductShape& shape) {
  return scheme_of(shape).estimate_library(shape);
}

// With what it and the library are estimated to take.
inline ProductPlan estimated_plan(const ProductShape& shape, const TileChoice& choice,
                                  const DeviceLimits& device) {
  ProductPlan plan = plan_with(shape, choice, device);
  plan.estimated_us = estimate(shape, choice, device);
  plan.library_us = estimate_library(shape);
  plan.library_faster = plan.library_us < plan.estimated_us;
  return plan;
}

// In the place of a tile that has operands packed, one about as fast that has none: a module's
// activations lie beside what is packed. Of any program's products, time alone counts.
inline const TileChoice* without_packing(const std::vector<TileChoice>& choices,
                                         const TileChoice* best, const ProductShape& shape,
                                         const DeviceLimits& device) {
  constexpr double kAboutAsFast = 1.08;
  constexpr size_t kMuch = size_t{32} << 20;
  if (shape.unpacked != Unpacked::whole || is_unpacked(best->variant)) return best;
  if (plan_with(shape, *best, device).workspace_bytes < kMuch) return best;
  const double most = kAboutAsFast * estimate(shape, *best, device);
  for (const TileChoice& c : choices) {
    if (is_unpacked(c.variant) && estimate(shape, c, device) <= most) return &c;
  }
  return best;
}

inline ProductPlan plan_product(const ProductShape& shape, const DeviceLimits& device) {
  ProductPlan plan;
  if (shape.m <= 0 || shape.n <= 0 || shape.k <= 0) {
    plan.reason = "an extent is zero";
    return plan;
  }
  const int64_t most_rows = INT32_MAX / 2 / shape.batches;
  if (shape.m > most_rows || shape.n > most_rows || shape.k > INT32_MAX / 4) {
    plan.reason = "an extent exceeds 2^29";
    return plan;
  }
  if (shape.batches > 1 && (shape.element != Element::f32 || shape.scheme == Scheme::scaled)) {
    plan.reason = "its weight differs from sample to sample";
    return plan;
  }
  constexpr int64_t kLeastRows = 32;  // a batch of thin matrices is read, hardly multiplied
  if (shape.batches > 1 && std::min(shape.m, shape.n) < kLeastRows) {
    plan.reason = "its matrices are thin";
    plan.library_us = estimate_library(shape);
    plan.library_faster = true;
    return plan;
  }
  const int64_t most_terms = scheme_of(shape).most_terms;
  if (shape.k > most_terms) {
    plan.reason = "its sums are longer than " + std::to_string(most_terms) + " terms";
    return plan;
  }
  const bool rows_fit =
      shape.x.tensor_map_rows(shape.element) && shape.w.tensor_map_rows(shape.element);
  if (shape.element != Element::f32 && !rows_fit) {
    plan.reason = "its rows are not contiguous in K or not whole pieces of 16 bytes";
    return plan;
  }
  const std::vector<TileChoice> choices = tile_choices(shape, device);
  if (choices.empty()) {
    plan.reason = "no tile takes packed weights that differ from sample to sample";
    return plan;
  }
  const TileChoice* best = nullptr;
  double least = 0;
  for (const TileChoice& c : choices) {
    const double time = estimate(shape, c, device);
    if (best == nullptr || time < least) best = &c, least = time;
  }
  return estimated_plan(shape, *without_packing(choices, best, shape, device), device);
}

// Numbers of samples that between them are served by every kernel that any number is served by: a
// change of batch size then never waits for a compiler.
inline std::vector<int64_t> representative_samples(ProductShape shape, const DeviceLimits& device) {
  constexpr int64_t kTile = 64, kFine = 64 * kTile, kMost = 16 * kFine;
  std::vector<int64_t> samples;
  std::vector<std::string> seen;
  const auto next = [](int64_t m) { return m < kFine ? m + kTile : m + m / (4 * kTile) * kTile; };
  for (shape.m = kTile; shape.m <= kMost; shape.m = next(shape.m)) {
    const ProductPlan plan = plan_product(shape, device);
    const std::string config = plan.kernel + plan.config;
    if (std::find(seen.begin(), seen.end(), config) != seen.end()) continue;
    seen.push_back(config);
    samples.push_back(shape.m);
  }
  return samples;
}

// The same for a batch of products, by their number.
inline std::vector<int64_t> representative_batches(ProductShape shape, const DeviceLimits& device) {
  std::vector<int64_t> batches;
  std::vector<std::string> seen;
  for (shape.batches = 2; shape.batches <= 4096; shape.batches *= 2) {
    const std::string config = plan_product(shape, device).config;
    if (std::find(seen.begin(), seen.end(), config) != seen.end()) continue;
    seen.push_back(config);
    batches.push_back(shape.batches);
  }
  return batches;
}

// What kernels are passed, but for addresses.
inline ProductArgs args_of(const ProductPlan& plan, const ProductShape& shape) {
  ProductArgs args = {};
  if (shape.element == Element::f32) {
    args.x = {nullptr, shape.x.row_stride, shape.x.k_stride};
    args.w = {nullptr, shape.w.row_stride, shape.w.k_stride};
  }
  args.y_stride = shape.y_stride;
  args.m = i32(shape.m);
  args.n = i32(shape.n);
  args.k = i32(shape.k);
  args.chunks = plan.chunks;
  args.raster = {plan.raster_feature_tiles, i32(plan.sample_tiles), plan.raster_group};
  args.slices = plan.slices;
  if (shape.x_halves || shape.y_halves) args.factor_rows = i32(factor_rows(shape.m));
  if (shape.batches > 1) {
    args.entry_tiles = i32(plan.entry_tiles);
    args.x_entry_rows = shape.shares_samples() ? 0 : args.m;
    args.x_entry_stride = shape.x.batch_stride;
    args.w_entry_stride = shape.w.batch_stride;
  }
  return args;
}

inline SplitArgs args_of(const SplitStep& step) {
  SplitArgs args = {};
  args.row_stride = step.row_stride;
  args.k_stride = step.k_stride;
  args.rows = i32(step.rows);
  args.k = i32(step.k);
  args.entry_rows = i32(step.entry_rows);
  args.entry_skip = step.entry_skip;
  return args;
}

}  // namespace ingot::hopper
