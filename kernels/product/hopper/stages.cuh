// What the kernels share that read both operands from shared memory: blocks of one producer and two
// consumer warpgroups, stages of 128 features and kSamples samples that TMA fills.
//
// Cluster    kCluster thread blocks with neighbouring feature tiles share the sample tile: each
//            loads a part and multicasts it. A slot is free when the consumers of all are done.
// Threads    384, persistent. Warpgroup 0 loads (one thread); warpgroups 1 and 2 consume, 64
//            features each.
//
//   struct Config {
//     static constexpr int kSamples, kCluster, kStages, kFeatures, kWeightBytes, kStageBytes,
//                          kStagingBytes, kTableBytes;    // the last two of one warpgroup
//     using RedoRow = …;               // of x (product/redo.cuh)
//     static constexpr bool kXHalves, kYHalves;  // x, the result are halves.cuh's
//     static constexpr bool kBatched;  // a weight for every entry of a batch (args.cuh)
//   };
#pragma once

#include "product/hopper/halves.cuh"
#include "product/hopper/ring.cuh"

namespace ingot::hopper {

// Of kernels whose operands are both packed into lines of 128 bytes, a line of each a stage.
template <int kSamples_, int kCluster_, int kStages_, int kStagingBuffers_, bool kXHalves_ = false>
struct PackedStages {
  static constexpr int kSamples = kSamples_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagingBuffers = kStagingBuffers_;  // 0: plain stores
  static constexpr bool kBatched = false;
  static constexpr bool kXHalves = kXHalves_, kYHalves = false;
  using RedoRow = PlainRow;
  static constexpr int kFeatures = 128;
  static constexpr int kThreads = 384;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kSamples * 128;
  static constexpr int kStagingBytes = kStagingBuffers * 8192;        // of one warpgroup
  static constexpr int kTableBytes = (kSamples + kFeatures / 2) * 4;  // exponents
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kStagingBytes +
                                      2 * kTableBytes + 16 * kStages +
                                      (kXHalves ? kStages * kSamples * 4 : 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kSamples % (8 * kCluster) == 0);
};

// Where the factors of a pair of stages lie that begins with slot `first`, in the ring's even or
// odd round: by one of kStages pairs in a row each. They so stay until their pair is promoted,
// though its stages are released before: a warp releases no later stage until it has promoted them.
template <int kStages>
INGOT_D u32 factor_slot(u32 first, u32 round) {
  return kStages % 2 == 1 ? first : first + round;
}

// What a consumer thread is and what its warpgroup owns.
struct ConsumerPlace {
  const Ring& ring;
  i32 group, warp, lane, thread;  // of two warpgroups; the others in the warpgroup
  i32 barrier;                    // named barrier of the warpgroup
  u32 table, staging;             // shared memory of the warpgroup
  u32 factors;                    // of the block: of x's halves, kSamples words a stage
};

// Named barriers 3 and 4: a warpgroup issues its products after the other one has issued its own.
inline constexpr i32 kTurnBarrier = 3;

template <bool kTurns>
INGOT_D void await_turn(const ConsumerPlace& place) {
  if constexpr (kTurns) ptx::barrier_sync(kTurnBarrier + place.group, 256);
}
template <bool kTurns>
INGOT_D void pass_turn(const ConsumerPlace& place) {
  if constexpr (kTurns) ptx::barrier_arrive(kTurnBarrier + 1 - place.group, 256);
}

// The factors of a tile's samples for the 64 of K that begin with a stage.
template <class Config>
INGOT_D u32 load_factors(u32 destination, const ProductArgs& args, i32 chunk, i32 first_sample,
                         u32 barrier) {
  const i32 left = args.factor_rows - first_sample;
  const u32 bytes = 4 * (left < Config::kSamples ? left : Config::kSamples);
  const i64 row = static_cast<i64>(chunk / 2) * args.factor_rows;
  ptx::bulk_load(destination, args.x_factor + row + first_sample, bytes, barrier);
  return bytes;
}

template <class Config>
INGOT_D void produce_stages(const Ring& ring, u32 factors, const TensorMap& w_map,
                            const TensorMap& x_map, const ProductArgs& args, i32 rank, i32 first,
                            i32 stride) {
  constexpr i32 kPart = Config::kSamples / Config::kCluster;
  RingCursor<Config::kStages> cursor;
  cursor.parity = 1;
  for (i32 t = first; t < args.raster.count(); t += stride) {
    i32 feature_tile, sample_tile;
    args.raster.locate(t, feature_tile, sample_tile);
    const i32 feature = weight_row<Config>(
        args, sample_tile, (feature_tile * Config::kCluster + rank) * Config::kFeatures);
    const i32 sample = sample_row<Config>(args, sample_tile) + rank * kPart;
    if (t + stride >= args.raster.count()) ptx::launch_dependents();
    for (i32 chunk = 0; chunk < args.chunks; ++chunk) {
      const u32 full = ring.full_barrier(cursor.slot), slot = ring.slot(cursor.slot);
      ptx::mbarrier_wait(ring.empty_barrier(cursor.slot), cursor.parity);
      u32 bytes = Config::kStageBytes;
      if constexpr (Config::kXHalves) {
        if (chunk % 2 == 0) {
          const u32 at = factor_slot<Config::kStages>(cursor.slot, cursor.parity ^ 1);
          bytes += load_factors<Config>(factors + at * Config::kSamples * 4, args, chunk,
                                        sample - rank * kPart, full);
        }
      }
      ptx::mbarrier_expect_bytes(full, bytes);
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

// Runs consume(place, feature_tile, sample_tile) in the consumers for every tile of the block.
// args.raster counts feature tiles of the whole cluster (128 · kCluster features).
// kTurns: the consumers multiply one after the other, by await_turn() and pass_turn().
template <class Config, bool kTurns, class Consume>
INGOT_D void staged_product(const TensorMap& w_map, const TensorMap& x_map, const ProductArgs& args,
                            const Consume& consume) {
  const u32 base = aligned_shared_memory();
  const u32 staging = base + Config::kStages * Config::kStageBytes;
  const u32 tables = staging + 2 * Config::kStagingBytes;
  const u32 barriers = tables + 2 * Config::kTableBytes;
  const u32 factors = barriers + 16 * Config::kStages;
  const Ring ring = {base, Config::kStageBytes, barriers, barriers + 8 * Config::kStages};

  const ThreadRole role;
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
  }
  if constexpr (Config::kXHalves) {
    // A last tile's factors are not all loaded; what is there must not make NaN of a zero sum.
    for (u32 i = threadIdx.x; i < Config::kStages * Config::kSamples; i += Config::kThreads) {
      ptx::store_shared(factors + 4 * i, 0);
    }
    ptx::fence_async_proxy();
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
  ptx::dependency_wait();

  if (role.warpgroup == 0) {
    ptx::register_decrease<40>();
    if (role.warp == 0 && role.lane == 0) {
      produce_stages<Config>(ring, factors, w_map, x_map, args, rank, first, stride);
    }
  } else {
    ptx::register_increase<232>();
    const i32 group = role.warpgroup - 1;
    const ConsumerPlace place = {ring,
                                 group,
                                 role.warp,
                                 role.lane,
                                 static_cast<i32>(threadIdx.x & 127),
                                 1 + group,
                                 tables + group * Config::kTableBytes,
                                 staging + group * Config::kStagingBytes,
                                 factors};
    if (group == 1) pass_turn<kTurns>(place);
    for (i32 t = first; t < args.raster.count(); t += stride) {
      i32 feature_tile, sample_tile;
      args.raster.locate(t, feature_tile, sample_tile);
      consume(place, feature_tile * Config::kCluster + rank, sample_tile);
    }
    if (group == 0) await_turn<kTurns>(place);  // group 1's last arrival
    if (place.thread == 0) ptx::bulk_wait<0>();
  }
  // No block may leave while another can still arrive at its barriers or write into its slots.
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();
}

// One arrival a warp at every block of the cluster: lane i tells block i.
template <class Config>
INGOT_D void release_stage(const ConsumerPlace& place, u32 slot) {
  if constexpr (Config::kCluster == 1) {
    if (place.lane == 0) ptx::mbarrier_arrive(place.ring.empty_barrier(slot));
  } else {
    if (place.lane < Config::kCluster) {
      ptx::mbarrier_arrive_remote(place.ring.empty_barrier(slot), place.lane);
    }
  }
}

template <class Config>
INGOT_D void wait_stage(const ConsumerPlace& place, const RingCursor<Config::kStages>& at) {
  ptx::mbarrier_wait(place.ring.full_barrier(at.slot), at.parity);
}

// From the sums of a tile whose operands are both packed, its exponents on their way to `table`, to
// the result in memory. The epilogue's operands are loaded beforehand where registers allow.
template <class Config, class Epilogue, int kValues>
INGOT_D void finish_packed_tile(float (&sum)[kValues], const ConsumerPlace& place, i32 box_m,
                                i32 box_n, const TensorMap& y_map, const ProductArgs& args,
                                const typename Epilogue::Params& params, i32 sample_tile) {
  constexpr bool kRoomy = kValues < 128;
  const ThreadTile tile = thread_tile(box_n, box_m, place.warp, place.lane, place.barrier);
  const auto finish_sums = [&] {
    wait_exponents(place.barrier);
    const u32 row_exponent = place.table + 4 * (Config::kSamples + tile.n0 - box_n);
    const i32 exponent[2] = {ptx::load_shared_int(row_exponent),
                             ptx::load_shared_int(row_exponent + 4 * 8)};
    if constexpr (Config::kXHalves) {
      finish_product_of_halves(sum, tile, exponent[0], exponent[1], args);
    } else {
      finish_product<typename Config::RedoRow>(sum, tile, exponent[0], exponent[1], place.table,
                                               args);
    }
  };
  if constexpr (!kRoomy) finish_sums();
  TileEpilogue<Epilogue, kValues> epilogue(tile, args, params);
  if constexpr (kRoomy) finish_sums();
  if constexpr (Epilogue::kStore && Config::kStagingBuffers > 0) {
    // The store before this one must have left the staging buffers.
    if (place.thread == 0) ptx::bulk_wait_read<0>();
    if constexpr (Config::kYHalves) {
      ptx::barrier_sync(place.barrier, 128);  // the exponents have been read
      finish_halves<Config::kStagingBuffers>(sum, tile, y_map, place.staging, place.table, args,
                                             epilogue, sample_tile);
    } else {
      finish_tma<Config::kStagingBuffers>(sum, tile, y_map, place.staging, 8192, epilogue,
                                          sample_tile);
    }
  } else {
    static_assert(!Config::kYHalves, "halves are stored by TMA");
    finish_direct(sum, tile, args, epilogue, sample_tile);
  }
}

// The body of a kernel whose operands are both packed. Consumer::accumulate() gives a tile's sums.
template <class Config, class Epilogue, class Consumer, bool kTurns>
INGOT_D void packed_product(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  Consumer consumer;
  const auto consume = [&](const ConsumerPlace& place, i32 feature_tile, i32 sample_tile) {
    const i32 box_m = first_sample<Config>(args, sample_tile);
    const i32 box_n = feature_tile * Config::kFeatures + place.group * 64;
    decltype(auto) own = args_of_tile<Config>(args, sample_tile);
    prefetch_operands<Epilogue, Config::kSamples>(params, own, box_m, box_n, place.thread);
    load_exponents<Config::kSamples, 64, !Config::kXHalves>(place.table, own, box_m, box_n,
                                                            place.thread, place.barrier);
    float sum[Config::kSamples / 2];
    consumer.accumulate(sum, place, args.chunks);
    finish_packed_tile<Config, Epilogue>(sum, place, box_m, box_n, y_map, own, params, sample_tile);
  };
  staged_product<Config, kTurns>(w_map, x_map, args, consume);
}

}  // namespace ingot::hopper
