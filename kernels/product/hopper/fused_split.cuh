// fp32-accurate product for Hopper, weight split inside the kernel ("variant B").
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w: fp32 row-major [n][k], k a multiple of 4, rows 16-byte aligned: TMA boxes of
//            128 rows × 32 floats (128 bytes, 128B swizzle). Nothing else reads or writes a weight.
//            Or contiguous in n, [k][n], k a multiple of 8 (kAlongK = false): the weight of a
//            gradient, which so needs no packing either. Boxes of 32 k × 32 n, of which four make
//            the 128 rows; their order of k is said below.
//            x: packed by product/split.cuh: [m][k/32][32 hi | 32 lo] fp16, k order permuted as the
//            fragments below want it, one exponent a row: boxes of kSamples rows × 128 bytes.
// Tile       128 features × kSamples samples of yᵀ; K in chunks of 64.
// Threads    384, persistent. Warpgroup 0 loads: warp 0 the w ring, warp 1 the x ring. Warpgroups 1
//            and 2 consume, 64 features each.
// Pipeline   A consumer holds two sets of fp16 fragments. In each step it issues the 12 wgmma of
//            the current chunk (lo·hi and hi·lo of each k16, then hi·hi), splits the next chunk
//            from fp32 in shared memory while they run, waits, and every kPromotion chunks adds
//            their sum to its fp32 accumulators (wgmma itself rounds towards zero, so its sums must
//            stay short). The two consumers alternate strictly, by named barriers: one splits and
//            promotes while the other feeds the tensor cores. Left free they lock in phase and lose
//            a fifth.
// Scaling    Each row's power-of-two scale comes from its first chunk and has head room; a chunk
//            that would overflow fp16 is split again at a new scale, and the row's accumulators
//            follow (exactly). So any finite row works, including one that begins with zeros.
// Slices     Where there are few tiles, a cluster of kSlices blocks shares one: each sums its part
//            of K, then they exchange sums through distributed shared memory and each finishes its
//            part of the samples (epilogue.cuh, exchange_slices).
// Release    A w slot is released after its loaded values have been used by a warp vote: an arrive
//            that merely follows the loads lets TMA overwrite data still in flight to registers.
//
// Fragment order: lane c of a quad reads the 16-byte pieces 2c and 2c+1 of each 128-byte fp32 row
// (XOR row & 7: no bank conflicts), and calls what it has read its k16 columns; x is packed in the
// same order, so the sum over k is merely permuted. Of a weight that is contiguous in n a lane
// wants the same elements, one word each. A box holds k = 8c + 4j + i of its 32 at row 8i + 2c + j,
// which a tensor map of four dimensions does: under the swizzle (XOR 2c + j) the four lanes of a
// quad then read different banks, where rows in the order of k would put all four into the same
// ones.
#pragma once

#include "product/hopper/fused.cuh"

