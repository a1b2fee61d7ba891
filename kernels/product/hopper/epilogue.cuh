// What happens to a tile's accumulators: undo the scaling, redo what is not finite, apply the fused
// epilogue, emit partial statistics; store.cuh stores.
//
// Nothing multiplies meanwhile (both consumers end a tile together), so every instruction here
// counts: 96 values a thread at K = 1024 take a tenth of the tile's time.
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
//     static constexpr u32 kSums;           // bit i: the i-th is a plain sum, not moments
//     static constexpr bool kStore;         // whether an m×n result is stored at all
//     static constexpr bool kReadsElements; // whether apply() reads operands of one per element
//     static void prefetch(const Params&, i64 m, i64 n);  // brings their lines at (m, n) into L2
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
#include "product/hopper/statistics.cuh"
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

template <int kValues>
INGOT_D bool all_finite(const float (&acc)[kValues]) {
  float zero[4] = {};  // 0 · finite is 0
#pragma unroll
  for (int i = 0; i < kValues; ++i) zero[i & 3] = fmaf(acc[i], 0.f, zero[i & 3]);
  return zero[0] + zero[1] + (zero[2] + zero[3]) == 0.f;
}

// Whether an exponent of this warp's rows or of its tile's kColumns columns is beyond ±63, so that
// a row's and a column's may sum to what no power of two in fp32 has.
template <int kColumns>
INGOT_D bool wide_exponents(i32 row_exponent0, i32 row_exponent1, u32 column_exponents, i32 lane) {
  const auto wide = [](i32 exponent) { return static_cast<u32>(exponent + 63) > 126u; };
  bool found = wide(row_exponent0) || wide(row_exponent1);
#pragma unroll
  for (int column = 0; column < kColumns; column += 32) {
    if (kColumns - column >= 32 || lane < kColumns - column) {
      found = found || wide(ptx::load_shared_int(column_exponents + 4 * (column + lane)));
    }
  }
  return ptx::warp_any(found);
}

// acc · 2^(row + column exponent). Where exponents are wide the factor is two of half the exponent
// each: their sum spans ±252, and neither an intermediate overflow nor an early underflow may
// occur.
template <int kValues>
INGOT_D void unscale(float (&acc)[kValues], i32 row_exponent0, i32 row_exponent1,
                     u32 column_exponents, i32 lane) {
  const u32 own_columns = column_exponents + 8 * (lane & 3);
  if (!wide_exponents<2 * kValues>(row_exponent0, row_exponent1, column_exponents, lane)) {
    const float row0 = pow2(row_exponent0), row1 = pow2(row_exponent1);
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      const int2 columns = ptx::load_shared_int_pair(own_columns + 32 * j);
      const float column[2] = {pow2(columns.x), pow2(columns.y)};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        acc[4 * j + e] *= row0 * column[e];
        acc[4 * j + 2 + e] *= row1 * column[e];
      }
    }
    return;
  }
  const i32 row0a = row_exponent0 >> 1, row0b = row_exponent0 - row0a;
  const i32 row1a = row_exponent1 >> 1, row1b = row_exponent1 - row1a;
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 column = ptx::load_shared_int(own_columns + 32 * j + 4 * e);
      const i32 a = column >> 1, b = column - a;
      acc[4 * j + e] = acc[4 * j + e] * pow2(row0a + a) * pow2(row0b + b);
      acc[4 * j + 2 + e] = acc[4 * j + 2 + e] * pow2(row1a + a) * pow2(row1b + b);
    }
  }
}

// The fused epilogue of one thread's values, a few columns at a time, so that what is stored of
// them travels while the next are computed; then the tile's partial statistics.
template <class Epilogue, int kValues>
class TileEpilogue {
 public:
  // Loads the operands of the thread's two features: to be made well before they are needed.
  INGOT_D TileEpilogue(const ThreadTile& tile, const ProductArgs& args,
                       const typename Epilogue::Params& params)
      : tile_(tile),
        args_(args),
        params_(params),
        na_(clamp_index(tile.n0, args.n)),
        nb_(clamp_index(tile.n0 + 8, args.n)),
        rows_(args.m - tile.box_m < kSamples ? args.m - tile.box_m : kSamples),
        feature_a_(Epilogue::feature(params, na_)),
        feature_b_(Epilogue::feature(params, nb_)) {}

  // Values of the column groups first … first + kGroups − 1, in place; in ascending order.
  template <int kGroups>
  INGOT_D void apply(float (&values)[kValues], int first) {
    if (rows_ == kSamples) {
      apply_groups<kGroups, true>(values, first);
    } else {
      apply_groups<kGroups, false>(values, first);
    }
  }

