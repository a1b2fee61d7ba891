// Host-side description of a product on Hopper: which kernels run, in what order, with which
// template arguments, grids, shared memory, tensor maps and workspace. Plain C++, no CUDA header:
// the run-time encodes the maps and launches, the bench program does the same.
//
// Steps of a plan, in order:
//   1. every entry of `splits` (fills the workspace's packed operands and exponents),
//   2. the product kernel.
// All may be launched with programmatic dependent launch: each waits for its predecessors before it
// touches memory, and the product lets its dependents start when its last tiles begin.
#pragma once

#include <string>
#include <vector>

#include "product/hopper/cost.h"

namespace ingot::hopper {

// A two-dimensional tensor map with the 128-byte swizzle, 32-bit element strides of one.
struct TensorMapSpec {
  enum class Source { w, x, y, x_packed, w_packed } source = Source::w;
  Element element = Element::f32;
  uint64_t columns = 0, rows = 0;
  uint64_t row_bytes = 0;  // multiple of 16
  uint32_t box_columns = 0, box_rows = 0;
};

struct SplitStep {
  enum class Operand { x, w } operand = Operand::x;
  // A __device__ function of `header`: split_rows<…>, split_columns<…>, scale_rows<…>, ….
  std::string kernel;
  const char* header = "product/split.cuh";
  unsigned grid = 0, threads = 0;
  int64_t rows = 0, k = 0, row_stride = 0, k_stride = 0;
  size_t packed_offset = 0, exponent_offset = 0;  // in the workspace
};

struct ProductPlan {
  Variant variant = Variant::unsupported;
  std::string reason;  // why none
  double estimated_us = 0, library_us = 0;
  bool library_faster = false;  // fusion and accuracy apart, the library's fp32 product is quicker
  std::string kernel;           // the template that computes it: product_packed, ...
  std::string config;           // its Config argument
  std::string header;           // to include
  unsigned grid = 0, threads = 384, cluster = 1;
  size_t shared_bytes = 0;
  int samples_per_tile = 0, features_per_tile = 128;
  int64_t sample_tiles = 0;
  int64_t moment_tiles = 0;  // partial statistics of a feature: one a sample tile and slice of K
  int raster_feature_tiles = 0, raster_group = 1, chunks = 0;
  bool tma_store = true;
  TensorMapSpec w_map, x_map, y_map;  // y_map only if tma_store
  std::vector<SplitStep> splits;
  size_t workspace_bytes = 0;  // base aligned to 256
  size_t x_packed_offset = 0, x_exponent_offset = 0, w_packed_offset = 0, w_exponent_offset = 0;
};

inline SplitStep plan_split(SplitStep::Operand operand, int64_t rows, int64_t k,
                            const OperandShape& shape, Scheme scheme = Scheme::split) {
  const bool scaled = scheme == Scheme::scaled;
  SplitStep step;
  if (scaled) step.header = "product/scaled_rows.cuh";
  step.operand = operand;
  step.rows = rows;
  step.k = k;
  step.row_stride = shape.row_stride;
  step.k_stride = shape.k_stride;
  if (shape.k_stride != 1) {
    step.kernel = scaled ? "scale_columns<16>" : "split_columns<16>";
    step.threads = 512;
    step.grid = unsigned(divide_up(rows, 32));
    return step;
  }
  const std::string vectors = shape.vector_rows(k) ? "true" : "false";
  const int64_t pieces = divide_up(k, 32) * 8;
  const int lanes = pieces <= 32 * 8 ? 32 : pieces <= 256 * 8 ? 256 : 1024;
  // Of what a lane loads at once: vectors or, scaled, pairs of them.
  const int64_t count = scaled ? divide_up(pieces, 2) : pieces;
  const int most = scaled ? 4 : 8;
  int held = 1;
  while (held <= most && int64_t(held) * lanes < count) held *= 2;
  if (held > most) held = 0;  // longer than the registers of a block: read twice
  step.kernel = (scaled ? "scale_rows<" : "split_rows<") + std::to_string(lanes) + ", " +
                std::to_string(held) + ", " + vectors + ">";
  step.threads = unsigned(std::max(lanes, 256));
  step.grid = unsigned(divide_up(rows, step.threads / unsigned(lanes)));
  return step;
}

// Bytes of a packed operand: lines of 128 for 32 of k or, of one value an element, 64.
inline size_t packed_bytes(Scheme scheme, int64_t rows, int64_t k) {
  return size_t(rows) * size_t(divide_up(k, scheme == Scheme::scaled ? 64 : 32)) * 128;
}

// Adds the packing of an operand to the plan and to its workspace.
inline void add_split(ProductPlan& plan, SplitStep::Operand operand, const ProductShape& shape) {
  const bool is_x = operand == SplitStep::Operand::x;
  const int64_t rows = is_x ? shape.m : shape.n;
  const auto reserve = [&plan](size_t bytes) {
    const size_t offset = plan.workspace_bytes;
    plan.workspace_bytes = align_up(offset + bytes, 256);
    return offset;
  };
  SplitStep step = plan_split(operand, rows, shape.k, is_x ? shape.x : shape.w, shape.scheme);
  step.packed_offset = reserve(packed_bytes(shape.scheme, rows, shape.k));
  step.exponent_offset = reserve(size_t(rows) * 4);
  (is_x ? plan.x_packed_offset : plan.w_packed_offset) = step.packed_offset;
  (is_x ? plan.x_exponent_offset : plan.w_exponent_offset) = step.exponent_offset;
  plan.splits.push_back(step);
}

inline TensorMapSpec tensor_map(TensorMapSpec::Source source, Element element, int64_t columns,
                                int64_t rows, int64_t row_elements, int box_columns, int box_rows) {
  return {source,
          element,
          uint64_t(columns),
          uint64_t(rows),
          uint64_t(row_elements * size_of(element)),
          uint32_t(box_columns),
          uint32_t(box_rows)};
}

// Operands that are read as they are, and the result.
inline void add_half_maps(ProductPlan& plan, const ProductShape& shape, const TileChoice& choice) {
  using Source = TensorMapSpec::Source;
  const Element e = shape.element;
  const int x_rows = choice.samples / choice.cluster;
  plan.w_map = tensor_map(Source::w, e, shape.k, shape.n, shape.w.row_stride, 64, 128);
  plan.x_map = tensor_map(Source::x, e, shape.k, shape.m, shape.x.row_stride, 64, x_rows);
  plan.y_map = tensor_map(Source::y, e, shape.n, shape.m, shape.y_stride, 64, 64);
}

// Operands of which x at least is packed into lines of 64 halves, and the result.
inline void add_split_maps(ProductPlan& plan, const ProductShape& shape, const TileChoice& choice) {
  using Source = TensorMapSpec::Source;
  const int64_t packed = int64_t(packed_bytes(shape.scheme, 1, shape.k)) / 2;
  const int x_rows = choice.samples / choice.cluster, w_rows = 128 / choice.sample_blocks;
  plan.x_map = tensor_map(Source::x_packed, Element::f16, packed, shape.m, packed, 64, x_rows);
  if (choice.variant == Variant::fused_split || choice.variant == Variant::fused_scaled) {
    plan.w_map =
        tensor_map(Source::w, Element::f32, shape.k, shape.n, shape.w.row_stride, 32, w_rows);
  } else {
    plan.w_map = tensor_map(Source::w_packed, Element::f16, packed, shape.n, packed, 64, 128);
  }
  plan.y_map = tensor_map(Source::y, Element::f32, shape.n, shape.m, shape.y_stride, 32, 32);
}

// Fills in everything that follows from the choice of tile.
inline ProductPlan plan_with(const ProductShape& shape, const TileChoice& choice,
                             const DeviceLimits& device) {
  ProductPlan plan;
  const bool scaled = shape.scheme == Scheme::scaled && shape.element == Element::f32;
  const bool fused =
      choice.variant == Variant::fused_split || choice.variant == Variant::fused_scaled;
  plan.variant = choice.variant;
  plan.tma_store = stores_by_tma(shape) && choice.slices == 1;
  const bool half = choice.variant == Variant::half;
  const std::string name = half     ? "half"
                           : scaled ? (fused ? "fused_scaled" : "scaled")
                                    : (fused ? "fused_split" : "packed");
  plan.kernel = "product_" + name;
  plan.header = "product/hopper/" + name + ".cuh";
  plan.config = config_text(choice, plan.tma_store);
  TileChoice stored = choice;
  if (!plan.tma_store) stored.staging = 0;
  plan.shared_bytes = shared_bytes(stored);
  const int cluster = choice.cluster * choice.sample_blocks;
  plan.cluster = unsigned(cluster * choice.slices);
  plan.samples_per_tile = choice.samples;
  plan.sample_tiles = divide_up(shape.m, choice.samples * choice.sample_blocks);
  plan.moment_tiles = plan.sample_tiles * choice.sample_blocks * choice.slices;
  plan.raster_feature_tiles = int(divide_up(shape.n, 128 * choice.cluster));
  plan.raster_group = std::min(choice.raster_group, plan.raster_feature_tiles);
  plan.chunks = int(half || (scaled && !fused) ? divide_up(shape.k, 64)
                                               : divide_up(shape.k, fused ? 128 : 64) * 2);
  const int64_t tiles = tiles_of(shape, choice);
  // Blocks are persistent, but those of a shared tile, whose rings become exchange buffers.
  plan.grid = choice.slices > 1
                  ? unsigned(tiles * choice.slices)
                  : unsigned(std::min(tiles, cluster_slots(choice, device)) * cluster);

  if (half) {
    add_half_maps(plan, shape, choice);
    return plan;
  }
  add_split(plan, SplitStep::Operand::x, shape);
  if (!fused && !shape.weight_packed) add_split(plan, SplitStep::Operand::w, shape);
  add_split_maps(plan, shape, choice);
  return plan;
}

inline TileChoice fused_scaled_tile(int samples, int sample_blocks, int slices = 1) {
  const int weight_stages = samples == 256 ? 3 : 4;
  const int sample_stages = samples == 256 ? 3 : samples == 128 ? 5 : 8;
  return {Variant::fused_scaled, samples,      1, weight_stages, sample_stages, 0, 8, 1, slices,
          Element::f32,          sample_blocks};
}

inline std::vector<TileChoice> scaled_tile_choices(const ProductShape& shape,
                                                   const DeviceLimits& device) {
  std::vector<TileChoice> choices = {{Variant::scaled, 128, 1, 6, 6, 1, 8}};
  // Stores without TMA's help take registers that large tiles have not.
  const bool roomy = stores_by_tma(shape) || !shape.stores_result;
  // At 256 samples an epilogue with batch norm's operands would spill registers.
  if (roomy) choices.push_back({Variant::scaled, 192, 2, 4, 4, 2, 8});
  if (!shape.w.vector_rows(shape.k) || shape.weight_packed) return choices;
  choices.push_back(fused_scaled_tile(64, 1));
  if (roomy) {
    choices.push_back(fused_scaled_tile(128, 1));
    choices.push_back(fused_scaled_tile(128, 2));
    choices.push_back(fused_scaled_tile(256, 2));
  }
  for (const int slices : {2, 4, 8}) {
    if (divide_up(shape.k, 128) < slices) break;
    for (const int samples : {64, 128}) {
      const TileChoice c = fused_scaled_tile(samples, 1, slices);
      if (tiles_of(shape, c) <= cluster_slots(c, device)) choices.push_back(c);
    }
  }
  return choices;
}

inline std::vector<TileChoice> tile_choices(const ProductShape& shape, const DeviceLimits& device) {
  if (shape.element == Element::f32 && shape.scheme == Scheme::scaled) {
    return scaled_tile_choices(shape, device);
  }
  if (shape.element != Element::f32) {
    const Element e = shape.element;
    return {{Variant::half, 256, 2, 4, 4, 2, 8, 1, 1, e},
            {Variant::half, 128, 2, 6, 6, 2, 8, 1, 1, e}};
  }
  std::vector<TileChoice> choices = {{Variant::packed, 128, 1, 6, 6, 2, 8},
                                     {Variant::packed, 160, 1, 5, 5, 2, 8},
                                     {Variant::packed, 192, 2, 5, 5, 1, 8}};
  if (shape.w.vector_rows(shape.k) && !shape.weight_packed) {
    // Summing 128 of K instead of 64 is 1.5% faster; the coarser rounding (4e-7 instead of 2e-7)
    // still lies below the library's where sums are this long.
    const int promotion = shape.k >= 8192 ? 2 : 1;
    const TileChoice thin = {Variant::fused_split, 64, 1, 3, 6, 0, 8, 1};
    if (shape.m <= 64 || tiles_of(shape, thin) <= device.multiprocessors) choices.push_back(thin);
    choices.push_back({Variant::fused_split, 128, 1, 3, 4, 0, 8, promotion});
    for (const int slices : {2, 4, 8}) {
      if (divide_up(shape.k, 128) < slices) break;
      for (const TileChoice& c :
           {TileChoice{Variant::fused_split, 64, 1, 3, 6, 0, 8, 1, slices},
            TileChoice{Variant::fused_split, 128, 1, 3, 4, 0, 8, 1, slices}}) {
        if (tiles_of(shape, c) <= cluster_slots(c, device)) choices.push_back(c);
      }
    }
  } else if (const TileChoice thin = {Variant::packed, 64, 1, 8, 8, 1, 8};
             tiles_of(shape, thin) <= device.multiprocessors) {
    choices.push_back(thin);
  }
  return choices;
}

inline ProductPlan plan_product(const ProductShape& shape, const DeviceLimits& device) {
  ProductPlan plan;
  if (shape.m <= 0 || shape.n <= 0 || shape.k <= 0) {
    plan.reason = "an extent is zero";
    return plan;
  }
  if (shape.m > INT32_MAX / 2 || shape.n > INT32_MAX / 2 || shape.k > INT32_MAX / 4) {
    plan.reason = "an extent exceeds 2^29";
    return plan;
  }
  // A sum stays in the tensor core, which rounds it towards zero: of more positive terms than these
  // that would exceed what rounding the operands costs.
  constexpr int64_t kMostScaledTerms = 1 << 15;
  if (shape.element == Element::f32 && shape.scheme == Scheme::scaled &&
      shape.k > kMostScaledTerms) {
    plan.reason = "its sums are longer than 32768 terms";
    return plan;
  }
  const bool rows_fit = shape.x.tensor_map_rows(shape.element) &&
                        shape.w.tensor_map_rows(shape.element) &&
                        (!shape.stores_result || (shape.y_aligned && shape.y_stride % 8 == 0));
  if (shape.element != Element::f32 && !rows_fit) {
    plan.reason = "its rows are not contiguous in K or not whole pieces of 16 bytes";
    return plan;
  }
  const std::vector<TileChoice> choices = tile_choices(shape, device);
  const TileChoice* best = nullptr;
  double least = 0;
  for (const TileChoice& c : choices) {
    const double time = estimate(shape, c, device);
    if (best == nullptr || time < least) best = &c, least = time;
  }
  const double library = estimate_library(shape);
  plan = plan_with(shape, *best, device);
  plan.estimated_us = least;
  plan.library_us = library;
  plan.library_faster = library < least;
  return plan;
}

// Numbers of samples that between them are served by every kernel that any number is served by: a
// change of batch size then never waits for a compiler.
inline std::vector<int64_t> representative_samples(ProductShape shape, const DeviceLimits& device) {
  constexpr int64_t kTile = 64, kFine = 64 * kTile, kMost = 16 * kFine;
  std::vector<int64_t> samples;
  std::vector<std::string> seen;
  for (shape.m = kTile; shape.m <= kMost; shape.m += shape.m < kFine ? kTile : shape.m) {
    const std::string config = plan_product(shape, device).config;
    if (std::find(seen.begin(), seen.end(), config) != seen.end()) continue;
    seen.push_back(config);
    samples.push_back(shape.m);
  }
  return samples;
}

}  // namespace ingot::hopper
