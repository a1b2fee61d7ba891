// From a thread's values to the result in memory, with the fused epilogue on the way.
#pragma once

#include "product/hopper/epilogue.cuh"

namespace ingot::hopper {

// Plain stores of kGroups groups of eight samples: eight lanes write 32 consecutive bytes of a row
// of y. Any alignment, any stride.
template <int kGroups, int kValues>
INGOT_D void store_direct(const float (&values)[kValues], int first, const ThreadTile& tile,
                          const ProductArgs& args) {
#pragma unroll
  for (int j = first; j < first + kGroups; ++j) {
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

// Applies the epilogue to products and stores what it says. One that reads elements does so in
// pieces: all elements of a tile at once are more than there are registers, and a load does not
// move up past the stores of the piece before it.
template <class Epilogue, int kValues>
INGOT_D void finish_direct(float (&values)[kValues], const ThreadTile& tile,
                           const ProductArgs& args, TileEpilogue<Epilogue, kValues>& epilogue,
                           i32 sample_tile) {
  constexpr int kAll = kValues / 4, kPiece = kAll % 4 == 0 ? 4 : kAll % 2 == 0 ? 2 : 1;
  constexpr int kGroups = Epilogue::kStore && Epilogue::kReadsElements ? kPiece : kAll;
#pragma unroll
  for (int first = 0; first < kAll; first += kGroups) {
    epilogue.template apply<kGroups>(values, first);
    if constexpr (Epilogue::kStore) store_direct<kGroups>(values, first, tile, args);
  }
  epilogue.write_statistics(sample_tile);
}

// The same by way of shared memory and TMA, in pieces of 32 samples, each two boxes of 32 features
// (one 128-byte swizzled row a sample; the stores below hit every bank once): while one piece is on
// its way the next is computed. `staging` holds kBuffers pieces of 8 KiB, `buffer_stride` bytes
// apart, which no earlier store reads any more; TMA clips what lies past the matrix.
// Returns with the stores committed by thread 0 of the warpgroup but maybe not read yet.
template <int kBuffers, class Epilogue, int kValues>
INGOT_D void finish_tma(float (&values)[kValues], const ThreadTile& tile, const TensorMap& y_map,
                        u32 staging, u32 buffer_stride, TileEpilogue<Epilogue, kValues>& epilogue,
                        i32 sample_tile) {
  constexpr int kGroups = 4, kPieces = kValues / (4 * kGroups);
  constexpr u32 kBoxBytes = 32 * 128;
  const bool leader = tile.warp == 0 && tile.lane == 0;
  const u32 quad = tile.lane & 3, feature = (tile.warp & 1) * 16 + (tile.lane >> 2);
  const u32 box = staging + (tile.warp >> 1) * kBoxBytes;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    epilogue.template apply<kGroups>(values, kGroups * piece);
    if (leader && piece >= kBuffers) ptx::bulk_wait_read<kBuffers - 1>();
    ptx::barrier_sync(tile.barrier, 128);
    const u32 buffer = box + (piece % kBuffers) * buffer_stride;
#pragma unroll
    for (int jj = 0; jj < kGroups; ++jj) {
      const int j = kGroups * piece + jj;
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
  epilogue.write_statistics(sample_tile);
}

}  // namespace ingot::hopper
