// Halves that one product's epilogue hands to the next product, which so needs no packing pass.
//
// Form       rows as product/split.cuh packs them, [m][k/32][32 hi | 32 lo] fp16, but with a power
//            of two for each sample and 64 of k in the place of an exponent for each sample:
//            factor[k/64][factor_rows], x = (hi + lo) · factor. k is a multiple of 64.
// Writing    A consumer warpgroup has 64 features of a sample, so that its epilogue knows the
//            largest of them; it does not know the rest of the row. A row takes the bytes of the
//            fp32 row, and goes through the same staging buffers and tensor map.
// Reading    The factors of a stage pair's 64 of k travel with its first stage; they are applied
//            where the sums are promoted. Accumulators are in units of x, so that a finite result
//            may overflow on the way (|x| > 2^100 beside small weights): it is recomputed.
#pragma once

#include "product/hopper/store.cuh"

namespace ingot::hopper {

// Of a warp's 16 features, the largest of one sample of the 32 in a piece, of which the thread
// holds eight: lane 4g + q gets that of sample 8 · (g / 2) + 2q + g % 2.
INGOT_D float largest_of_sample(float (&top)[8], i32 lane) {
#pragma unroll
  for (int width = 4; width > 0; width /= 2) {
    const bool upper = (lane & (4 * width)) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float sent = upper ? top[i] : top[i + width];
      const float kept = upper ? top[i + width] : top[i];
      top[i] = fmaxf(kept, __shfl_xor_sync(~0u, sent, 4 * width));
    }
  }
  return top[0];
}

// Splits a piece of 32 samples into its two boxes of 32 features. Lanes of neighbouring features
// swap samples first, so that each has both features of one: of a packed row's pair.
template <int kValues>
INGOT_D void stage_halves(const float (&values)[kValues], int piece, const ThreadTile& tile,
                          u32 buffer, u32 scales) {
  constexpr u32 kBoxBytes = 32 * 128;
  const bool odd = (tile.lane & 4) != 0;
  const u32 quad = tile.lane & 3, pair = tile.lane >> 3, row = 2 * quad + odd;
  const u32 box = buffer + (tile.warp >> 1) * kBoxBytes + row * 128 + (tile.warp & 1) * 8;
  const u32 hi_at = box + ((pair ^ row) << 4), lo_at = box + (((pair + 4) ^ row) << 4);
#pragma unroll
  for (int jj = 0; jj < 4; ++jj) {
    const float* v = values + 4 * (4 * piece + jj);
    const float scale = ptx::load_shared(scales + 4 * (8 * jj + row));
    u32 hi[2], lo[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sent = odd ? v[2 * h] : v[2 * h + 1];
      const float got = __shfl_xor_sync(~0u, sent, 4);
      split_pair(odd ? got : v[2 * h], odd ? v[2 * h + 1] : got, scale, hi[h], lo[h]);
    }
    ptx::store_shared_pair(hi_at + 8 * jj * 128, hi[0], hi[1]);
    ptx::store_shared_pair(lo_at + 8 * jj * 128, lo[0], lo[1]);
  }
}

// The largest magnitude of each of the tile's samples among the warpgroup's features, as the bits
// of a float, into the words at `largest`: of floats without a sign the order is that of their
// bits.
template <int kValues>
INGOT_D void find_largest(const float (&values)[kValues], int piece, i32 lane, u32 largest) {
  const i32 row = 8 * (lane >> 3) + 2 * (lane & 3) + (lane >> 2 & 1);
  float top[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float* v = values + 4 * (4 * piece + i / 2) + i % 2;
    top[i] = fmaxf(fabsf(v[0]), fabsf(v[2]));
  }
  ptx::max_shared(largest + 4 * (32 * piece + row), __float_as_uint(largest_of_sample(top, lane)));
}

