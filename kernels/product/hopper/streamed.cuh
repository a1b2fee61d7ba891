// fp32-accurate product for Hopper without packing, for products that memory or launches bound:
// thin, deep, small ones and batches of them. Operands stream through TMA as they lie in memory and
// are multiplied in TF32.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   fp32, each contiguous along k or along its rows (then k in whole eights), rows in
//            whole pieces of 16 bytes. v = hi + lo: hi = tf32(v) to nearest, lo = v − hi exactly,
//            of which TF32 keeps all but one bit: 23 to 24 bits of an element over fp32's range, so
//            that there are no scales and nothing to prepare.
// Products   lo·hi and hi·lo of 16 of k, then hi·hi; lo·lo lies below 2^-24 of the product.
// Promotion  mma.sync rounds its sums towards zero: each sum is of 16 of k, begun by the small
//            terms, and added to a running sum in fp32.
// Tile       16·kFeatureBlocks·kFeatureWarps features × 8·kSampleGroups·kSampleWarps samples. A
//            warp holds its part as a wgmma warp does, so that the epilogue is shared.
//            kDepthWarps groups of such warps share K, chunk by chunk in turn; their sums meet in
//            shared memory and are added in the order of the groups.
// Slices     where tiles are few, K is cut into args.slices, which meet in memory (slices.cuh).
// Roles      of the first warpgroup one thread loads, the others multiply. Blocks are persistent:
//            the next tile's chunks arrive while this one is stored.
// Pipeline   a ring of kStages chunks of 32 of k, w behind x, under TMA's 128-byte swizzle.
//              along k     128 bytes a row; lane t of a quad reads its piece 2t + h at once
//              along rows  boxes of 32 rows × 32 of k, each a line of 128 bytes, in the order of
//                          TensorMapSpec::eights: k = 8t + 4h + i is line 8i + 2t + h
//            Both give lane t elements 8t + 4h … 8t + 4h + 3 of half h, and meet no bank twice: the
//            sum over k is permuted alike for both operands.
#pragma once

#include "product/hopper/ring.cuh"
#include "product/hopper/slices.cuh"
#include "product/hopper/tf32.cuh"

namespace ingot::hopper {

template <int kFeatureBlocks_, int kSampleGroups_, int kFeatureWarps_, int kSampleWarps_,
          int kDepthWarps_, int kStages_, bool kWAlongK_, bool kXAlongK_, bool kBatched_ = false>
struct StreamedConfig {
  static constexpr int kFeatureBlocks = kFeatureBlocks_;  // of 16, of a warp
  static constexpr int kSampleGroups = kSampleGroups_;    // of 8, of a warp
  static constexpr int kFeatureWarps = kFeatureWarps_, kSampleWarps = kSampleWarps_;
  static constexpr int kDepthWarps = kDepthWarps_;
  static constexpr int kStages = kStages_;
  static constexpr bool kWAlongK = kWAlongK_, kXAlongK = kXAlongK_;
  static constexpr bool kBatched = kBatched_;  // a weight for every entry of a batch
  static constexpr int kFeatures = 16 * kFeatureBlocks * kFeatureWarps;
  static constexpr int kSamples = 8 * kSampleGroups * kSampleWarps;
  static constexpr int kGroupWarps = kFeatureWarps * kSampleWarps;
  static constexpr int kConsumers = kGroupWarps * kDepthWarps;  // warps
  static constexpr int kThreads = 128 + 32 * kConsumers;
  static constexpr int kWarpValues = 4 * kFeatureBlocks * kSampleGroups;  // of a thread
  static constexpr int kBatch =
      kSampleGroups < 4 ? kSampleGroups : 4;  // groups whose mma alternate

  // A warp's values are finished in parts of one block of features, each by one of the warps that
  // share K.
  static constexpr int kParts = kDepthWarps > kFeatureBlocks ? kDepthWarps / kFeatureBlocks : 1;
  static constexpr int kPartGroups = kSampleGroups / kParts;
  static_assert(kDepthWarps == 1 || kParts * kFeatureBlocks == kDepthWarps, "a part each");
  static_assert(kParts * kPartGroups == kSampleGroups, "whole groups");

