// fp32-accurate product for Hopper that splits both operands on the way, for those that packing an
// operand would cost more than it spares: long sums of few results, short sums of many, and
// batches.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Packing an operand beforehand (fused_split.cuh, packed.cuh) moves three times the bytes of the
// operand itself. Here both are read once, as fp32, as streamed.cuh does, but multiplied as fp16
// halves by wgmma, which takes half the time of TF32 products by mma.sync.
//
// Operands   fp32, each along k or along its rows (then k in whole eights), lines in whole pieces
//            of 16 bytes. Along k: TMA boxes of 128 rows × 32 floats. Along their rows, as for a
//            weight's gradient: four boxes of 32 of k × 32 rows in the place of one, of w in the
//            order that fused_split.cuh says.
// Tile       128 features × 128 samples. Blocks are persistent: the next tile's chunks arrive, and
//            are converted, while this one is stored (by TMA stores in no less time).
// Slices     where tiles are few, K is cut into args.slices, which meet in memory (slices.cuh);
//            blocks of one slice beside each other, so that what they share comes from L2.
// Threads    512. Warpgroup 0 loads: warp 0 the w ring, warp 1 the x ring. Warpgroup 1 converts x:
//            a thread a sample splits its 64 of k and stores halves as packed operands lie
//            (product/split.cuh). Warpgroups 2 and 3 consume, 64 features each: w is split into
//            registers, as in fused_split.cuh.
// Pipeline   Converting x, splitting w and promoting sums are some 900 issue slots a chunk of a
//            scheduler, beside 1536 cycles of wgmma. Consumers have one set of fragments each:
//            while one multiplies the other promotes and splits (named barriers say whose turn it
//            is).
// Scaling    Of both operands as fused_split.cuh's weights: a row's power of two comes from its
//            first chunk of the sum and has head room. Where a sample's must grow, the converter
//            leaves the bits by which in the slot's table, and consumers let their sums follow.
#pragma once

#include "product/hopper/fused_split.cuh"
#include "product/hopper/slices.cuh"

