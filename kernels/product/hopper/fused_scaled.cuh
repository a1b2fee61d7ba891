// tf32 product for Hopper, weight rounded to scaled fp16 inside the kernel.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w: fp32 row-major [n][k], as fused_split.cuh reads it. x: packed by
//            product/scaled_rows.cuh, one fp16 value an element and one exponent a row; boxes of
//            kSamples rows × 64 of K (128 bytes).
// Tile       128 features × kSamples samples of yᵀ; K in chunks of 64.
// Cluster    kFeatureBlocks × kSampleBlocks thread blocks with neighbouring tiles. Those of one
//            feature tile share its weights, those of one sample tile its samples: each loads a
//            part and multicasts it. fp32 weights are twice the bytes of halves, and what L2 can
//            deliver is what limits this kernel where nothing is shared.
// Threads    384, persistent: fused_split.cuh's roles.
// Pipeline   A consumer issues a chunk's four wgmma, waits for those of the chunk before, and
//            rounds the next chunk into the fragments that are free then. So the tensor cores
//            always have work, and the two consumers need no turns. Sums stay in the tensor core,
//            as in a TF32 product: rounding towards zero there stays far below the operands'
//            rounding (docs/numerics.md).
// Scaling    fused_split.cuh's: a row's scale comes from its first chunk; a chunk that overflows
//            fp16 is rounded again at a new scale, and the row's sums follow.
// Slices     of K, as in fused_split.cuh; without sharing.
#pragma once

#include "product/hopper/fused.cuh"

namespace ingot::hopper {

template <int kSamples_, int kWeightStages_, int kSampleStages_, bool kTmaStore_ = true,
          int kFeatureBlocks_ = 1, int kSampleBlocks_ = 1, int kSlices_ = 1>
struct FusedScaledConfig
    : FusedConfig<kSamples_, kWeightStages_, kSampleStages_, kTmaStore_, kSlices_, 2> {
  static constexpr int kFeatureBlocks = kFeatureBlocks_;  // share samples
  static constexpr int kSampleBlocks = kSampleBlocks_;    // share weights
  static constexpr int kCluster = kFeatureBlocks * kSampleBlocks;
  static_assert(kSlices_ == 1 || kCluster == 1, "slices are a cluster of their own");
};

// wgmma A fragments of a 16-row × 64-column piece: four k16 steps of four fp16 pairs.
struct HalfFragments {
  u32 value[16];
};

// Rounds the chunk; true if something overflowed fp16 (or was not finite).
INGOT_D bool round_chunk(const FragmentSource& source, u32 slot, const RowScales& rows,
                         HalfFragments& out) {
  u32 seen = 0;  // infinity times zero makes NaN
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const float4 a = load_piece(source, slot, step, 0), b = load_piece(source, slot, step, 1);
    u32* value = out.value + 4 * step;
    value[0] = ptx::pack_half2(a.x * rows.scale[0], a.y * rows.scale[0]);
    value[1] = ptx::pack_half2(b.x * rows.scale[1], b.y * rows.scale[1]);
    value[2] = ptx::pack_half2(a.z * rows.scale[0], a.w * rows.scale[0]);
    value[3] = ptx::pack_half2(b.z * rows.scale[1], b.w * rows.scale[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) seen = ptx::add_zero_times_half2(value[i], seen);
  }
  return seen != 0;
}

// A block's place in its cluster, and who shares its operands.
template <class Config>
struct ClusterPlace {
  u32 feature = 0, sample = 0;

  INGOT_D ClusterPlace() {
    if constexpr (Config::kCluster > 1) {
      const u32 rank = ptx::cluster_rank();
      feature = rank / Config::kSampleBlocks;
      sample = rank % Config::kSampleBlocks;
    }
  }
  INGOT_D u32 weight_peer(u32 i) const { return feature * Config::kSampleBlocks + i; }
  INGOT_D u32 sample_peer(u32 i) const { return i * Config::kSampleBlocks + sample; }
  INGOT_D u16 weight_peers() const {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < Config::kSampleBlocks; ++i) mask |= 1u << weight_peer(i);
    return static_cast<u16>(mask);
  }
  INGOT_D u16 sample_peers() const {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < Config::kFeatureBlocks; ++i) mask |= 1u << sample_peer(i);
    return static_cast<u16>(mask);
  }
};

