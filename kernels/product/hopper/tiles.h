// What a product on Hopper is asked for, and the tiles that it may be cut into. Plain C++, no CUDA
// header.
//
// y[m, n] = Σ_k x[m, k] · w[n, k]. x and w are described by strides in elements, so that x @ Wᵀ
// (w.k_stride = 1), x @ W (w.row_stride = 1) and xᵀ @ y (x.row_stride = 1 too) are one case.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "launch/launch.h"
#include "launch/tensor_map.h"

namespace ingot::hopper {

// How fp32 operands become fp16; what follows from it is a file each (scheme_split.h, …).
enum class Scheme {
  split,   // two halves an element, three products: fp32's accuracy
  scaled,  // one value under its row's power of two, one product: TF32's accuracy
  high,    // one fp16 product and two cross terms in FP8: some 16 bits
};

enum class Variant {
  fused_split,   // fp32 weight split inside the product; only x is packed beforehand
  packed,        // both operands packed beforehand
  streamed,      // fp32 operands by TMA as they are, split in registers: small, thin and deep
                 // products, and batches of them
  split_both,    // fp32 operands by TMA as they are, split into fp16 halves: where packing would
                 // cost more than it spares
  fused_scaled,  // Scheme::scaled: fp32 weight rounded inside the product
  scaled,        // Scheme::scaled, both operands packed beforehand
  crossed,       // Scheme::high, both operands packed beforehand
  half,          // fp16 or bf16 operands as they are
  portable,      // the same without Hopper's own instructions (portable/launch.h)
  unsupported,   // the shape does not fit: use the library
};

inline bool is_fused(Variant variant) {
  return variant == Variant::fused_split || variant == Variant::fused_scaled;
}

// Operands go through TMA as they lie in memory, and slices of K meet there.
inline bool is_unpacked(Variant variant) {
  return variant == Variant::streamed || variant == Variant::split_both;
}

struct OperandShape {
  int64_t row_stride = 0, k_stride = 1;  // elements
  bool aligned = true;                   // the pointer is a multiple of 16 bytes
  int64_t batch_stride = 0;              // of a batch: from entry to entry; 0 if all share one
  // TMA and vector loads read fp32 rows in pieces of 16 bytes.
  bool vector_rows(int64_t k) const {
    return aligned && k_stride == 1 && row_stride % 4 == 0 && k % 4 == 0 && batch_stride % 4 == 0;
  }
  // Contiguous in the row index, and k in whole groups of eight: TMA reads rows of k. One matrix.
  bool vector_columns(int64_t k) const {
    return aligned && row_stride == 1 && k_stride % 4 == 0 && k % 8 == 0 && batch_stride == 0;
  }
  // Rows that TMA reads without help from vector loads.
  bool tensor_map_rows(Element element) const {
    return aligned && k_stride == 1 && row_stride * size_of(element) % 16 == 0;
  }
};

// Which tiles that read operands as they lie may be chosen by their estimates. A module's products
// are those that standalone files launch, too, so that both have the same bits.
enum class Unpacked {
  none,   // samples are packed where they are made, or what is packed is shared
  whole,  // split_both, sums that are not cut
  any,
};

struct ProductShape {
  int64_t m = 0, n = 0, k = 0;
  OperandShape x, w;
  int64_t y_stride = 0;
  bool y_aligned = true;  // of the result's pointer, to 16 bytes
  bool stores_result = true;
  bool weight_packed = false;      // frozen weights: packed once, kept by the caller
  Element element = Element::f32;  // of x, w and y
  Scheme scheme = Scheme::split;   // of f32 operands
  int64_t batches = 1;             // products like this one, each with a weight of its own
  Unpacked unpacked = Unpacked::none;
  // Halves that products hand on (halves.cuh): x is some, the result is to be some.
  bool x_halves = false, y_halves = false;