  INGOT_HD static constexpr u32 operand_bytes(int rows, bool along_k) {
    return along_k ? rows * 128 : (rows + 31) / 32 * 4096;
  }
  static constexpr u32 kXBytes = operand_bytes(kSamples, kXAlongK);
  static constexpr u32 kWBytes = operand_bytes(kFeatures, kWAlongK);
  static constexpr u32 kStageBytes = kXBytes + kWBytes;
  static constexpr u32 kExchangeBytes = kDepthWarps > 1 ? kConsumers* kWarpValues * 128 : 0;
  static constexpr u32 kSharedBytes = 1024 + kStages * kStageBytes + kExchangeBytes + 16 * kStages;
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kStages % kDepthWarps == 0, "a slot is always the same warps'");
  static_assert(kConsumers == 4 || kConsumers == 8, "whole warpgroups, which change registers");
  // Of a multiprocessor: blocks, and registers of a consumer's thread; a loading one has 40. One
  // block of few threads has as many as it likes.
  static constexpr int kResident = kConsumers == 4 && 2 * (kSharedBytes + 1024) <= 233472 ? 2 : 1;
  static constexpr bool kMovesRegisters = kConsumers == 8 || kResident == 2;
  static constexpr int kRegisters = kConsumers == 8 ? 232 : 216;
};

namespace streamed {

inline constexpr int kChunk = 32;  // of k

// Where a lane's elements of row 8·group + lane / 4 lie in an operand's part of a stage.
template <bool kAlongK>
struct FragmentReader {
  u32 base;

  INGOT_D explicit FragmentReader(i32 lane) {
    const u32 g = lane >> 2, t = lane & 3;
    base =
        kAlongK ? g * 128 + ((2 * t ^ g) << 4) : t * 256 + (((g >> 2) ^ 2 * t) << 4) + (g & 3) * 4;
  }

  // k = 8t + 4·half … + 3.
  INGOT_D float4 load(u32 operand, int group, int half) const {
    if constexpr (kAlongK) {
      return ptx::load_shared_vector(operand + (base ^ half << 4) + group * 1024);
    } else {
      const u32 at = operand + (base ^ static_cast<u32>((group & 3) << 5 | half << 7 | half << 4)) +
                     (group >> 2) * 4096;
      return {ptx::load_shared(at), ptx::load_shared(at + 1024), ptx::load_shared(at + 2048),
              ptx::load_shared(at + 3072)};
    }
  }
};

template <class Config, bool kAlongK, int kRows>
INGOT_D void load_operand(u32 target, const TensorMap& map, u32 barrier, i32 k, i32 row,
                          i32 entry) {
  if constexpr (kAlongK) {
    if constexpr (Config::kBatched) {
      ptx::tma_load(target, &map, barrier, k, row, entry);
    } else {
      ptx::tma_load(target, &map, barrier, k, row);
    }
  } else {
#pragma unroll
    for (int box = 0; box < (kRows + 31) / 32; ++box) {
      if constexpr (Config::kBatched) {
        ptx::tma_load(target + box * 4096, &map, barrier, row + 32 * box, 0, k / 8, 0, entry);
      } else {
        ptx::tma_load(target + box * 4096, &map, barrier, row + 32 * box, 0, k / 8, 0);
      }
    }
  }
}

template <class Config>
INGOT_D void produce(const Ring& ring, const TensorMap& w_map, const TensorMap& x_map,
                     const ProductArgs& args, bool sliced) {
  RingCursor<Config::kStages> cursor;
  cursor.parity = 1;
  const i32 units = slices::units(args, sliced);
  for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const slices::Work work(args, unit, sliced);
    if (unit + static_cast<i32>(gridDim.x) >= units) ptx::launch_dependents();
    const i32 entry = Config::kBatched ? entry_of(args, work.sample_tile) : 0;
    const i32 feature = work.feature_tile * Config::kFeatures;
    const i32 tile =
        Config::kBatched ? work.sample_tile - entry * args.entry_tiles : work.sample_tile;
    // An operand that all entries share is one.
    const i32 x_entry = args.x_entry_stride == 0 ? 0 : entry;
    const i32 w_entry = args.w_entry_stride == 0 ? 0 : entry;
    for (i32 chunk = work.first; chunk < work.first + work.chunks; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot), slot = ring.slot(cursor.slot);
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, Config::kStageBytes);
      load_operand<Config, Config::kXAlongK, Config::kSamples>(slot, x_map, full, chunk * kChunk,
                                                               tile * Config::kSamples, x_entry);
      load_operand<Config, Config::kWAlongK, Config::kFeatures>(slot + Config::kXBytes, w_map, full,
                                                                chunk * kChunk, feature, w_entry);
      cursor.advance();
    }
  }
}

// What a consumer warp is: its place among those that share a tile's chunk, and its share of K.
struct Place {
  i32 feature_warp, sample_warp, depth_warp, lane;
};

template <class Config>
using Sums = float[Config::kFeatureBlocks][4 * Config::kSampleGroups];

