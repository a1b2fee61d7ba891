// Host-side description of a product on Hopper: which kernels run, in what order, with which
// template arguments, grids, shared memory, tensor maps and workspace. Plain C++, no CUDA header:
// the run-time encodes the maps and launches, the bench program does the same.
//
// y[m, n] = Σ_k x[m, k] · w[n, k]. x and w are described by strides in elements, so that x @ Wᵀ
// (w.k_stride = 1), x @ W (w.row_stride = 1) and xᵀ @ y (x.row_stride = 1 too) are one case.
//
// Steps of a plan, in order:
//   1. every entry of `splits` (fills the workspace's packed operands and exponents),
//   2. the product kernel.
// All may be launched with programmatic dependent launch: each waits for its predecessors before it
// touches memory, and the product lets its dependents start when its last tiles begin.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace ingot::hopper {

// Of matrices in memory. fp32 products are made from fp16 halves, the others from what is there.
enum class Element { f32, f16, bf16 };

inline int size_of(Element element) {
  return element == Element::f32 ? 4 : 2;
}
// cuda.h's number (CUtensorMapDataType).
inline int tensor_map_type(Element element) {
  return element == Element::f32 ? 7 : element == Element::f16 ? 6 : 9;
}

enum class Variant {
  fused_split,  // fp32 weight split inside the product; only x is packed beforehand
  packed,       // both operands packed beforehand
  half,         // fp16 or bf16 operands as they are
  portable,     // the same without Hopper's own instructions (portable/launch.h)
  unsupported,  // the shape does not fit: use the library
};

struct OperandShape {
  int64_t row_stride = 0, k_stride = 1;  // elements
  bool aligned = true;                   // the pointer is a multiple of 16 bytes
  // TMA and vector loads read fp32 rows in pieces of 16 bytes.
  bool vector_rows(int64_t k) const {
    return aligned && k_stride == 1 && row_stride % 4 == 0 && k % 4 == 0;
  }
  // Rows that TMA reads without help from vector loads.
  bool tensor_map_rows(Element element) const {
    return aligned && k_stride == 1 && row_stride * size_of(element) % 16 == 0;
  }
};

struct ProductShape {
  int64_t m = 0, n = 0, k = 0;
  OperandShape x, w;
  int64_t y_stride = 0;
  bool y_aligned = true;  // of the result's pointer, to 16 bytes
  bool stores_result = true;
  bool weight_packed = false;      // frozen weights: packed once, kept by the caller
  Element element = Element::f32;  // of x, w and y
};

struct DeviceLimits {
  int multiprocessors = 132;
  int max_clusters_of_two = 66;  // cuOccupancyMaxActiveClusters; less where a GPC has an odd count
};

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
  // A __device__ function of product/split.cuh: split_rows<…>, split_columns<…>.
  std::string kernel;
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

// A tile shape and pipeline that was measured; docs/kernel-log.md says how each came out.
struct TileChoice {
  Variant variant;
  int samples;  // of a tile
  int cluster;
  int weight_stages, sample_stages;  // packed: `sample_stages` is the ring's depth
  int staging;                       // packed: buffers for TMA stores
  int raster_group;                  // feature tiles (clusters of them) a group
  int promotion = 1;  // fused: chunks of 64 of K that wgmma sums before they are promoted
  int slices = 1;     // fused: blocks that share a tile, each with its part of K
  Element element = Element::f32;  // half: of the operands
};

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline size_t align_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// Tiles that are under way at once. A cluster lies in one GPC, and which GPCs lack multiprocessors
// differs from chip to chip: 32 clusters of four, or 16 of eight, were seen not to fit into 132.
inline int64_t cluster_slots(const TileChoice& c, const DeviceLimits& device) {
  constexpr int kSpread = 18;  // multiprocessors that may lie beyond the last whole cluster
  const int blocks = c.cluster * c.slices;
  if (blocks == 1) return device.multiprocessors;
  if (blocks == 2) return device.max_clusters_of_two;
  return std::max(1, (device.multiprocessors - kSpread) / blocks);
}

// Clusters' worth of tiles of the result.
inline int64_t tiles_of(const ProductShape& shape, const TileChoice& c) {
  return divide_up(shape.m, c.samples) * divide_up(shape.n, 128 * c.cluster);
}

inline size_t shared_bytes(const TileChoice& c) {
  // Of one warpgroup, where operands are split: exponents of the samples, and of its 64 features
  // where they are packed too.
  const int exponents = c.variant == Variant::half     ? 0
                        : c.variant == Variant::packed ? c.samples + 64
                                                       : c.samples;
  const size_t table = size_t(exponents) * 4;
  if (c.variant == Variant::fused_split) {
    return 1024 + size_t(c.weight_stages) * 128 * 256 +
           size_t(c.sample_stages) * size_t(c.samples) * 256 + 2 * table +
           16 * size_t(c.weight_stages + c.sample_stages);
  }
  return 1024 + size_t(c.sample_stages) * size_t(128 + c.samples) * 128 +
         2 * size_t(c.staging) * 8192 + 2 * table + 16 * size_t(c.sample_stages);
}