namespace ingot::hopper {

template <int kSamples_, int kWeightStages_, int kSampleStages_, bool kTmaStore_ = true,
          int kPromotion_ = 1, int kSlices_ = 1, bool kBatched_ = false, bool kAlongK_ = true>
struct FusedSplitConfig
    : FusedConfig<kSamples_, kWeightStages_, kSampleStages_, kTmaStore_, kSlices_, 4> {
  static constexpr int kCluster = 1;              // beside slices
  static constexpr int kPromotion = kPromotion_;  // chunks summed by wgmma alone: 1 or 2
  static constexpr bool kBatched = kBatched_;     // a weight for every entry of a batch (args.cuh)
  using RedoRow = SplitRow;
  static constexpr bool kAlongK = kAlongK_;  // the weight is contiguous in k, or else in n
  static_assert(kAlongK || !kBatched, "no map has a dimension left for a batch");
};

// wgmma A fragments of a 16-row × 64-column piece: four k16 steps of four fp16 pairs, both halves.
struct Fragments {
  u32 hi[16], lo[16];
};

// The same of a weight that is contiguous in n: its word k = 8c of row g. Row g + 8 is two pieces
// of 16 bytes on, the second four of eight k are a row of the box and one piece on.
struct TransposedSource {
  static constexpr int kStepsAtOnce = 1;  // sixteen words in flight would cost accumulators
  u32 first;
};

INGOT_D float4 load_piece(const TransposedSource& source, u32 slot, int step, int row) {
  constexpr u32 kSlabBytes = 128 * 128, kStep = 8 * 128;
  const u32 half = step & 1;
  const u32 at =
      ((slot + source.first) ^ (row * 32 + half * 16)) + (step >> 1) * kSlabBytes + half * 128;
  return {ptx::load_shared(at), ptx::load_shared(at + kStep), ptx::load_shared(at + 2 * kStep),
          ptx::load_shared(at + 3 * kStep)};
}

// Of a lane of consumer warpgroup `group`.
template <bool kAlongK>
INGOT_D auto fragment_source(u32 group, u32 warp, u32 lane) {
  const u32 row = lane >> 2, quad = lane & 3;
  if constexpr (kAlongK) {
    const u32 tile_row = group * 64 + warp * 16 + row;
    return FragmentSource{tile_row * 128 + (((2 * quad) ^ row) << 4),
                          tile_row * 128 + (((2 * quad + 1) ^ row) << 4)};
  } else {
    constexpr u32 kBoxBytes = 32 * 128;
    const u32 box = 2 * group + warp / 2, piece = 4 * (warp & 1) + row / 4;
    return TransposedSource{box * kBoxBytes + 2 * quad * 128 + ((piece ^ (2 * quad)) << 4) +
                            (row & 3) * 4};
  }
}

// Splits the chunk; true if some |lo| ≥ 2 (so wherever hi overflowed: lo is then infinite or NaN).
// Asking lo rather than hi also keeps ptxas from sinking its computation below the vote on the
// answer, where the unsplit values would cost more registers than there are.
template <class Source>
INGOT_D bool split_chunk(const Source& source, u32 slot, const RowScales& rows, Fragments& out) {
  constexpr u32 kTopExponentBits = 0x40004000;
  u32 seen = 0;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const float4 a = load_piece(source, slot, step, 0), b = load_piece(source, slot, step, 1);
    u32* hi = out.hi + 4 * step;
    u32* lo = out.lo + 4 * step;
    split_pair(a.x, a.y, rows.scale[0], hi[0], lo[0]);
    split_pair(b.x, b.y, rows.scale[1], hi[1], lo[1]);
    split_pair(a.z, a.w, rows.scale[0], hi[2], lo[2]);
    split_pair(b.z, b.w, rows.scale[1], hi[3], lo[3]);
    seen |= lo[0] | lo[1] | lo[2] | lo[3];
  }
  return (seen & kTopExponentBits) != 0;
}

template <class Config, class Epilogue>
struct FusedSplitConsumer {
  static constexpr int kSamples = Config::kSamples;
  static constexpr int kValues = kSamples / 2;
  // Named barriers: 1, 2 inside a consumer warpgroup; 3, 4 whose turn it is.
  static constexpr int kTurnBarrier = 3;

  const Ring& w;
  const Ring& x;
  i32 group, warp, lane;  // consumer warpgroup 0 or 1
  decltype(fragment_source<Config::kAlongK>(0, 0, 0)) source;
  RingCursor<Config::kWeightStages> w_cursor;
  RingCursor<Config::kSampleStages> x_cursor;
  RowScales rows;
  u32 held_slot;  // the tile's last w slot, kept as staging for the store

  INGOT_D void release(u32 barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  INGOT_D void wait_weights() const {
    ptx::mbarrier_wait(w.full_barrier(w_cursor.slot), w_cursor.parity);
  }

  // Splits the chunk at w_cursor, which has arrived, and frees its slot.
  template <bool kHoldSlot>
  INGOT_D void split_next(Fragments& next, i32 (&shift)[2]) {
    const u32 slot = w.slot(w_cursor.slot);
    convert_at_some_scale(source, slot, rows, shift,
                          [&] { return split_chunk(source, slot, rows, next); });
    if constexpr (kHoldSlot) {
      held_slot = w_cursor.slot;
    } else {
      release(w.empty_barrier(w_cursor.slot));
    }
    w_cursor.advance();
  }

  INGOT_D void begin_tile(Fragments& first) {
    wait_weights();
    choose_scales(source, w.slot(w_cursor.slot), rows, false);
    i32 unused[2] = {0, 0};
    split_next<false>(first, unused);
  }

  INGOT_D void multiply(float (&sum)[kValues], const Fragments& f, bool first) {
    constexpr u64 kSlabStep = kSamples * 128 / 16;
    constexpr u64 kLowPlane = 64 / 16;
    const u64 b = shared_matrix_descriptor(x.slot(x_cursor.slot));
    ptx::wgmma_fence();
    // Cross terms first: wgmma truncates the whole sum at every step, which costs nothing while the
    // sum is 2^-11 of what it will be.
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 hi = b + (step >> 1) * kSlabStep + (step & 1) * 2;
      const u32* fh = f.hi + 4 * step;
      const u32* fl = f.lo + 4 * step;
      Wgmma<kSamples>::rs(sum, fl[0], fl[1], fl[2], fl[3], hi, step > 0 || !first);
      Wgmma<kSamples>::rs(sum, fh[0], fh[1], fh[2], fh[3], hi + kLowPlane, 1);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 hi = b + (step >> 1) * kSlabStep + (step & 1) * 2;
      const u32* fh = f.hi + 4 * step;
      Wgmma<kSamples>::rs(sum, fh[0], fh[1], fh[2], fh[3], hi, 1);
    }
  }