namespace ingot::hopper {

template <bool kWAlongK_, bool kXAlongK_, bool kBatched_ = false>
struct SplitBothConfig {
  static constexpr bool kWAlongK = kWAlongK_, kXAlongK = kXAlongK_;
  static constexpr bool kBatched = kBatched_;  // a weight for every entry of a batch
  static constexpr int kFeatures = 128, kSamples = 128, kChunk = 64, kThreads = 512;
  static constexpr int kWeightStages = 3, kRawStages = 2, kPackedStages = 2;
  static constexpr int kSlabBytes = 128 * 128, kSlotBytes = 2 * kSlabBytes;
  static constexpr int kStages = kWeightStages + kRawStages + kPackedStages;
  static constexpr int kSharedBytes =
      1024 + kStages * (kSlotBytes + 16) + kPackedStages * (kSamples * 4 + 16);
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  // As slices.cuh wants to know: eight warps, each of 16 features and all samples.
  static constexpr int kFeatureBlocks = 1, kSampleGroups = kSamples / 8;
  static constexpr int kFeatureWarps = 8, kGroupWarps = 8, kWarpValues = kSamples / 2;
};

namespace split_both {

// Where it lies.
template <class Config>
struct Memory {
  static constexpr u32 kSlot = Config::kSlotBytes;
  u32 base = aligned_shared_memory();
  u32 raw_slots = base + Config::kWeightStages * kSlot;
  u32 packed_slots = raw_slots + Config::kRawStages * kSlot;
  u32 flags = packed_slots + Config::kPackedStages * kSlot;  // four words a packed slot
  u32 scales = flags + 16 * Config::kPackedStages;           // SampleScale::word, of a packed slot
  u32 w_barriers = scales + Config::kPackedStages * Config::kSamples * 4;
  u32 raw_barriers = w_barriers + 16 * Config::kWeightStages;
  u32 packed_barriers = raw_barriers + 16 * Config::kRawStages;
  Ring w = {base, kSlot, w_barriers, w_barriers + 8 * Config::kWeightStages};
  Ring raw = {raw_slots, kSlot, raw_barriers, raw_barriers + 8 * Config::kRawStages};
  Ring packed = {packed_slots, kSlot, packed_barriers, packed_barriers + 8 * Config::kPackedStages};
};

// How a slab lies in memory.
enum class Lines { along_k, along_rows, along_rows_in_eights };

// One box of an operand.
template <bool kBatched, Lines kLines>
INGOT_D void load_box(u32 place, const TensorMap& map, u32 barrier, i32 row, i32 k, i32 entry) {
  if constexpr (kLines == Lines::along_rows_in_eights) {
    if constexpr (kBatched) {
      ptx::tma_load(place, &map, barrier, row, 0, k / 8, 0, entry);
    } else {
      ptx::tma_load(place, &map, barrier, row, 0, k / 8, 0);
    }
  } else {
    const i32 first = kLines == Lines::along_k ? k : row,
              second = kLines == Lines::along_k ? row : k;
    if constexpr (kBatched) {
      ptx::tma_load(place, &map, barrier, first, second, entry);
    } else {
      ptx::tma_load(place, &map, barrier, first, second);
    }
  }
}

// One thread fills a ring with a tile's 128 rows of an operand, tile after tile.
template <class Config, int kStages, Lines kLines>
INGOT_D void produce(const Ring& ring, const TensorMap& map, const ProductArgs& args, bool sliced,
                     bool weights) {
  constexpr u32 kBoxBytes = 32 * 128;
  RingCursor<kStages> cursor;
  cursor.parity = 1;
  const i32 units = slices::units(args, sliced), step = static_cast<i32>(gridDim.x);
  for (i32 unit = static_cast<i32>(blockIdx.x); unit < units; unit += step) {
    const slices::Work work(args, unit, sliced);
    if (weights && unit + step >= units) ptx::launch_dependents();
    const i32 in_batch = Config::kBatched ? entry_of(args, work.sample_tile) : 0;
    const i32 sample_tile = work.sample_tile - in_batch * args.entry_tiles;
    const i32 row = 128 * (weights ? work.feature_tile : sample_tile);
    // An operand that all entries share is one.
    const i32 entry = (weights ? args.w_entry_stride : args.x_entry_stride) == 0 ? 0 : in_batch;
    for (i32 chunk = work.first; chunk < work.first + work.chunks; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot);
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      ptx::mbarrier_expect_bytes(full, ring.slot_bytes);
#pragma unroll
      for (i32 slab = 0; slab < 2; ++slab) {
        const u32 place = ring.slot(cursor.slot) + static_cast<u32>(slab) * (ring.slot_bytes / 2);
        const i32 k = chunk * 64 + slab * 32;
#pragma unroll
        for (i32 box = 0; box < (kLines == Lines::along_k ? 1 : 4); ++box) {
          load_box<Config::kBatched, kLines>(place + static_cast<u32>(box) * kBoxBytes, map, full,
                                             row + box * 32, k, entry);
        }
      }
      cursor.advance();
    }
  }
}

// What a packed slot says of a sample's scale: the bits by which it grew with this chunk, and its
// exponent since.
struct SampleScale {
  INGOT_D static i32 word(i32 exponent, i32 grown) { return exponent << 16 | grown; }
  INGOT_D static i32 exponent(i32 word) { return word >> 16; }
  INGOT_D static i32 grown(i32 word) { return word & 0xffff; }
};

// Of the thread's sample: where its line lies in a slot, and its running scale.
template <bool kAlongK>
struct SampleRow {
  static constexpr u32 kSlabBytes = 128 * 128;

  u32 line, swizzle;  // of a packed slot, and of one that lies along k
  u32 word;           // of one that lies along rows: in its line of 32 samples, and of which box
  float scale = 1.f;
  i32 exponent = kMinExponent;