// Consumers' arrivals at the "empty" barriers: one a warp at every block that is sent the slot.
template <class Config>
struct SlotRelease {
  i32 lane;
  ClusterPlace<Config> place;

  INGOT_D void weights(u32 barrier, u32 count = 1) const {
    if constexpr (Config::kSampleBlocks == 1) {
      if (lane == 0) ptx::mbarrier_arrive(barrier, count);
    } else {
      if (lane < Config::kSampleBlocks)
        ptx::mbarrier_arrive_remote(barrier, place.weight_peer(lane), count);
    }
  }
  INGOT_D void samples(u32 barrier) const {
    if constexpr (Config::kFeatureBlocks == 1) {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    } else {
      if (lane < Config::kFeatureBlocks)
        ptx::mbarrier_arrive_remote(barrier, place.sample_peer(lane));
    }
  }
};

template <class Config, class Epilogue>
struct FusedScaledConsumer {
  static constexpr int kSamples = Config::kSamples;
  static constexpr int kValues = kSamples / 2;

  const Ring& w;
  const Ring& x;
  i32 group, warp, lane;  // consumer warpgroup 0 or 1
  FragmentSource source;
  SlotRelease<Config> release;
  RingCursor<Config::kWeightStages> w_cursor;
  RingCursor<Config::kSampleStages> x_cursor;
  RowScales rows;

  INGOT_D void wait_weights() const {
    ptx::mbarrier_wait(w.full_barrier(w_cursor.slot), w_cursor.parity);
  }
  // The tile's last w slot, kept as staging for the store.
  INGOT_D u32 held_slot() const {
    return (w_cursor.slot == 0 ? Config::kWeightStages : w_cursor.slot) - 1;
  }

  // Rounds the chunk at w_cursor, which has arrived, and frees its slot.
  INGOT_D void round_next(HalfFragments& next, i32 (&shift)[2], bool hold_slot) {
    const u32 slot = w.slot(w_cursor.slot);
    convert_at_some_scale(source, slot, rows, shift,
                          [&] { return round_chunk(source, slot, rows, next); });
    if (!hold_slot) release.weights(w.empty_barrier(w_cursor.slot));
    w_cursor.advance();
  }

  INGOT_D void multiply(float (&sum)[kValues], const HalfFragments& f, bool first) const {
    const u64 b = shared_matrix_descriptor(x.slot(x_cursor.slot));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u32* v = f.value + 4 * step;
      Wgmma<kSamples>::rs(sum, v[0], v[1], v[2], v[3], b + 2 * step, step > 0 || !first);
    }
    ptx::wgmma_commit();
  }

  // One chunk: issues `current`, awaits the chunk before it (in `other`), and rounds the next
  // into `other`.
  template <bool kFirst, bool kHasNext>
  INGOT_D void step(float (&sum)[kValues], HalfFragments& current, HalfFragments& other,
                    u32& before, bool hold_slot) {
    ptx::mbarrier_wait(x.full_barrier(x_cursor.slot), x_cursor.parity);
    multiply(sum, current, kFirst);
    const u32 now = x_cursor.slot;
    x_cursor.advance();
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();
      ptx::pin(other.value);
      release.samples(x.empty_barrier(before));
    }
    before = now;
    if constexpr (kHasNext) {
      i32 shift[2] = {0, 0};
      wait_weights();
      round_next(other, shift, hold_slot);
      if (ptx::warp_any(shift[0] != 0)) {
        ptx::wgmma_wait<0>();
        ptx::pin(sum);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          sum[i] = shift_down(sum[i], shift[(i >> 1) & 1] - kRetried);
        ptx::pin(sum);
      }
    }
  }

  // `chunks` is even.
  INGOT_D void accumulate(float (&sum)[kValues], i32 chunks) {
    HalfFragments even, odd;
    wait_weights();
    choose_scales(source, w.slot(w_cursor.slot), rows, false);
    i32 unused[2] = {0, 0};
    round_next(even, unused, false);
    u32 before = 0;
    step<true, true>(sum, even, odd, before, chunks == 2);
    for (i32 chunk = 2; chunk < chunks; chunk += 2) {
      step<false, true>(sum, odd, even, before, false);
      step<false, true>(sum, even, odd, before, chunk + 2 == chunks);
    }
    step<false, false>(sum, odd, even, before, false);
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    ptx::pin(odd.value);
    release.samples(x.empty_barrier(before));
  }

  INGOT_D void finish_tile(float (&sum)[kValues], const ThreadTile& tile, u32 exponent_table,
                           const TensorMap& y_map, const ProductArgs& args,
                           const typename Epilogue::Params& params, i32 sample_tile) {
    TileEpilogue<Epilogue, kValues> epilogue(tile, args, params);
    finish_product(sum, tile, rows.exponent[0], rows.exponent[1], exponent_table, args);
    const u32 held_barrier = w.empty_barrier(held_slot());
    if constexpr (Epilogue::kStore && Config::kTmaStore) {
      // The slot's rows of this warpgroup: 8 KiB in each of its two slabs, read by nobody else.
      constexpr u32 kSlabBytes = 128 * 128;
      finish_tma<2>(sum, tile, y_map, w.slot(held_slot()) + group * (kSlabBytes / 2), kSlabBytes,
                    epilogue, sample_tile);
      if (warp == 0) {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
        release.weights(held_barrier, 4);
      }
    } else {
      finish_direct(sum, tile, args, epilogue, sample_tile);
      release.weights(held_barrier);
    }
  }
};

