// What happens to a tile's accumulators: undo the scaling, redo what is not finite, apply the fused
// epilogue, emit partial statistics, store.
//
// The tile is yᵀ: a consumer warpgroup owns 64 features (accumulator rows) by kSamples samples
// (columns). A feature's statistics over the tile's samples are therefore a reduction over one
// accumulator row, which four lanes hold. Register j of a thread: see wgmma.cuh.
//
//   struct Epilogue {                       // generated, or written by hand in tests
//     struct Params { … };                  // plain data, passed by value
//     struct Feature { … };                 // operands of one feature
//     struct Sample { … };                  // operands of one sample
//     static constexpr int kMoments;        // statistics emitted per feature: 0, 1 or 2
//     static constexpr bool kStore;         // whether an m×n result is stored at all
//     static Feature feature(const Params&, i64 n);
//     static Sample sample(const Params&, i64 m);
//     // The value to store; stat[i] is what is lifted into the i-th statistic.
//     static float apply(const Params&, const Feature&, const Sample&, i64 m, i64 n, float product,
//                        float (&stat)[kMoments ? kMoments : 1]);
//   };
//
// apply() is also called for padding (m or n past the end), with indices clamped into range.
#pragma once

#include "product/hopper/args.cuh"
#include "product/redo.cuh"
#include "product/scale.cuh"

namespace ingot::hopper {

// Position of a consumer thread in its warpgroup's 64 × kSamples tile.
struct ThreadTile {
  i32 warp, lane;    // warp in the warpgroup
  i32 n0;            // first of the thread's features; the other is n0 + 8
  i32 m0;            // first of its samples
  i32 box_n, box_m;  // origin of the warpgroup's tile
  i32 barrier;       // named barrier of this warpgroup
};

INGOT_D ThreadTile thread_tile(i32 box_n, i32 box_m, i32 warp, i32 lane, i32 barrier) {
  return {warp,  lane,   box_n + warp * 16 + (lane >> 2), box_m + 2 * (lane & 3), box_n,
          box_m, barrier};
}

INGOT_D i32 clamp_index(i32 index, i32 count) {
  return index < count ? index : count - 1;
}

// Bit j: one of the four accumulators of column group j is not finite.
template <int kValues>
INGOT_D u32 nonfinite_groups(const float (&acc)[kValues]) {
  u32 marked = 0;
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    const float z = fmaf(acc[4 * j], 0.f, acc[4 * j + 1] * 0.f) +
                    fmaf(acc[4 * j + 2], 0.f, acc[4 * j + 3] * 0.f);
    marked |= u32(z != 0.f) << j;  // 0 · finite is 0; NaN compares unequal
  }
  return marked;
}

// acc · 2^(row + column exponent). The factor is split into two of half the exponent each: the sum
// of exponents spans ±252, and neither an intermediate overflow nor an early underflow may occur.
template <int kValues>
INGOT_D void unscale(float (&acc)[kValues], i32 row_exponent0, i32 row_exponent1,
                     u32 column_exponents, i32 lane) {
  const i32 row0a = row_exponent0 >> 1, row0b = row_exponent0 - row0a;
  const i32 row1a = row_exponent1 >> 1, row1b = row_exponent1 - row1a;
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 column = ptx::load_shared_int(column_exponents + 4 * (8 * j + 2 * (lane & 3) + e));
      const i32 a = column >> 1, b = column - a;
      acc[4 * j + e] = acc[4 * j + e] * pow2(row0a + a) * pow2(row0b + b);
      acc[4 * j + 2 + e] = acc[4 * j + 2 + e] * pow2(row1a + a) * pow2(row1b + b);
    }
  }
}

// Running moments of one feature in one thread: sums of deviations from the thread's first value.
// The pivot is itself a member of the sample, so at most log2(count) bits cancel in m2, whatever
// the mean. (A thread whose first sample is padding has no other sample either.) An infinite pivot
// would turn the mean, which is infinite, into NaN: 0 serves there, since m2 is NaN anyway.
//
// Everything is held in units of 1/8 of the value, exactly: a first value far above the others is
// squared once for each of them (48 at most), which must not overflow where m2 itself does not.
struct MomentsAccumulator {
  static constexpr float kUnit = 0.125f;
  float pivot, sum, sum_squares;

  INGOT_D void add(float value, bool first, bool valid) {
    if (first) pivot = value - value == 0.f ? value * kUnit : 0.f;
    const float deviation = valid ? fmaf(value, kUnit, -pivot) : 0.f;
    sum += deviation;
    sum_squares = fmaf(deviation, deviation, sum_squares);
  }
  INGOT_D Moments<float>::State state(float count) const {
    if (count == 0.f) return Moments<float>::identity();
    const float shift = sum / count;
    const float m2 = fmaf(-shift, sum, sum_squares);
    return {count, (pivot + shift) / kUnit, m2 < 0.f ? 0.f : m2 / (kUnit * kUnit)};
  }
};

// How many of the thread's columns (8j + 2·quad + {0, 1} below kSamples) are below `valid`.
INGOT_D float count_columns(i32 valid, i32 quad) {
  const i32 rest = (valid & 7) - 2 * quad;
  return static_cast<float>(2 * (valid >> 3) + (rest < 0 ? 0 : rest > 2 ? 2 : rest));
}