  INGOT_D explicit SampleRow(u32 row)
      : line(row * 128), swizzle(row & 7), word((row >> 5) * (32 * 128) + (row & 31) * 4) {}

  INGOT_D u32 piece(u32 slot, u32 slab, u32 index) const {
    return slot + slab * kSlabBytes + line + ((index ^ swizzle) << 4);
  }

  // Elements 4·index … 4·index + 3 of a slab.
  INGOT_D float4 load(u32 raw, u32 slab, u32 index) const {
    if constexpr (kAlongK) {
      return ptx::load_shared_vector(piece(raw, slab, index));
    } else {
      const u32 first = raw + slab * kSlabBytes + word;
      const auto at = [&](u32 i) {
        const u32 k = 4 * index + i;
        return ptx::load_shared((first ^ ((k & 7) << 4)) + k * 128);
      };
      return {at(0), at(1), at(2), at(3)};
    }
  }

  INGOT_D void grow(u32 raw) {
    float amax = 0.f;
#pragma unroll 4
    for (u32 i = 0; i < 16; ++i) {
      amax = max_magnitude(amax, load(raw, i >> 3, i & 7));
    }
    const i32 wanted = scale_exponent(amax, kRunningTarget);
    if (wanted > exponent) exponent = wanted;
    scale = pow2(-exponent);
  }

  // Element 8c + 4j + 2h + e of 32 stands at 16j + 8h + 2c + e. True as split_chunk() says.
  INGOT_D bool convert(u32 raw, u32 packed) const {
    // Words that are loaded one by one would all be under way, and have no registers.
    constexpr int kAtOnce = kAlongK ? 2 : 1;
    u32 seen = 0;
#pragma unroll(kAtOnce)
    for (u32 slab = 0; slab < 2; ++slab) {
#pragma unroll(kAtOnce)
      for (u32 j = 0; j < 2; ++j) {
        u32 hi[2][4], lo[2][4];
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
          const float4 v = load(raw, slab, 2 * c + j);
          split_pair(v.x, v.y, scale, hi[0][c], lo[0][c]);
          split_pair(v.z, v.w, scale, hi[1][c], lo[1][c]);
          seen |= lo[0][c] | lo[1][c];
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          ptx::store_shared_words(piece(packed, slab, 2 * j + h),
                                  uint4{hi[h][0], hi[h][1], hi[h][2], hi[h][3]});
          ptx::store_shared_words(piece(packed, slab, 4 + 2 * j + h),
                                  uint4{lo[h][0], lo[h][1], lo[h][2], lo[h][3]});
        }
      }
    }
    return (seen & 0x40004000) != 0;
  }
};

// A chunk of the thread's sample, from its fp32 slot to its packed one.
template <class Config>
INGOT_D void convert_chunk(const Memory<Config>& memory, SampleRow<Config::kXAlongK>& sample,
                           u32 raw_slot, u32 packed_slot, u32 row, bool first) {
  const u32 raw = memory.raw.slot(raw_slot), packed = memory.packed.slot(packed_slot);
  if (first) sample.grow(raw);
  const i32 before = sample.exponent;
  bool again = ptx::warp_any(sample.convert(raw, packed));
  if (again) {
    // Of the lanes whose samples had room all values come out as before.
    sample.grow(raw);
    again = ptx::warp_any(sample.convert(raw, packed));  // Inf or NaN: left as they are
  }
  const i32 grown = sample.exponent - before;
  ptx::store_shared(memory.scales + (packed_slot * Config::kSamples + row) * 4,
                    SampleScale::word(sample.exponent, grown));
  const bool moved = ptx::warp_any(grown != 0);
  if (row % 32 == 0) {
    ptx::store_shared(memory.flags + packed_slot * 16 + row / 32 * 4, static_cast<i32>(moved));
  }
}