// The raster counts tiles of whole clusters.
template <class Config>
struct ScaledBlockShare : BlockShare<Config> {
  ClusterPlace<Config> place;

  INGOT_D explicit ScaledBlockShare(const ProductArgs& args) : BlockShare<Config>(args) {}
  INGOT_D void locate(const TileRaster& raster, i32 index, i32& feature_tile,
                      i32& sample_tile) const {
    raster.locate(index, feature_tile, sample_tile);
    feature_tile = feature_tile * Config::kFeatureBlocks + place.feature;
    sample_tile = sample_tile * Config::kSampleBlocks + place.sample;
  }
};

// Fills the ring of weights, tile after tile: two slabs of 32 a chunk.
template <class Config>
INGOT_D void produce_weights(const Ring& ring, const TensorMap& map, const ProductArgs& args,
                             const ScaledBlockShare<Config>& share) {
  constexpr i32 kPart = Config::kFeatures / Config::kSampleBlocks;
  const i32 part = share.place.sample * kPart;
  RingCursor<Config::kWeightStages> cursor;
  cursor.parity = 1;
  for (i32 t = share.first; t < args.raster.count(); t += share.step) {
    i32 feature_tile, sample_tile;
    share.locate(args.raster, t, feature_tile, sample_tile);
    if (t + share.step >= args.raster.count()) ptx::launch_dependents();
    for (i32 chunk = share.chunk_begin; chunk < share.chunk_end; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot);
      const u32 slot = ring.slot(cursor.slot) + part * 128;
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, ring.slot_bytes);
#pragma unroll
      for (int slab = 0; slab < 2; ++slab) {
        const u32 at = slot + slab * Config::kFeatures * 128;
        const i32 k = chunk * 64 + slab * 32, row = feature_tile * Config::kFeatures + part;
        if constexpr (Config::kSampleBlocks == 1) {
          ptx::tma_load(at, &map, full, k, row);
        } else {
          ptx::tma_load_multicast(at, &map, full, k, row, share.place.weight_peers());
        }
      }
      cursor.advance();
    }
  }
}

template <class Config>
INGOT_D void produce_samples(const Ring& ring, const TensorMap& map, const ProductArgs& args,
                             const ScaledBlockShare<Config>& share) {
  constexpr i32 kPart = Config::kSamples / Config::kFeatureBlocks;
  const i32 part = share.place.feature * kPart;
  RingCursor<Config::kSampleStages> cursor;
  cursor.parity = 1;
  for (i32 t = share.first; t < args.raster.count(); t += share.step) {
    i32 feature_tile, sample_tile;
    share.locate(args.raster, t, feature_tile, sample_tile);
    for (i32 chunk = share.chunk_begin; chunk < share.chunk_end; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot);
      const u32 slot = ring.slot(cursor.slot) + part * 128;
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, ring.slot_bytes);
      const i32 row = sample_tile * Config::kSamples + part;
      if constexpr (Config::kFeatureBlocks == 1) {
        ptx::tma_load(slot, &map, full, chunk * 64, row);
      } else {
        ptx::tma_load_multicast(slot, &map, full, chunk * 64, row, share.place.sample_peers());
      }
      cursor.advance();
    }
  }
}