// Stores the factors of the warpgroup's features, a thread a sample, and leaves in `table` what the
// samples' values are to be multiplied by, in the place of the largest of them.
template <int kSamples>
INGOT_D void store_factors(const ThreadTile& tile, const ProductArgs& args, u32 table, i32 thread) {
  const i64 row = static_cast<i64>(tile.box_n / kFactorFeatures) * args.factor_rows;
#pragma unroll
  for (int first = 0; first < kSamples; first += 128) {
    const i32 sample = first + thread, m = tile.box_m + sample;
    if (sample >= kSamples) continue;
    const u32 place = table + 4 * sample;
    const i32 amax = ptx::load_shared_int(place);
    const i32 exponent = scale_exponent(__int_as_float(amax), kExactTarget);
    ptx::store_shared(place, pow2(-exponent));
    if (m < args.factor_rows && tile.box_n < args.n) args.y_factor[row + m] = pow2(exponent);
  }
}

// As finish_tma(), but what is stored are halves and their factors. `table`: shared memory of a
// word a sample of the tile.
template <int kBuffers, class Epilogue, int kValues>
INGOT_D void finish_halves(float (&values)[kValues], const ThreadTile& tile, const TensorMap& y_map,
                           u32 staging, u32 table, const ProductArgs& args,
                           TileEpilogue<Epilogue, kValues>& epilogue, i32 sample_tile) {
  constexpr int kGroups = 4, kPieces = kValues / (4 * kGroups), kSamples = 2 * kValues;
  constexpr u32 kPieceBytes = 8192;
  const bool leader = tile.warp == 0 && tile.lane == 0;
  const i32 thread = 32 * tile.warp + tile.lane;
#pragma unroll
  for (int first = 0; first < kSamples; first += 128) {
    if (first + thread < kSamples) ptx::store_shared(table + 4 * (first + thread), 0);
  }
  ptx::barrier_sync(tile.barrier, 128);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    epilogue.template apply<kGroups>(values, kGroups * piece);
    find_largest(values, piece, tile.lane, table);
  }
  ptx::barrier_sync(tile.barrier, 128);
  store_factors<kSamples>(tile, args, table, thread);
  ptx::barrier_sync(tile.barrier, 128);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const u32 buffer = staging + (piece % kBuffers) * kPieceBytes;
    if (kBuffers == 1 && piece > 0) {
      if (leader) ptx::bulk_wait_read<0>();
      ptx::barrier_sync(tile.barrier, 128);
    }
    stage_halves(values, piece, tile, buffer, table + 4 * 32 * piece);
    ptx::fence_async_proxy();
    // Once the store before this one has been read, the next piece may go where that lay.
    if (kBuffers > 1 && leader) ptx::bulk_wait_read<0>();
    ptx::barrier_sync(tile.barrier, 128);
    if (leader) {
      ptx::tma_store(&y_map, buffer, tile.box_n, tile.box_m + 32 * piece);
      ptx::tma_store(&y_map, buffer + kPieceBytes / 2, tile.box_n + 32, tile.box_m + 32 * piece);
      ptx::bulk_commit();
    }
  }
  epilogue.write_statistics(sample_tile);
}

// acc += sum · factor, for the thread's samples. `factors`: a word a sample of the tile.
template <int kValues>
INGOT_D void promote_halves(float (&acc)[kValues], const float (&sum)[kValues], u32 factors,
                            i32 lane) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    const int2 bits = ptx::load_shared_int_pair(factors + 8 * (lane & 3) + 32 * j);
    const float factor[2] = {__int_as_float(bits.x), __int_as_float(bits.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      acc[4 * j + i] = fmaf(sum[4 * j + i], factor[i & 1], acc[4 * j + i]);
  }
}

// finish_product() where promotion has applied the samples' factors.
template <int kValues>
INGOT_D void finish_product_of_halves(float (&acc)[kValues], const ThreadTile& tile,
                                      i32 row_exponent0, i32 row_exponent1,
                                      const ProductArgs& args) {
  u32 marked = 0;
  const bool redo = args.redo_all || ptx::warp_any(!all_finite(acc));
  if (redo) marked = args.redo_all ? ~0u : nonfinite_groups(acc);
  const float row0 = pow2(row_exponent0), row1 = pow2(row_exponent1);
#pragma unroll
  for (int i = 0; i < kValues; ++i) acc[i] *= (i & 2) != 0 ? row1 : row0;
  if (redo) redo_groups<SplitRow>(acc, args, marked, tile.n0, tile.m0);
}

}  // namespace ingot::hopper