  // One chunk: multiplies `current`, prepares `next` meanwhile. kFirst and kLast: its place in the
  // run of chunks that is summed before it is promoted.
  template <bool kFirst, bool kLast, bool kHasNext, bool kHoldSlot>
  INGOT_D void step(float (&acc)[kValues], float (&sum)[kValues], Fragments& current,
                    Fragments& next) {
    ptx::mbarrier_wait(x.full_barrier(x_cursor.slot), x_cursor.parity);
    ptx::barrier_sync(kTurnBarrier + group, 256);
    multiply(sum, current, kFirst);
    ptx::barrier_arrive(kTurnBarrier + 1 - group, 256);
    ptx::wgmma_commit();
    i32 shift[2] = {0, 0};
    if constexpr (kHasNext) wait_weights();
    if constexpr (kHasNext) split_next<kHoldSlot>(next, shift);
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    ptx::pin(current.hi);
    ptx::pin(current.lo);
    release(x.empty_barrier(x_cursor.slot));
    x_cursor.advance();
    if constexpr (kLast) promote(acc, sum);
    if (ptx::warp_any(shift[0] != 0)) {
      if constexpr (!kLast) {
        promote(acc, sum);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[i] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] = shift_down(acc[i], shift[(i >> 1) & 1] - kRetried);
    }
  }

  INGOT_D static void promote(float (&acc)[kValues], const float (&sum)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] += sum[i];
  }

  INGOT_D void accumulate(float (&acc)[kValues], i32 chunks) {
    constexpr bool kEach = Config::kPromotion == 1;
    float sum[kValues];
    Fragments even, odd;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0.f;
    begin_tile(even);
    for (i32 chunk = 2; chunk < chunks; chunk += 2) {
      step<true, kEach, true, false>(acc, sum, even, odd);
      step<kEach, true, true, false>(acc, sum, odd, even);
    }
    step<true, kEach, true, true>(acc, sum, even, odd);
    step<kEach, true, false, false>(acc, sum, odd, even);
  }

  INGOT_D void finish_tile(float (&acc)[kValues], const ThreadTile& tile, u32 exponent_table,
                           const TensorMap& y_map, const ProductArgs& args,
                           const typename Epilogue::Params& params, i32 sample_tile) {
    TileEpilogue<Epilogue, kValues> epilogue(tile, args, params);
    finish_product<SplitRow>(acc, tile, rows.exponent[0], rows.exponent[1], exponent_table, args);
    const u32 held_barrier = w.empty_barrier(held_slot);
    if constexpr (Epilogue::kStore && Config::kTmaStore) {
      // The slot's rows of this warpgroup: 8 KiB in each of its two slabs, read by nobody else.
      constexpr u32 kSlabBytes = 128 * 128;
      finish_tma<2>(acc, tile, y_map, w.slot(held_slot) + group * (kSlabBytes / 2), kSlabBytes,
                    epilogue, sample_tile);
      if (warp == 0 && lane == 0) {
        ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(held_barrier, 4);
      }
    } else {
      finish_direct(acc, tile, args, epilogue, sample_tile);
      release(held_barrier);
    }
  }
};

// Fills one ring, tile after tile: kSlabs boxes of `rows` rows × 128 bytes a chunk; of a weight
// that is contiguous in n, four boxes in the place of one.
template <class Config, int kStages>
INGOT_D void fused_split_produce(const Ring& ring, const TensorMap& map, const ProductArgs& args,
                                 const BlockShare<Config>& share, bool weights) {
  constexpr int kSlabs = Config::kChunk / 32;
  const i32 rows = weights ? Config::kFeatures : Config::kSamples;
  const i32 slab_step = weights ? 32 : 64;  // elements of the map: floats or halves
  RingCursor<kStages> cursor;
  cursor.parity = 1;
  for (i32 t = share.first; t < args.raster.count(); t += share.step) {
    i32 feature_tile, sample_tile;
    args.raster.locate(t, feature_tile, sample_tile);
    const i32 row = weights
                        ? weight_row<Config>(args, sample_tile, feature_tile * Config::kFeatures)
                        : sample_row<Config>(args, sample_tile);
    if (weights && t + share.step >= args.raster.count()) ptx::launch_dependents();
    for (i32 chunk = share.chunk_begin; chunk < share.chunk_end; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot), slot = ring.slot(cursor.slot);
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, ring.slot_bytes);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const u32 destination = slot + slab * rows * 128;
        const i32 index = chunk * kSlabs + slab;
        if (!Config::kAlongK && weights) {
#pragma unroll
          for (int box = 0; box < 4; ++box) {
            ptx::tma_load(destination + box * 32 * 128, &map, full, row + box * 32, 0, index * 4,
                          0);
          }
        } else {
          ptx::tma_load(destination, &map, full, index * slab_step, row);
        }
      }
      cursor.advance();
    }
  }
}