  INGOT_D void write_statistics(i32 sample_tile) {
    if constexpr (Epilogue::kMoments > 0) {
      const float count = rows_ > 0 ? static_cast<float>(rows_) : 0.f;
#pragma unroll
      for (int i = 0; i < kStats; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const i32 n = tile_.n0 + 8 * h;
          const bool writes = (tile_.lane & 3) == 0 && n < args_.n;
          const i64 at = static_cast<i64>(sample_tile) * args_.n + n;
          if (is_sum(i)) {
            const float sum = quad_sum(moments_[h][i].sum);
            if (writes) reinterpret_cast<Sum<float>::State*>(args_.partials[i])[at] = {sum};
          } else {
            const Moments<float>::State state = moments_[h][i].state_of_quad(count);
            if (writes) args_.partials[i][at] = state;
          }
        }
      }
    }
  }

 private:
  static constexpr int kSamples = 2 * kValues;
  static constexpr int kStats = Epilogue::kMoments ? Epilogue::kMoments : 1;

  INGOT_D static constexpr bool is_sum(int i) {
    return (Epilogue::kSums >> i & 1) != 0;
  }

  template <int kGroups, bool kWhole>
  INGOT_D void apply_groups(float (&values)[kValues], int first) {
#pragma unroll
    for (int j = first; j < first + kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i32 m = tile_.m0 + 8 * j + e;
        const bool valid = kWhole || m < args_.m;
        const i32 row = kWhole ? m : clamp_index(m, args_.m);
        const typename Epilogue::Sample sample = Epilogue::sample(params_, row);
        float stat_a[kStats], stat_b[kStats];
        float& a = values[4 * j + e];
        float& b = values[4 * j + 2 + e];
        a = Epilogue::apply(params_, feature_a_, sample, row, na_, a, stat_a);
        b = Epilogue::apply(params_, feature_b_, sample, row, nb_, b, stat_b);
        if constexpr (Epilogue::kMoments > 0) {
#pragma unroll
          for (int i = 0; i < kStats; ++i) {
            if (is_sum(i)) {
              moments_[0][i].sum += valid ? stat_a[i] : 0.f;
              moments_[1][i].sum += valid ? stat_b[i] : 0.f;
              continue;
            }
            if (j + e == 0) {
              moments_[0][i].begin(stat_a[i], valid, rows_);
              moments_[1][i].begin(stat_b[i], valid, rows_);
            }
            moments_[0][i].add(stat_a[i], valid);
            moments_[1][i].add(stat_b[i], valid);
          }
        }
      }
    }
  }

  const ThreadTile& tile_;
  const ProductArgs& args_;
  const typename Epilogue::Params& params_;
  i32 na_, nb_;
  i32 rows_;  // of the tile that exist; below 1 where a share of a tile lies past the end
  typename Epilogue::Feature feature_a_, feature_b_;
  MomentsAccumulator moments_[2][kStats] = {};
};

// From accumulators to products: what the epilogue starts from. Row: of x, as the redo reads it.
template <class Row = PlainRow, int kValues>
INGOT_D void finish_product(float (&acc)[kValues], const ThreadTile& tile, i32 row_exponent0,
                            i32 row_exponent1, u32 column_exponents, const ProductArgs& args) {
  u32 marked = 0;
  const bool redo = args.redo_all || ptx::warp_any(!all_finite(acc));
  if (redo) marked = args.redo_all ? ~0u : nonfinite_groups(acc);
  unscale(acc, row_exponent0, row_exponent1, column_exponents, tile.lane);
  if (redo) redo_groups<Row>(acc, args, marked, tile.n0, tile.m0);
}

// The same where operands had no scales.
template <int kValues>
INGOT_D void finish_unscaled_product(float (&acc)[kValues], const ThreadTile& tile,
                                     const ProductArgs& args) {
  if (!args.redo_all && !ptx::warp_any(!all_finite(acc))) return;
  redo_groups(acc, args, args.redo_all ? ~0u : nonfinite_groups(acc), tile.n0, tile.m0);
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

// Brings the operands that the epilogue of a warpgroup's tile will read into L2, while the product
// has yet to run: what comes from memory only then is waited for with nothing else to do.
template <class Epilogue, int kSamples>
INGOT_D void prefetch_operands(const typename Epilogue::Params& params, const ProductArgs& args,
                               i32 box_m, i32 box_n, i32 thread) {
  if constexpr (Epilogue::kReadsElements) {
    constexpr i32 kLineFeatures = 32, kLines = 64 / kLineFeatures;
#pragma unroll
    for (i32 i = thread; i < kSamples * kLines; i += 128) {
      const i32 m = box_m + i / kLines, n = box_n + i % kLines * kLineFeatures;
      if (m < args.m && n < args.n) Epilogue::prefetch(params, m, n);
    }
  }
}

// Exponents of the tile's samples and, where kFeatures > 0, behind them those of the warpgroup's
// features; one table a warpgroup. Copied to shared memory at the start of a tile without passing
// through registers, so that the latency hides behind the product.
template <int kSamples, int kFeatures, bool kOfSamples = true>
INGOT_D void load_exponents(u32 table, const ProductArgs& args, i32 box_m, i32 box_n, i32 thread,
                            i32 barrier) {
  ptx::barrier_sync(barrier, 128);  // the previous tile's readers are done
#pragma unroll
  for (int first = 0; first < kSamples; first += 128) {
    const i32 column = first + thread;
    if (kOfSamples && column < kSamples) {
      ptx::copy_word_async(table + 4 * column,
                           args.x_exponent + clamp_index(box_m + column, args.m));
    }
  }
  if (thread < kFeatures) {
    ptx::copy_word_async(table + 4 * (kSamples + thread),
                         args.w_exponent + clamp_index(box_n + thread, args.n));
  }
}

INGOT_D void wait_exponents(i32 barrier) {
  ptx::copy_wait_all();
  ptx::barrier_sync(barrier, 128);
}

}  // namespace ingot::hopper