// Merges the partial states of a quad (the four lanes that share a feature); the order is fixed.
INGOT_D Moments<float>::State merge_quad(Moments<float>::State state) {
#pragma unroll
  for (int offset = 1; offset < 4; offset <<= 1) {
    const Moments<float>::State other = {__shfl_xor_sync(~0u, state.count, offset),
                                         __shfl_xor_sync(~0u, state.mean, offset),
                                         __shfl_xor_sync(~0u, state.m2, offset)};
    state = Moments<float>::merge(state, other);
  }
  return state;
}

// Applies the epilogue in place and writes this tile's partial statistics.
template <class Epilogue, int kValues>
INGOT_D void apply_epilogue(float (&values)[kValues], const ThreadTile& tile,
                            const ProductArgs& args, const typename Epilogue::Params& params,
                            i32 sample_tile) {
  constexpr int kStats = Epilogue::kMoments ? Epilogue::kMoments : 1;
  const i32 na = clamp_index(tile.n0, args.n), nb = clamp_index(tile.n0 + 8, args.n);
  const typename Epilogue::Feature feature_a = Epilogue::feature(params, na);
  const typename Epilogue::Feature feature_b = Epilogue::feature(params, nb);
  MomentsAccumulator moments[2][kStats] = {};
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool valid = tile.m0 + 8 * j + e < args.m;
      const i32 m = clamp_index(tile.m0 + 8 * j + e, args.m);
      const typename Epilogue::Sample sample = Epilogue::sample(params, m);
      float stat_a[kStats], stat_b[kStats];
      float& a = values[4 * j + e];
      float& b = values[4 * j + 2 + e];
      a = Epilogue::apply(params, feature_a, sample, m, na, a, stat_a);
      b = Epilogue::apply(params, feature_b, sample, m, nb, b, stat_b);
      if constexpr (Epilogue::kMoments > 0) {
#pragma unroll
        for (int i = 0; i < kStats; ++i) {
          moments[0][i].add(stat_a[i], j + e == 0, valid);
          moments[1][i].add(stat_b[i], j + e == 0, valid);
        }
      }
    }
  }
  if constexpr (Epilogue::kMoments > 0) {
    // None where a tile's samples are shared out and this part lies past the end.
    const i32 rows_left = args.m > tile.box_m ? args.m - tile.box_m : 0;
    const float count =
        count_columns(rows_left < 2 * kValues ? rows_left : 2 * kValues, tile.lane & 3);
#pragma unroll
    for (int i = 0; i < kStats; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Moments<float>::State state = merge_quad(moments[h][i].state(count));
        const i32 n = tile.n0 + 8 * h;
        if ((tile.lane & 3) == 0 && n < args.n) {
          args.partials[i][static_cast<i64>(sample_tile) * args.n + n] = state;
        }
      }
    }
  }
}

// From accumulators to the values to store.
template <class Epilogue, int kValues>
INGOT_D void finish_product(float (&acc)[kValues], const ThreadTile& tile, i32 row_exponent0,
                            i32 row_exponent1, u32 column_exponents, const ProductArgs& args,
                            const typename Epilogue::Params& params, i32 sample_tile) {
  u32 marked = args.redo_all ? ~0u : nonfinite_groups(acc);
  unscale(acc, row_exponent0, row_exponent1, column_exponents, tile.lane);
  if (ptx::warp_any(marked != 0)) redo_groups(acc, args, marked, tile.n0, tile.m0);
  apply_epilogue<Epilogue>(acc, tile, args, params, sample_tile);
}

// value · 2^-shift for 0 ≤ shift ≤ 252, in two exact steps.
INGOT_D float shift_down(float value, i32 shift) {
  return value * pow2(-(shift >> 1)) * pow2(-(shift - (shift >> 1)));
}

// Shared memory that exchange_slices() uses: the sums and two exponents of every consumer thread.
template <int kSlices, int kSamples>
constexpr int kExchangeBytes = 256 * (kSamples / 2 * 4 + kSlices * 16);

// A tile whose K is cut into kSlices, one a block of the cluster (rank = slice): each block holds
// the sum over its slice, for the whole tile, in units of its own 2^exponent of a row. All send
// each other a share, thread to the same thread, through distributed shared memory, and add what
// they get in the largest of the units, in the order of the slices. A thread then holds complete
// sums of the rank-th part of the samples. `buffer` is this block's shared memory, which the
// product no longer needs. Blocks whose producers have exited do not wait for them.
template <int kSlices, int kValues>
INGOT_D void exchange_slices(const float (&sum)[kValues], i32 (&exponent)[2],
                             float (&share)[kValues / kSlices], u32 buffer, i32 consumer_thread) {
  constexpr int kShare = kValues / kSlices, kVectors = kShare / 4;
  constexpr u32 kPlane = 256 * 16;  // one vector of every consumer thread
  static_assert(kShare % 4 == 0, "a share is whole groups of columns");
  const u32 rank = ptx::cluster_rank(), place = buffer + consumer_thread * 16;
  const u32 exponents = place + kSlices * kVectors * kPlane;
  ptx::cluster_sync();  // all products of the cluster are done with their rings
#pragma unroll
  for (int to = 0; to < kSlices; ++to) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float* part = sum + to * kShare + 4 * v;
      ptx::store_shared_remote(place + (rank * kVectors + v) * kPlane, to,
                               {part[0], part[1], part[2], part[3]});
    }
    ptx::store_shared_remote(exponents + rank * kPlane, to,
                             {__int_as_float(exponent[0]), __int_as_float(exponent[1]), 0.f, 0.f});
  }
  ptx::cluster_sync();
  i32 unit[kSlices][2];