template <class Config, class Epilogue>
INGOT_D void product_fused_scaled(const TensorMap& w_map, const TensorMap& x_map,
                                  const TensorMap& y_map, const ProductArgs& args,
                                  const typename Epilogue::Params& params) {
  const FusedMemory<Config> memory;
  const Ring &w = memory.w, &x = memory.x;

  const ThreadRole role;
  const i32 warp = role.warp, lane = role.lane;
  if (threadIdx.x == 0) {
    constexpr u32 kConsumerWarps = 8;
    for (u32 i = 0; i < Config::kWeightStages; ++i) {
      ptx::mbarrier_init(w.full_barrier(i), 1);
      ptx::mbarrier_init(w.empty_barrier(i), kConsumerWarps * Config::kSampleBlocks);
    }
    for (u32 i = 0; i < Config::kSampleStages; ++i) {
      ptx::mbarrier_init(x.full_barrier(i), 1);
      ptx::mbarrier_init(x.empty_barrier(i), kConsumerWarps * Config::kFeatureBlocks);
    }
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch(&w_map);
    ptx::tma_prefetch(&x_map);
    if constexpr (Epilogue::kStore && Config::kTmaStore) ptx::tma_prefetch(&y_map);
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
  ptx::dependency_wait();

  // Made anew in either branch: what lives across setmaxnreg is spilled.
  if (role.warpgroup == 0) {
    ptx::register_decrease<40>();
    const ScaledBlockShare<Config> share(args);
    if (warp == 0 && lane == 0) produce_weights<Config>(w, w_map, args, share);
    if (warp == 1 && lane == 0) produce_samples<Config>(x, x_map, args, share);
  } else {
    ptx::register_increase<232>();
    const ScaledBlockShare<Config> share(args);
    using Consumer = FusedScaledConsumer<Config, Epilogue>;
    const i32 group = role.warpgroup - 1, row = lane >> 2, quad = lane & 3;
    const u32 tile_row = group * 64 + warp * 16 + row;
    const FragmentSource source = {tile_row * 128 + (((2 * quad) ^ row) << 4),
                                   tile_row * 128 + (((2 * quad + 1) ^ row) << 4)};
    Consumer consumer = {w, x, group, warp, lane, source, {lane, share.place}, {}, {}, {}};
    const u32 table = memory.tables + group * Config::kTableBytes;
    for (i32 t = share.first; t < args.raster.count(); t += share.step) {
      i32 feature_tile, sample_tile;
      share.locate(args.raster, t, feature_tile, sample_tile);
      const i32 box_n = feature_tile * Config::kFeatures + group * 64;
      prefetch_operands<Epilogue, Config::kSamples>(params, args, sample_tile * Config::kSamples,
                                                    box_n, threadIdx.x & 127);
      load_exponents<Config::kSamples, 0>(table, args, sample_tile * Config::kSamples, 0,
                                          threadIdx.x & 127, 1 + group);
      float sum[Consumer::kValues];
      consumer.accumulate(sum, share.chunk_end - share.chunk_begin);
      wait_exponents(1 + group);
      // Found again rather than kept: the product has no register to spare.
      share.locate(args.raster, ptx::opaque(t), feature_tile, sample_tile);
      const ThreadTile tile = thread_tile(feature_tile * Config::kFeatures + group * 64,
                                          sample_tile * Config::kSamples, warp, lane, 1 + group);
      if constexpr (Config::kSlices > 1) {
        finish_shared_tile<Config, Epilogue>(sum, consumer.rows, tile, table, memory.base,
                                             (group * 4 + warp) * 32 + lane, args, params,
                                             sample_tile);
        consumer.release.weights(w.empty_barrier(consumer.held_slot()));
      } else {
        consumer.finish_tile(sum, tile, table, y_map, args, params, sample_tile);
      }
    }
    if (warp == 0 && lane == 0) ptx::bulk_wait<0>();
  }
  // No block may leave while another can still arrive at its barriers or write into its slots.
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
}

}  // namespace ingot::hopper