// sum += the products of half a chunk.
template <class Config>
INGOT_D void multiply_half(Sums<Config>& sum, u32 slot, int half, const Place& place,
                           const FragmentReader<Config::kWAlongK>& w_reader,
                           const FragmentReader<Config::kXAlongK>& x_reader) {
  constexpr int kBlocks = Config::kFeatureBlocks, kGroups = Config::kSampleGroups;
  constexpr int kBatch = Config::kBatch;
  SplitElements w[kBlocks][2];
#pragma unroll
  for (int row = 0; row < 2 * kBlocks; ++row) {
    w[row / 2][row & 1].set(
        w_reader.load(slot + Config::kXBytes, place.feature_warp * 2 * kBlocks + row, half));
  }
#pragma unroll
  for (int first = 0; first < kGroups; first += kBatch) {
    SplitElements x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      x[i].set(x_reader.load(slot, place.sample_warp * kGroups + first + i, half));
    }
    float run[kBatch][kBlocks][4];
#pragma unroll
    for (int term = 0; term < 6; ++term) {
      const int step = term & 1;
      const bool low_w = term < 2, low_x = term == 2 || term == 3;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const SplitElements &upper = w[block][0], &lower = w[block][1];
          const u32(&a)[2] = low_w ? upper.lo[step] : upper.hi[step];
          const u32(&b)[2] = low_w ? lower.lo[step] : lower.hi[step];
          const u32(&c)[2] = low_x ? x[i].lo[step] : x[i].hi[step];
          if (term == 0) {
            ptx::mma_tf32_first(run[i][block], a[0], b[0], a[1], b[1], c[0], c[1]);
          } else {
            ptx::mma_tf32(run[i][block], a[0], b[0], a[1], b[1], c[0], c[1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[block][4 * (first + i) + v] += run[i][block][v];
      }
    }
  }
}

// The warp's chunks of a slice; `start`: chunks that the block has had before. Groups take chunks
// in turn through all of the block's tiles, so that a slot is always the same group's: the parity
// of a barrier tells neighbouring phases apart, and no group may look at one that is two phases
// behind.
template <class Config>
INGOT_D void accumulate(Sums<Config>& sum, const Ring& ring, u32 start, i32 chunks,
                        const Place& place) {
  constexpr u32 kDepth = Config::kDepthWarps;
  const FragmentReader<Config::kWAlongK> w_reader(place.lane);
  const FragmentReader<Config::kXAlongK> x_reader(place.lane);
  const u32 first = (place.depth_warp + kDepth - start % kDepth) % kDepth;
  u32 slot = (start + first) % Config::kStages;
  u32 parity = (start + first) / Config::kStages & 1;
  for (i32 chunk = static_cast<i32>(first); chunk < chunks; chunk += Config::kDepthWarps) {
    ptx::mbarrier_wait(ring.full_barrier(slot), parity);
    // A loop: with both halves at once, some tiles take more registers than there are.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      multiply_half<Config>(sum, ring.slot(slot), half, place, w_reader, x_reader);
    }
    __syncwarp();
    if (place.lane == 0) ptx::mbarrier_arrive(ring.empty_barrier(slot));
    slot += kDepth;
    if (slot >= Config::kStages) slot -= Config::kStages, parity ^= 1;
  }
}

// Of a part of a warp's values: of one block of features, kPartGroups groups of samples.
template <class Config>
using Part = float[4 * Config::kPartGroups];

// Adds the sums of the warps that share K, in their order; each gets the part of its number.
// `exchange`: of all warps.
template <class Config>
INGOT_D void meet(const Sums<Config>& sum, Part<Config>& part, u32 exchange, const Place& place) {
  constexpr int kVectors = Config::kWarpValues / 4;
  constexpr u32 kWarpBytes = Config::kWarpValues * 128;
  constexpr int kBarrier = 1;
  const u32 peers = exchange +
                    (place.sample_warp * Config::kFeatureWarps + place.feature_warp) *
                        Config::kDepthWarps * kWarpBytes +
                    place.lane * 16;
  ptx::barrier_sync(kBarrier, 32 * Config::kConsumers);  // the last tile's sums were read
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float* v = sum[i / Config::kSampleGroups] + i % Config::kSampleGroups * 4;
    ptx::store_shared_words(peers + place.depth_warp * kWarpBytes + i * 512,
                            uint4{__float_as_uint(v[0]), __float_as_uint(v[1]),
                                  __float_as_uint(v[2]), __float_as_uint(v[3])});
  }
  ptx::barrier_sync(kBarrier, 32 * Config::kConsumers);