template <class Config>
INGOT_D void convert(const Memory<Config>& memory, const ProductArgs& args, bool sliced, i32 warp,
                     i32 lane) {
  const u32 row = static_cast<u32>(warp * 32 + lane);
  RingCursor<Config::kRawStages> from;
  RingCursor<Config::kPackedStages> to;
  to.parity = 1;
  const i32 units = slices::units(args, sliced), step = static_cast<i32>(gridDim.x);
  for (i32 unit = static_cast<i32>(blockIdx.x); unit < units; unit += step) {
    SampleRow<Config::kXAlongK> sample(row);
    const i32 chunks = slices::Work(args, unit, sliced).chunks;
    for (i32 chunk = 0; chunk < chunks; ++chunk) {
      ptx::mbarrier_wait(memory.raw.full_barrier(from.slot), from.parity);
      ptx::mbarrier_wait(memory.packed.empty_barrier(to.slot), to.parity);
      convert_chunk(memory, sample, from.slot, to.slot, row, chunk == 0);
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(memory.packed.full_barrier(to.slot));
        ptx::mbarrier_arrive(memory.raw.empty_barrier(from.slot));
      }
      from.advance();
      to.advance();
    }
  }
}

template <class Config>
struct Consumer {
  static constexpr int kValues = 64;
  static constexpr int kTurnBarrier = 3;

  const Memory<Config>& memory;
  i32 group, warp, lane;
  decltype(fragment_source<Config::kWAlongK>(0, 0, 0)) source;
  RingCursor<Config::kWeightStages> w_cursor;
  RingCursor<Config::kPackedStages> x_cursor;
  RowScales rows;

  INGOT_D void release(u32 barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Of value i, of the tile.
  INGOT_D u32 sample_of(int i) const {
    return static_cast<u32>((i >> 2) * 8 + 2 * (lane & 3) + (i & 1));
  }

  INGOT_D void split(Fragments& fragments, i32 (&shift)[2], bool first) {
    const u32 slot = memory.w.slot(w_cursor.slot);
    ptx::mbarrier_wait(memory.w.full_barrier(w_cursor.slot), w_cursor.parity);
    if (first) choose_scales(source, slot, rows, false);
    convert_at_some_scale(source, slot, rows, shift,
                          [&] { return split_chunk(source, slot, rows, fragments); });
    release(memory.w.empty_barrier(w_cursor.slot));
    w_cursor.advance();
  }

  // As FusedSplitConsumer's: cross terms first.
  INGOT_D void multiply(float (&sum)[kValues], const Fragments& f) const {
    constexpr u64 kSlabStep = Config::kSlabBytes / 16, kLowPlane = 64 / 16;
    const u64 b = shared_matrix_descriptor(memory.packed.slot(x_cursor.slot));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 hi = b + (step >> 1) * kSlabStep + (step & 1) * 2;
      const u32 *fh = f.hi + 4 * step, *fl = f.lo + 4 * step;
      Wgmma<Config::kSamples>::rs(sum, fl[0], fl[1], fl[2], fl[3], hi, step > 0);
      Wgmma<Config::kSamples>::rs(sum, fh[0], fh[1], fh[2], fh[3], hi + kLowPlane, 1);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 hi = b + (step >> 1) * kSlabStep + (step & 1) * 2;
      const u32* fh = f.hi + 4 * step;
      Wgmma<Config::kSamples>::rs(sum, fh[0], fh[1], fh[2], fh[3], hi, 1);
    }
  }