  bool shares_samples() const { return batches > 1 && x.batch_stride == 0; }
  // Over the whole batch, packed.
  int64_t x_rows() const { return shares_samples() ? m : batches * m; }
  int64_t w_rows() const { return batches * n; }
  // Whether the weights of a batch are one matrix in memory.
  bool weights_follow() const { return batches == 1 || w.batch_stride == n * w.row_stride; }
};

inline bool stores_by_tma(const ProductShape& shape) {
  return shape.stores_result && shape.y_aligned &&
         shape.y_stride * size_of(shape.element) % 16 == 0;
}

// For kernels that have no other scheme: fp32's accuracy serves where less is asked for.
inline ProductShape as_split(ProductShape shape) {
  shape.scheme = Scheme::split;
  return shape;
}

struct DeviceLimits {
  int multiprocessors = 132;
};
inline DeviceLimits limits_of(int multiprocessors) {
  return {multiprocessors};
}

// A tile shape and pipeline that was measured; docs/kernel-log.md says how each came out.
struct TileChoice {
  Variant variant;
  int samples;            // of a tile
  int stages;             // of the ring; fused: of the samples' ring
  int weight_stages = 0;  // fused
  int staging = 0;        // buffers for TMA stores; not fused
  int cluster = 1;        // blocks that share samples
  int sample_blocks = 1;  // fused_scaled: blocks of a cluster that share weights
  int slices = 1;         // fused, unpacked: blocks that share a tile, each with its part of K
  int promotion = 1;      // fused_split: chunks of 64 of K that wgmma sums before they are promoted
  int raster_group = 8;   // feature tiles (clusters of them) a group
  int features = 0;       // unpacked: of a tile
  int depth_warps = 1;    // streamed: warps that share K
  int feature_warps = 1, sample_warps = 1;  // unpacked: that share a tile's features, its samples
  bool w_along_k = true;                    // unpacked, fused_split: how operands lie in memory
  bool x_along_k = true;                    // unpacked: the same
  Element element = Element::f32;           // half: of the operands
  bool batched = false;                     // a weight for every entry of a batch
  bool x_halves = false, y_halves = false;  // packed: ProductShape's
};

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline size_t align_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

inline int cluster_of(const TileChoice& c) {
  if (is_unpacked(c.variant)) return 1;
  return c.cluster * c.sample_blocks * c.slices;
}
// Tiles that are under way at once.
inline int64_t cluster_slots(const TileChoice& c, const DeviceLimits& device) {
  return ingot::cluster_slots(cluster_of(c), device.multiprocessors);
}

// Clusters' worth of tiles of the result.
inline int64_t tiles_of(const ProductShape& shape, const TileChoice& c) {
  const int features = is_unpacked(c.variant) ? c.features : 128 * c.cluster;
  return shape.batches * divide_up(shape.m, c.samples * c.sample_blocks) *
         divide_up(shape.n, features);
}

// streamed: K of a chunk, warps that multiply in a block, and a block's shared memory; the same as
// StreamedConfig says (tests hold them to each other).
constexpr int kStreamedChunk = 32;
inline int streamed_warps(const TileChoice& c) {
  return c.feature_warps * c.sample_warps * c.depth_warps;
}
inline size_t streamed_stage_bytes(const TileChoice& c) {
  const auto operand = [](int rows, bool along_k) {
    return along_k ? size_t(rows) * 128 : size_t(divide_up(rows, 32)) * 4096;
  };
  return operand(c.features, c.w_along_k) + operand(c.samples, c.x_along_k);
}
inline size_t streamed_bytes(const TileChoice& c) {
  const size_t exchanged = c.depth_warps == 1 ? 0 : size_t(c.depth_warps) * 4;
  return 1024 + size_t(c.stages) * (streamed_stage_bytes(c) + 16) +
         exchanged * size_t(c.features) * size_t(c.samples);
}
// Blocks that a multiprocessor holds.
inline int streamed_resident(const TileChoice& c) {
  constexpr size_t kShared = 228 * 1024, kReserved = 1024;
  return streamed_warps(c) == 4 && 2 * (streamed_bytes(c) + kReserved) <= kShared ? 2 : 1;
}
// split_both: K and bytes of a chunk, threads and shared memory of a block; the same as
// SplitBothConfig says.
constexpr int kSplitBothChunk = 64, kSplitBothThreads = 512;
constexpr size_t kSplitBothChunkBytes = size_t(128 + 128) * kSplitBothChunk * 4;
inline size_t split_both_bytes(const TileChoice& c) {
  constexpr size_t kSlot = kSplitBothChunkBytes / 2, kRow = 128 * 4;
  const size_t packed = size_t(c.stages), slots = size_t(c.weight_stages) + 2 * packed;
  return 1024 + slots * (kSlot + 16) + packed * (kRow + 16);
}

// Of a block that adds slices: threads; samples that it has, of 16 features.
constexpr int kMergeThreads = 512;
inline int merged_samples(const TileChoice& c) {
  return std::min(16, c.samples / c.sample_warps);
}
// Whether a kernel of its own adds the slices and finishes.
inline bool merges(const TileChoice& c) {
  return is_unpacked(c.variant) && c.slices > 1;
}
// A part of a tile that one warp finishes, and has statistics of.
inline int unpacked_part_samples(const TileChoice& c) {
  if (merges(c)) return merged_samples(c);
  if (c.variant == Variant::split_both) return c.samples / 2;
  const int blocks = c.features / c.feature_warps / 16;
  return c.samples / c.sample_warps / std::max(1, c.depth_warps / blocks);
}

inline size_t shared_bytes(const TileChoice& c) {
  if (c.variant == Variant::streamed) return streamed_bytes(c);
  if (c.variant == Variant::split_both) return split_both_bytes(c);
  // Of one warpgroup, where operands are split: exponents of the samples, and of its 64 features
  // where they are packed too.
  const bool fused = is_fused(c.variant);
  const int exponents = c.variant == Variant::half ? 0 : fused ? c.samples : c.samples + 64;
  const size_t tables = 2 * size_t(exponents) * 4;
  const size_t rest = 1024 + tables + 16 * size_t(c.stages + c.weight_stages);
  if (!fused) {
    const size_t factors = c.x_halves ? size_t(c.stages) * size_t(c.samples) * 4 : 0;
    return rest + size_t(c.stages) * size_t(128 + c.samples) * 128 + 2 * size_t(c.staging) * 8192 +
           factors;
  }
  const size_t sample_bytes = c.variant == Variant::fused_scaled ? 128 : 256;
  return rest + size_t(c.weight_stages) * 128 * 256 +
         size_t(c.stages) * size_t(c.samples) * sample_bytes;
}

inline std::string config_text(const TileChoice& c, bool tma_store) {
  const auto number = [](int v) { return std::to_string(v); };
  const auto flag = [](bool v) { return std::string(v ? "true" : "false"); };
  const std::string ring = number(c.samples) + ", " + number(c.weight_stages) + ", " +
                           number(c.stages) + ", " + (tma_store ? "true" : "false") + ", ";
  const std::string blocks = number(c.samples) + ", " + number(c.cluster) + ", " + number(c.stages);
  const bool halves = c.x_halves || c.y_halves;
  const std::string batched = halves      ? ", false, " + flag(c.x_halves) + ", " + flag(c.y_halves)
                              : c.batched ? ", true"
                                          : "";
  switch (c.variant) {
    case Variant::fused_split: {
      const std::string base = "FusedSplitConfig<" + ring + number(c.promotion);
      if (!c.w_along_k) return base + ", " + number(c.slices) + ", false, false>";
      return base + (c.slices > 1 || c.batched ? ", " + number(c.slices) : "") + batched + ">";
    }
    case Variant::fused_scaled:
      return "FusedScaledConfig<" + ring + number(c.cluster) + ", " + number(c.sample_blocks) +
             ", " + number(c.slices) + ">";
    case Variant::streamed:
      return "StreamedConfig<" + number(c.features / c.feature_warps / 16) + ", " +
             number(c.samples / c.sample_warps / 8) + ", " + number(c.feature_warps) + ", " +
             number(c.sample_warps) + ", " + number(c.depth_warps) + ", " + number(c.stages) +
             ", " + flag(c.w_along_k) + ", " + flag(c.x_along_k) + batched + ">";
    case Variant::split_both:
      return "SplitBothConfig<" + flag(c.w_along_k) + ", " + flag(c.x_along_k) + batched + ">";
    case Variant::half:
      return std::string("HalfConfig<ingot::") + (c.element == Element::bf16 ? "bf16" : "f16") +
             ", " + blocks + ", " + number(c.staging) + (tma_store ? "" : ", false") + ">";
    default:
      return (c.variant == Variant::scaled    ? "ScaledConfig<"
              : c.variant == Variant::crossed ? "CrossedConfig<"
                                              : "PackedConfig<") +
             blocks + ", " + number(tma_store ? c.staging : 0) + batched + ">";
  }
}

}  // namespace ingot::hopper