#pragma unroll
  for (int i = 0; i < Config::kPartGroups; ++i) {
#pragma unroll
    for (int from = 0; from < Config::kDepthWarps; ++from) {
      const float4 v = ptx::load_shared_vector(peers + from * kWarpBytes +
                                               (place.depth_warp * Config::kPartGroups + i) * 512);
      const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        part[4 * i + e] = from == 0 ? values[e] : part[4 * i + e] + values[e];
      }
    }
  }
}

// Runs finish(values, unit, place, block, first group) for every part of every tile, in the
// warp that owns it.
template <class Config, class Finish>
INGOT_D void consume(const Ring& ring, u32 exchange, const ProductArgs& args, const Place& place,
                     bool sliced, const Finish& finish) {
  const i32 units = slices::units(args, sliced);
  u32 start = 0;
  for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    Sums<Config> sum = {};
    const i32 chunks = slices::Work(args, unit, sliced).chunks;
    accumulate<Config>(sum, ring, start, chunks, place);
    start += chunks;
    if constexpr (Config::kDepthWarps > 1) {
      Part<Config> part;
      meet<Config>(sum, part, exchange, place);
      finish(part, unit, place, place.depth_warp / Config::kParts,
             place.depth_warp % Config::kParts * Config::kPartGroups);
    } else {
#pragma unroll
      for (int block = 0; block < Config::kFeatureBlocks; ++block) {
        finish(sum[block], unit, place, block, 0);
      }
    }
  }
}

// The kernel but for what becomes of sums.
template <class Config, class Finish>
INGOT_D void run(const TensorMap& w_map, const TensorMap& x_map, const ProductArgs& args,
                 bool sliced, const Finish& finish) {
  const u32 base = aligned_shared_memory();
  const u32 exchange = base + Config::kStages * Config::kStageBytes;
  const u32 barriers = exchange + Config::kExchangeBytes;
  const Ring ring = {base, Config::kStageBytes, barriers, barriers + 8 * Config::kStages};
  const ThreadRole role;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(ring.full_barrier(i), 1);
      ptx::mbarrier_init(ring.empty_barrier(i), Config::kGroupWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch(&w_map);
    ptx::tma_prefetch(&x_map);
  }
  __syncthreads();
  ptx::dependency_wait();
  if (role.warpgroup == 0) {
    if constexpr (Config::kMovesRegisters) ptx::register_decrease<40>();
    if (threadIdx.x == 0) produce<Config>(ring, w_map, x_map, args, sliced);
    return;
  }
  if constexpr (Config::kMovesRegisters) ptx::register_increase<Config::kRegisters>();
  const i32 consumer = 4 * (role.warpgroup - 1) + role.warp;
  const i32 in_group = consumer % Config::kGroupWarps;
  const Place place = {in_group % Config::kFeatureWarps, in_group / Config::kFeatureWarps,
                       consumer / Config::kGroupWarps, role.lane};
  consume<Config>(ring, exchange, args, place, sliced, finish);
}

}  // namespace streamed

template <class Config, class Epilogue>
INGOT_D void product_streamed(const TensorMap& w_map, const TensorMap& x_map, const TensorMap&,
                              const ProductArgs& args, const typename Epilogue::Params& params) {
  const auto finish = [&](float(&values)[4 * Config::kPartGroups], i32 unit,
                          const streamed::Place& place, i32 block, i32 group) {
    // Computed again, not kept in registers while all are needed.
    const slices::Work work(args, ptx::opaque(unit), false);
    const i32 feature = work.feature_tile * Config::kFeatures +
                        16 * (place.feature_warp * Config::kFeatureBlocks + block);
    const i32 sample = first_sample<Config>(args, work.sample_tile) +
                       8 * (place.sample_warp * Config::kSampleGroups + group);
    slices::finish<Config, Epilogue, Config::kPartGroups>(values, feature, sample, work.sample_tile,
                                                          place.lane, args, params);
  };
  streamed::run<Config>(w_map, x_map, args, false, finish);
}

// The sums of all slices of K, for product_merged.
template <class Config>
INGOT_D void streamed_slices(const TensorMap& w_map, const TensorMap& x_map,
                             const ProductArgs& args) {
  const auto finish = [&](float(&values)[4 * Config::kPartGroups], i32 unit,
                          const streamed::Place& place, i32 block, i32 group) {
    const i32 warp = place.sample_warp * Config::kFeatureWarps + place.feature_warp;
    slices::store_sums<Config, Config::kPartGroups>(
        values, slices::place_of_sums<Config>(args, unit, warp, block, group, place.lane));
  };
  streamed::run<Config>(w_map, x_map, args, true, finish);
}

}  // namespace ingot::hopper