inline std::string config_text(const TileChoice& c, bool tma_store) {
  const auto number = [](int v) { return std::to_string(v); };
  if (c.variant == Variant::fused_split) {
    return "FusedSplitConfig<" + number(c.samples) + ", " + number(c.weight_stages) + ", " +
           number(c.sample_stages) + ", " + (tma_store ? "true" : "false") + ", " +
           number(c.promotion) + (c.slices > 1 ? ", " + number(c.slices) : "") + ">";
  }
  if (c.variant == Variant::half) {
    return std::string("HalfConfig<ingot::") + (c.element == Element::bf16 ? "bf16" : "f16") +
           ", " + number(c.samples) + ", " + number(c.cluster) + ", " + number(c.sample_stages) +
           ", " + number(c.staging) + ">";
  }
  return "PackedConfig<" + number(c.samples) + ", " + number(c.cluster) + ", " +
         number(c.sample_stages) + ", " + number(tma_store ? c.staging : 0) + ">";
}

inline SplitStep plan_split(SplitStep::Operand operand, int64_t rows, int64_t k,
                            const OperandShape& shape) {
  SplitStep step;
  step.operand = operand;
  step.rows = rows;
  step.k = k;
  step.row_stride = shape.row_stride;
  step.k_stride = shape.k_stride;
  if (shape.k_stride != 1) {
    step.kernel = "split_columns<16>";
    step.threads = 512;
    step.grid = unsigned(divide_up(rows, 32));
    return step;
  }
  const std::string vectors = shape.vector_rows(k) ? "true" : "false";
  const int64_t pieces = divide_up(k, 32) * 8;
  const int lanes = pieces <= 32 * 8 ? 32 : pieces <= 256 * 8 ? 256 : 1024;
  int held = 1;
  while (held <= 8 && int64_t(held) * lanes < pieces) held *= 2;
  if (held > 8) held = 0;  // longer than the registers of a block: read twice
  step.kernel =
      "split_rows<" + std::to_string(lanes) + ", " + std::to_string(held) + ", " + vectors + ">";
  step.threads = unsigned(std::max(lanes, 256));
  step.grid = unsigned(divide_up(rows, step.threads / unsigned(lanes)));
  return step;
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
  SplitStep step = plan_split(operand, rows, shape.k, is_x ? shape.x : shape.w);
  step.packed_offset = reserve(size_t(rows) * size_t(divide_up(shape.k, 32)) * 128);
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

// Operands of which x at least is packed into lines of 64 halves for 32 of K, and the result.
inline void add_split_maps(ProductPlan& plan, const ProductShape& shape, const TileChoice& choice) {
  using Source = TensorMapSpec::Source;
  const int64_t packed = divide_up(shape.k, 32) * 64;
  const int x_rows = choice.samples / choice.cluster;
  plan.x_map = tensor_map(Source::x_packed, Element::f16, packed, shape.m, packed, 64, x_rows);
  if (choice.variant == Variant::fused_split) {
    plan.w_map = tensor_map(Source::w, Element::f32, shape.k, shape.n, shape.w.row_stride, 32, 128);
  } else {
    plan.w_map = tensor_map(Source::w_packed, Element::f16, packed, shape.n, packed, 64, 128);
  }
  plan.y_map = tensor_map(Source::y, Element::f32, shape.n, shape.m, shape.y_stride, 32, 32);
}

// Fills in everything that follows from the choice of tile.
inline ProductPlan plan_with(const ProductShape& shape, const TileChoice& choice,
                             const DeviceLimits& device) {
  ProductPlan plan;
  const bool fused = choice.variant == Variant::fused_split;
  plan.variant = choice.variant;
  plan.tma_store =
      shape.stores_result && shape.y_aligned && shape.y_stride % 4 == 0 && choice.slices == 1;
  const bool half = choice.variant == Variant::half;
  plan.kernel = half ? "product_half" : fused ? "product_fused_split" : "product_packed";
  plan.header = half    ? "product/hopper/half.cuh"
                : fused ? "product/hopper/fused_split.cuh"
                        : "product/hopper/packed.cuh";
  plan.config = config_text(choice, plan.tma_store);
  TileChoice stored = choice;
  if (!plan.tma_store) stored.staging = 0;
  plan.shared_bytes = shared_bytes(stored);
  plan.cluster = unsigned(choice.cluster * choice.slices);
  plan.samples_per_tile = choice.samples;
  plan.sample_tiles = divide_up(shape.m, choice.samples);
  plan.moment_tiles = plan.sample_tiles * choice.slices;
  plan.raster_feature_tiles = int(divide_up(shape.n, 128 * choice.cluster));
  plan.raster_group = std::min(choice.raster_group, plan.raster_feature_tiles);
  plan.chunks = int(half ? divide_up(shape.k, 64) : divide_up(shape.k, fused ? 128 : 64) * 2);
  const int64_t tiles = tiles_of(shape, choice);
  // Blocks are persistent, but those of a shared tile, whose rings become exchange buffers.
  plan.grid = choice.slices > 1
                  ? unsigned(tiles * choice.slices)
                  : unsigned(std::min(tiles, cluster_slots(choice, device)) * choice.cluster);

  if (half) {
    add_half_maps(plan, shape, choice);
    return plan;
  }
  add_split(plan, SplitStep::Operand::x, shape);
  if (!fused && !shape.weight_packed) add_split(plan, SplitStep::Operand::w, shape);
  add_split_maps(plan, shape, choice);
  return plan;
}

// Cycles of a tile: for each element of K, and once for its epilogue.
struct TileCycles {
  double per_k, epilogue;
};

inline TileCycles tile_cycles(const TileChoice& c) {
  if (c.variant == Variant::half) {
    return c.samples == 256 ? TileCycles{16.2, 3500} : TileCycles{9.5, 2200};
  }
  if (c.variant == Variant::fused_split) {
    if (c.samples == 64) return {19.4, 2500};
    return {c.promotion == 2 ? 26.0 : 26.4, 4450};
  }
  if (c.samples == 64) return {18.9, 1950};
  if (c.samples == 160) return {32.3, 4900};
  return c.samples == 192 ? TileCycles{38.9, 6000} : TileCycles{25.7, 3900};
}

// Microseconds: waves of tiles, each a number of steps along K and an epilogue, at the clock that
// the power limit leaves; the split passes by their bytes. Fitted to bench/results/config-sweep
// (36 shapes on an H200), where its choice is within 3% of the best; cost_model_test.cpp holds it
// to 5%.
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  constexpr double kCyclesPerMicrosecond = 1600, kLaunch = 6.3, kSplitLaunch = 1.8;
  constexpr double kSplitPerElement = 8 / 3.85e6;  // 8 bytes at 3.85 TB/s
  constexpr double kBytesPerMicrosecond = 3.3e6;
  constexpr double kExchangePerSample = 57;  // cycles, where slices of K meet
  constexpr double kCool = 1000, kUnshared = 0.06;
  const bool fused = c.variant == Variant::fused_split;
  const TileCycles cycles = tile_cycles(c);
  const bool half = c.variant == Variant::half;
  const int64_t k_step = half ? 64 : fused ? 128 : 32;
  const double k = double(divide_up(shape.k, k_step) * k_step);
  double tile = k * cycles.per_k + cycles.epilogue;
  if (c.slices > 1) {
    const double slice = 128 * double(divide_up(divide_up(shape.k, 128), c.slices));
    tile = slice * cycles.per_k + cycles.epilogue / c.slices + kExchangePerSample * c.samples;
  }
  const int64_t waves = divide_up(tiles_of(shape, c), cluster_slots(c, device));
  const double weight_bytes = 4 * double(shape.n) * k;
  double time =
      std::max(double(waves) * tile / kCyclesPerMicrosecond, weight_bytes / kBytesPerMicrosecond);
  if (half) {
    const double bytes = 2 * (double(shape.m) + double(shape.n)) * k;
    return std::max(double(waves) * tile / kCyclesPerMicrosecond, bytes / kBytesPerMicrosecond) +
           kLaunch;
  }
  // Blocks that load for themselves alone move more bytes, which costs clock where the power limit
  // has set in.
  if (c.cluster == 1 && time > kCool) time += kUnshared * (time - kCool);
  time += kLaunch + kSplitLaunch + double(shape.m) * k * kSplitPerElement;
  if (!fused && !shape.weight_packed) time += kSplitLaunch + double(shape.n) * k * kSplitPerElement;
  return time;
}

// cuBLAS in fp32: 40 to 50 TF/s, or half the copy bandwidth where the batch is thin; a small
// product takes what one tile takes along K. From the same table. In 16 bits: 740 TF/s, or most of
// the bandwidth.
inline double estimate_library(const ProductShape& shape) {
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  if (shape.element != Element::f32) {
    return 5 + std::max(2e-6 * m * n * k / 740, 2 * (m * k + n * k) / 3.0e6);
  }
  const double start = 10.2 + 0.007 * std::min(k, 1024.);
  return start +
         std::max(1.3 * 2e-6 * m * n * k / 50, 4 * (m * k + n * k) / (m > 1 ? 2.0e6 : 3.0e6));
}

inline std::vector<TileChoice> tile_choices(const ProductShape& shape, const DeviceLimits& device) {
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
