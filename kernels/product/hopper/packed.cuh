// fp32-accurate product for Hopper, both operands split beforehand ("variant A").
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w and x: packed by product/split.cuh, [rows][k/32][32 hi | 32 lo] fp16 and one
// exponent
//            a row; TMA boxes of rows × 128 bytes under the 128-byte swizzle.
// Tile       128 features × kSamples samples of yᵀ; K in stages of 32.
// Cluster    kCluster thread blocks with neighbouring feature tiles share the sample tile: each
// loads
//            a part and multicasts it. A slot is free when the consumers of all of them are done.
// Threads    384, persistent. Warpgroup 0 loads (one thread); warpgroups 1 and 2 consume, 64
//            features each, both operands from shared memory.
// Promotion  every two stages (64 of K) into fp32 accumulators. The consumers' batches of 12 wgmma
//            alternate by themselves: one promotes while the other multiplies.
#pragma once

#include "product/hopper/epilogue.cuh"
#include "product/hopper/ring.cuh"
#include "product/hopper/wgmma.cuh"

namespace ingot::hopper {

template <int kSamples_, int kCluster_, int kStages_, int kStagingBuffers_>
struct PackedConfig {
  static constexpr int kSamples = kSamples_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagingBuffers = kStagingBuffers_;  // 0: plain stores
  static constexpr int kFeatures = 128;
  static constexpr int kChunk = 32;
  static constexpr int kThreads = 384;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kSampleBytes = kSamples * 128;
  static constexpr int kStageBytes = kWeightBytes + kSampleBytes;
  static constexpr int kStagingBytes = kStagingBuffers * 8192;  // of one warpgroup
  static constexpr int kTableBytes = kSamples * 4;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + 2 * kStagingBytes + 2 * kTableBytes + 16 * kStages;
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kSamples % (8 * kCluster) == 0);
};

template <class Config, class Epilogue>
struct PackedConsumer {
  static constexpr int kValues = Config::kSamples / 2;

  const Ring& ring;
  i32 group, warp, lane;
  RingCursor<Config::kStages> cursor;

  // One arrival a warp at every block of the cluster: lane i tells block i.
  INGOT_D void release(u32 slot) const {
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(ring.empty_barrier(slot));
    } else {
      if (lane < Config::kCluster) ptx::mbarrier_arrive_remote(ring.empty_barrier(slot), lane);
    }
  }

  INGOT_D void wait_stage(const RingCursor<Config::kStages>& at) const {
    ptx::mbarrier_wait(ring.full_barrier(at.slot), at.parity);
  }

  // The terms of one stage that contain a low half; hi·hi.
  INGOT_D void multiply_cross(float (&sum)[kValues], u32 index, bool first) const {
    constexpr u64 kLowPlane = 64 / 16;
    const u32 slot = ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const u64 ah = a + 2 * step, bh = b + 2 * step;
      Wgmma<Config::kSamples>::ss(sum, ah + kLowPlane, bh, step > 0 || !first);
      Wgmma<Config::kSamples>::ss(sum, ah, bh + kLowPlane, 1);
    }
  }
  INGOT_D void multiply_main(float (&sum)[kValues], u32 index) const {
    const u32 slot = ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 2; ++step)
      Wgmma<Config::kSamples>::ss(sum, a + 2 * step, b + 2 * step, 1);
  }

  // Two stages at a time (`chunks` is even), the cross terms of both first: wgmma truncates the
  // whole sum at every step, which costs nothing while the sum is 2^-11 of what it will be.
  INGOT_D void accumulate(float (&acc)[kValues], i32 chunks) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0.f;
    for (i32 left = chunks; left > 0; left -= 2) {
      float sum[kValues];
      const u32 one = cursor.slot;
      wait_stage(cursor);
      cursor.advance();
      ptx::wgmma_fence();
      multiply_cross(sum, one, true);
      const u32 two = cursor.slot;
      wait_stage(cursor);
      cursor.advance();
      ptx::wgmma_fence();
      multiply_cross(sum, two, false);
      multiply_main(sum, one);
      multiply_main(sum, two);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      release(one);
      release(two);
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] += sum[i];
    }
  }
};