#pragma unroll
  for (int from = 0; from < kSlices; ++from) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      unit[from][row] = ptx::load_shared_int(exponents + from * kPlane + 4 * row);
      if (from == 0 || unit[from][row] > exponent[row]) exponent[row] = unit[from][row];
    }
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) share[i] = 0.f;
#pragma unroll
  for (int from = 0; from < kSlices; ++from) {
    const i32 shift[2] = {exponent[0] - unit[from][0], exponent[1] - unit[from][1]};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 part = ptx::load_shared_vector(place + (from * kVectors + v) * kPlane);
      share[4 * v] += shift_down(part.x, shift[0]);
      share[4 * v + 1] += shift_down(part.y, shift[0]);
      share[4 * v + 2] += shift_down(part.z, shift[1]);
      share[4 * v + 3] += shift_down(part.w, shift[1]);
    }
  }
}

// Plain stores: eight lanes write 32 consecutive bytes of a row of y. Any alignment, any stride.
template <int kValues>
INGOT_D void store_direct(const float (&values)[kValues], const ThreadTile& tile,
                          const ProductArgs& args) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 m = tile.m0 + 8 * j + e;
      if (m < args.m) {
        float* row = args.y + m * args.y_stride;
        if (tile.n0 < args.n) row[tile.n0] = values[4 * j + e];
        if (tile.n0 + 8 < args.n) row[tile.n0 + 8] = values[4 * j + 2 + e];
      }
    }
  }
}

// TMA stores by way of shared memory: pieces of 32 samples, each two boxes of 32 features (one
// 128-byte swizzled row a sample; the stores below hit every bank once). `staging` holds kBuffers
// pieces of 8 KiB, `buffer_stride` bytes apart; TMA clips what lies past the matrix.
// Returns with the stores committed by thread 0 of the warpgroup but maybe not read yet.
template <int kBuffers, int kValues>
INGOT_D void store_tma(const float (&values)[kValues], const ThreadTile& tile,
                       const TensorMap& y_map, u32 staging, u32 buffer_stride) {
  constexpr int kPieces = kValues / 16;
  constexpr u32 kBoxBytes = 32 * 128;
  const bool leader = tile.warp == 0 && tile.lane == 0;
  const u32 quad = tile.lane & 3, feature = (tile.warp & 1) * 16 + (tile.lane >> 2);
  const u32 box = staging + (tile.warp >> 1) * kBoxBytes;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (leader && piece >= kBuffers) ptx::bulk_wait_read<kBuffers - 1>();
    ptx::barrier_sync(tile.barrier, 128);
    const u32 buffer = box + (piece % kBuffers) * buffer_stride;
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      const int j = 4 * piece + jj;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 row = 2 * quad + e;  // modulo 8, the swizzle's period
        const u32 line = buffer + (8 * jj + row) * 128 + (feature & 3) * 4;
        ptx::store_shared(line + (((feature >> 2) ^ row) << 4), values[4 * j + e]);
        ptx::store_shared(line + ((((feature + 8) >> 2) ^ row) << 4), values[4 * j + 2 + e]);
      }
    }
    ptx::fence_async_proxy();
    ptx::barrier_sync(tile.barrier, 128);
    if (leader) {
      const u32 source = staging + (piece % kBuffers) * buffer_stride;
      ptx::tma_store(&y_map, source, tile.box_n, tile.box_m + 32 * piece);
      ptx::tma_store(&y_map, source + kBoxBytes, tile.box_n + 32, tile.box_m + 32 * piece);
      ptx::bulk_commit();
    }
  }
}

// Exponents of the tile's samples, one table a warpgroup: copied to shared memory at the start of a
// tile without passing through registers, so that the latency hides behind the product.
template <int kSamples>
INGOT_D void load_sample_exponents(u32 table, const ProductArgs& args, i32 box_m, i32 thread,
                                   i32 barrier) {
  ptx::barrier_sync(barrier, 128);  // the previous tile's readers are done
#pragma unroll
  for (int first = 0; first < kSamples; first += 128) {
    const i32 column = first + thread;
    if (column < kSamples) {
      ptx::copy_word_async(table + 4 * column,
                           args.x_exponent + clamp_index(box_m + column, args.m));
    }
  }
}

INGOT_D void wait_sample_exponents(i32 barrier) {
  ptx::copy_wait_all();
  ptx::barrier_sync(barrier, 128);
}

}  // namespace ingot::hopper