template <class Config, class Epilogue>
INGOT_D void product_fused_split(const TensorMap& w_map, const TensorMap& x_map,
                                 const TensorMap& y_map, const ProductArgs& args,
                                 const typename Epilogue::Params& params) {
  const FusedMemory<Config> memory;
  const Ring &w = memory.w, &x = memory.x;

  const ThreadRole role;
  const i32 warp = role.warp, lane = role.lane;
  if (threadIdx.x == 0) {
    // Here and not in a function of Ring: behind one, ptxas gives the whole kernel other registers.
    constexpr u32 kConsumerWarps = 8;
    for (u32 i = 0; i < Config::kWeightStages; ++i) {
      ptx::mbarrier_init(w.full_barrier(i), 1);
      ptx::mbarrier_init(w.empty_barrier(i), kConsumerWarps);
    }
    for (u32 i = 0; i < Config::kSampleStages; ++i) {
      ptx::mbarrier_init(x.full_barrier(i), 1);
      ptx::mbarrier_init(x.empty_barrier(i), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch(&w_map);
    ptx::tma_prefetch(&x_map);
    if constexpr (Epilogue::kStore && Config::kTmaStore) ptx::tma_prefetch(&y_map);
  }
  __syncthreads();
  ptx::dependency_wait();

  const BlockShare<Config> share(args);
  if (role.warpgroup == 0) {
    ptx::register_decrease<40>();
    if (warp == 0 && lane == 0)
      fused_split_produce<Config, Config::kWeightStages>(w, w_map, args, share, true);
    if (warp == 1 && lane == 0)
      fused_split_produce<Config, Config::kSampleStages>(x, x_map, args, share, false);
  } else {
    ptx::register_increase<232>();
    using Consumer = FusedSplitConsumer<Config, Epilogue>;
    const i32 group = role.warpgroup - 1;
    const auto source = fragment_source<Config::kAlongK>(group, warp, lane);
    Consumer consumer = {w, x, group, warp, lane, source, {}, {}, {}, 0};
    const u32 table = memory.tables + group * Config::kTableBytes;
    if (group == 1) ptx::barrier_arrive(Consumer::kTurnBarrier, 256);
    for (i32 t = share.first; t < args.raster.count(); t += share.step) {
      i32 feature_tile, sample_tile;
      args.raster.locate(t, feature_tile, sample_tile);
      decltype(auto) before = args_of_tile<Config>(args, sample_tile);
      prefetch_operands<Epilogue, Config::kSamples>(
          params, before, first_sample<Config>(args, sample_tile),
          feature_tile * Config::kFeatures + group * 64, threadIdx.x & 127);
      load_exponents<Config::kSamples, 0>(table, before, first_sample<Config>(args, sample_tile), 0,
                                          threadIdx.x & 127, 1 + group);
      float acc[Consumer::kValues];
      consumer.accumulate(acc, share.chunk_end - share.chunk_begin);
      wait_exponents(1 + group);
      // Found again rather than kept: the product has no register to spare.
      args.raster.locate(ptx::opaque(t), feature_tile, sample_tile);
      decltype(auto) own = args_of_tile<Config>(args, sample_tile);
      const ThreadTile tile =
          thread_tile(feature_tile * Config::kFeatures + group * 64,
                      first_sample<Config>(args, sample_tile), warp, lane, 1 + group);
      if constexpr (Config::kSlices > 1) {
        finish_shared_tile<Config, Epilogue>(acc, consumer.rows, tile, table, memory.base,
                                             (group * 4 + warp) * 32 + lane, own, params,
                                             sample_tile);
        consumer.release(w.empty_barrier(consumer.held_slot));
      } else {
        consumer.finish_tile(acc, tile, table, y_map, own, params, sample_tile);
      }
    }
    if (group == 0) ptx::barrier_sync(Consumer::kTurnBarrier, 256);  // group 1's last arrival
    if (warp == 0 && lane == 0) ptx::bulk_wait<0>();
  }
}

}  // namespace ingot::hopper