  // Sums of the chunks before follow the scales of this one.
  INGOT_D void follow(float (&acc)[kValues], const i32 (&shift)[2]) const {
    if (ptx::warp_any(shift[0] != 0)) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] = shift_down(acc[i], shift[(i >> 1) & 1] - kRetried);
    }
    const uint4 moved = ptx::load_shared_words(memory.flags + x_cursor.slot * 16);
    if (ptx::warp_any((moved.x | moved.y | moved.z | moved.w) != 0)) {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        acc[i] = shift_down(acc[i], SampleScale::grown(scale_of(i)));
    }
  }

  // Of value i's sample, from the slot at x_cursor.
  INGOT_D i32 scale_of(int i) const {
    const u32 table = memory.scales + x_cursor.slot * (Config::kSamples * 4);
    return ptx::load_shared_int(table + 4 * sample_of(i));
  }

  INGOT_D void unscale(float (&acc)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const i32 exponent = rows.exponent[(i >> 1) & 1] + SampleScale::exponent(scale_of(i));
      acc[i] = shift_down(acc[i], -exponent);
    }
  }

  // A tile's sums over some chunks of K. Returns in which groups (nonfinite_groups()) any lane has
  // one that is not finite under its scale: without scales, those that overflow fp32 are right.
  INGOT_D u32 accumulate(float (&acc)[kValues], i32 chunks) {
    float sum[kValues];
    Fragments fragments;
    u32 marked = 0;
    rows = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0.f;
#pragma unroll 1
    for (i32 chunk = 0; chunk < chunks; ++chunk) {
      i32 shift[2] = {0, 0};
      split(fragments, shift, chunk == 0);
      ptx::mbarrier_wait(memory.packed.full_barrier(x_cursor.slot), x_cursor.parity);
      ptx::barrier_sync(kTurnBarrier + group, 256);
      multiply(sum, fragments);
      ptx::barrier_arrive(kTurnBarrier + 1 - group, 256);
      ptx::wgmma_commit();
      follow(acc, shift);
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      ptx::pin(fragments.hi);
      ptx::pin(fragments.lo);
      if (chunk + 1 < chunks) release(memory.packed.empty_barrier(x_cursor.slot));
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] += sum[i];
      if (chunk + 1 == chunks) {  // the slot has the samples' last scales
        marked = ptx::warp_any(!all_finite(acc)) ? nonfinite_groups(acc) : 0;
        unscale(acc);
        __syncwarp();
        release(memory.packed.empty_barrier(x_cursor.slot));
      }
      x_cursor.advance();
    }
    return marked;
  }
};