template <class Config>
INGOT_D void packed_produce(const Ring& ring, const TensorMap& w_map, const TensorMap& x_map,
                            const ProductArgs& args, i32 rank, i32 first, i32 stride) {
  constexpr i32 kPart = Config::kSamples / Config::kCluster;
  RingCursor<Config::kStages> cursor;
  cursor.parity = 1;
  for (i32 t = first; t < args.raster.count(); t += stride) {
    i32 feature_tile, sample_tile;
    args.raster.locate(t, feature_tile, sample_tile);
    const i32 feature = (feature_tile * Config::kCluster + rank) * Config::kFeatures;
    const i32 sample = sample_tile * Config::kSamples + rank * kPart;
    if (t + stride >= args.raster.count()) ptx::launch_dependents();
    for (i32 chunk = 0; chunk < args.chunks; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot), slot = ring.slot(cursor.slot);
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, Config::kStageBytes);
      ptx::tma_load(slot, &w_map, full, chunk * 64, feature);
      const u32 x_slot = slot + Config::kWeightBytes + rank * kPart * 128;
      if constexpr (Config::kCluster == 1) {
        ptx::tma_load(x_slot, &x_map, full, chunk * 64, sample);
      } else {
        ptx::tma_load_multicast(x_slot, &x_map, full, chunk * 64, sample,
                                (1 << Config::kCluster) - 1);
      }
      cursor.advance();
    }
  }
}

// args.raster counts feature tiles of the whole cluster (128 · kCluster features).
template <class Config, class Epilogue>
INGOT_D void product_packed(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  extern __shared__ unsigned char shared_memory[];
  const u32 base = (ptx::shared_address(shared_memory) + 1023) & ~1023u;
  const u32 staging = base + Config::kStages * Config::kStageBytes;
  const u32 tables = staging + 2 * Config::kStagingBytes;
  const u32 barriers = tables + 2 * Config::kTableBytes;
  const Ring ring = {base, Config::kStageBytes, barriers, barriers + 8 * Config::kStages};

  const i32 warpgroup = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) >> 7, 0);
  const i32 warp = __shfl_sync(~0u, (static_cast<i32>(threadIdx.x) >> 5) & 3, 0);
  const i32 lane = threadIdx.x & 31;
  const i32 rank = Config::kCluster > 1 ? static_cast<i32>(ptx::cluster_rank()) : 0;
  const i32 first = blockIdx.x / Config::kCluster, stride = gridDim.x / Config::kCluster;
  if (threadIdx.x == 0) {
    constexpr u32 kConsumerWarps = 8 * Config::kCluster;
    for (u32 i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(ring.full_barrier(i), 1);
      ptx::mbarrier_init(ring.empty_barrier(i), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch(&w_map);
    ptx::tma_prefetch(&x_map);
    if constexpr (Epilogue::kStore && Config::kStagingBuffers > 0) ptx::tma_prefetch(&y_map);
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
  ptx::dependency_wait();

  if (warpgroup == 0) {
    ptx::register_decrease<40>();
    if (warp == 0 && lane == 0) {
      packed_produce<Config>(ring, w_map, x_map, args, rank, first, stride);
    }
  } else {
    ptx::register_increase<232>();
    const i32 group = warpgroup - 1, barrier = 1 + group, thread = threadIdx.x & 127;
    PackedConsumer<Config, Epilogue> consumer = {ring, group, warp, lane, {}};
    const u32 table = tables + group * Config::kTableBytes;
    for (i32 t = first; t < args.raster.count(); t += stride) {
      i32 feature_tile, sample_tile;
      args.raster.locate(t, feature_tile, sample_tile);
      const i32 box_m = sample_tile * Config::kSamples;
      load_sample_exponents<Config::kSamples>(table, args, box_m, thread, barrier);
      float acc[PackedConsumer<Config, Epilogue>::kValues];
      consumer.accumulate(acc, args.chunks);
      wait_sample_exponents(barrier);
      const i32 box_n = (feature_tile * Config::kCluster + rank) * Config::kFeatures + group * 64;
      const ThreadTile tile = thread_tile(box_n, box_m, warp, lane, barrier);
      finish_product<Epilogue>(acc, tile, args.w_exponent[clamp_index(tile.n0, args.n)],
                               args.w_exponent[clamp_index(tile.n0 + 8, args.n)], table, args,
                               params, sample_tile);
      if constexpr (Epilogue::kStore && Config::kStagingBuffers > 0) {
        // The store before this one must have left the staging buffers.
        if (thread == 0) ptx::bulk_wait_read<0>();
        store_tma<Config::kStagingBuffers>(acc, tile, y_map,
                                           staging + group * Config::kStagingBytes, 8192);
      } else if constexpr (Epilogue::kStore) {
        store_direct(acc, tile, args);
      }
    }
    if (thread == 0) ptx::bulk_wait<0>();
  }
  // No block may leave while another can still arrive at its barriers or write into its slots.
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
}

}  // namespace ingot::hopper