// The kernel but for what becomes of sums: finish(sums, marked, unit, consumer).
template <class Config, class Finish>
INGOT_D void run(const TensorMap& w_map, const TensorMap& x_map, const ProductArgs& args,
                 bool sliced, const Finish& finish) {
  const Memory<Config> memory;
  const ThreadRole role;
  const i32 warp = role.warp, lane = role.lane;
  if (threadIdx.x == 0) {
    constexpr u32 kConvertingWarps = 4, kConsumingWarps = 8;
    for (u32 i = 0; i < Config::kWeightStages; ++i) {
      ptx::mbarrier_init(memory.w.full_barrier(i), 1);
      ptx::mbarrier_init(memory.w.empty_barrier(i), kConsumingWarps);
    }
    for (u32 i = 0; i < Config::kRawStages; ++i) {
      ptx::mbarrier_init(memory.raw.full_barrier(i), 1);
      ptx::mbarrier_init(memory.raw.empty_barrier(i), kConvertingWarps);
    }
    for (u32 i = 0; i < Config::kPackedStages; ++i) {
      ptx::mbarrier_init(memory.packed.full_barrier(i), kConvertingWarps);
      ptx::mbarrier_init(memory.packed.empty_barrier(i), kConsumingWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::tma_prefetch(&w_map);
    ptx::tma_prefetch(&x_map);
  }
  __syncthreads();
  ptx::dependency_wait();
  if (role.warpgroup == 0) {
    ptx::register_decrease<32>();
    if (lane != 0) return;
    constexpr Lines kW = Config::kWAlongK ? Lines::along_k : Lines::along_rows_in_eights;
    constexpr Lines kX = Config::kXAlongK ? Lines::along_k : Lines::along_rows;
    if (warp == 0) produce<Config, Config::kWeightStages, kW>(memory.w, w_map, args, sliced, true);
    if (warp == 1) produce<Config, Config::kRawStages, kX>(memory.raw, x_map, args, sliced, false);
  } else if (role.warpgroup == 1) {
    ptx::register_decrease<80>();
    convert(memory, args, sliced, warp, lane);
  } else {
    ptx::register_increase<200>();
    const ThreadRole role;  // anew: what lives from the start would be spilled
    const i32 group = role.warpgroup - 2, warp = role.warp, lane = role.lane;
    const auto source = fragment_source<Config::kWAlongK>(group, warp, lane);
    Consumer<Config> consumer = {memory, group, warp, lane, source, {}, {}, {}};
    constexpr int kTurnBarrier = Consumer<Config>::kTurnBarrier;
    if (group == 1) ptx::barrier_arrive(kTurnBarrier, 256);
    const i32 units = slices::units(args, sliced), step = static_cast<i32>(gridDim.x);
    for (i32 unit = static_cast<i32>(blockIdx.x); unit < units; unit += step) {
      float acc[Consumer<Config>::kValues];
      const u32 marked = consumer.accumulate(acc, slices::Work(args, unit, sliced).chunks);
      finish(acc, marked, unit, consumer);
    }
    if (group == 0) ptx::barrier_sync(kTurnBarrier, 256);  // group 1's last arrival
  }
}

}  // namespace split_both

template <class Config, class Epilogue>
INGOT_D void product_split_both(const TensorMap& w_map, const TensorMap& x_map, const TensorMap&,
                                const ProductArgs& args, const typename Epilogue::Params& params) {
  using Consumer = split_both::Consumer<Config>;
  constexpr int kValues = Consumer::kValues, kPart = kValues / 2;
  const auto finish = [&](float(&acc)[kValues], u32 marked, i32 unit, const Consumer& by) {
    // Computed again, not kept in registers while all are needed.
    const slices::Work work(args, ptx::opaque(unit), false);
    decltype(auto) own = args_of_tile<Config>(args, work.sample_tile);
    const i32 feature = work.feature_tile * Config::kFeatures + 64 * by.group;
    const i32 sample = first_sample<Config>(args, work.sample_tile);
    // A part at once: an epilogue's statistics take registers for each value.
#pragma unroll
    for (int first = 0; first < kValues; first += kPart) {
      if (sample + 2 * first >= own.m) return;
      float(&part)[kPart] = *reinterpret_cast<float(*)[kPart]>(acc + first);
      const ThreadTile tile = thread_tile(feature, sample + 2 * first, by.warp, by.lane, 0);
      TileEpilogue<Epilogue, kPart> epilogue(tile, own, params);
      u32 redone = marked >> first / 4;
      if (own.redo_all) redone = ~0u;
      if (ptx::warp_any(redone != 0)) redo_groups(part, own, redone, tile.n0, tile.m0);
      const i32 moments =
          slices::moment_tile<Config, 2 * kPart>(args, work.sample_tile, sample + 2 * first);
      finish_direct(part, tile, own, epilogue, moments);
    }
  };
  split_both::run<Config>(w_map, x_map, args, false, finish);
}

// The sums of all slices of K, for product_merged.
template <class Config>
INGOT_D void split_both_slices(const TensorMap& w_map, const TensorMap& x_map,
                               const ProductArgs& args) {
  using Consumer = split_both::Consumer<Config>;
  constexpr int kValues = Consumer::kValues;
  const auto finish = [&](const float(&acc)[kValues], u32, i32 unit, const Consumer& by) {
    const i32 tile_warp = 4 * by.group + by.warp;
    // Nothing of what lies past the result.
    constexpr int kGroups = slices::kMostMergeGroups, kPiece = 4 * kGroups;
    const slices::Work work(args, ptx::opaque(unit), true);
    if (work.feature_tile * Config::kFeatures + 16 * tile_warp >= args.n) return;
    const i32 samples = args.m - work.sample_tile * Config::kSamples;
#pragma unroll
    for (int first = 0; first < kValues; first += kPiece) {
      if (2 * first >= samples) return;
      slices::store_sums<Config, kGroups>(
          acc + first, slices::place_of_sums<Config>(args, unit, tile_warp, 0, first / 4, by.lane));
    }
  };
  split_both::run<Config>(w_map, x_map, args, true, finish);
}

}  // namespace ingot::hopper
