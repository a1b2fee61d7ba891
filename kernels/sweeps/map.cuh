// The map sweep: pointwise only. Every element of every sample flows through the body once.
//
// A sample is kElements elements (rows·groups·features, static); the number of samples is dynamic.
// A block owns a tile of Lanes vectors of V elements and Rows·Unroll samples: what depends on the
// element but not on the sample (a bias, a scale) is loaded and computed once per thread.
//
//   map_sweep   samples that V divides, or V = 1; where rows are no whole vectors, these go on into
//               the next row, and the body gathers what is one value a row
//   odd_map     samples that no vector divides (odd_rows.cuh), of which no value that they share
//               depends on the element
//
// The body (generated):
//   static constexpr i64 kElements;
//   static constexpr bool kBySamples;                 blocks follow each other along the samples,
//                                                     not the elements: so much is shared by them
//   using Index = …;                                  holds kElements
//   struct Operands;                                  tensors read, then tensors written
//   template <int V> struct Feature, Element;         per element: shared by samples; own
//   template <int V> static void feature(const Operands&, Index e, Feature<V>&);
//   template <int V> static void load(const Operands&, i64 b, Index e, Element<V>&);
//   template <int V> static void finish(const Operands&, const Feature<V>&, Element<V>&,
//                                       i64 b, Index e);   computes and stores
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/odd_rows.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

// Grid: ceil(kElements / (V·Lanes)) · ceil(samples / (Rows·Unroll)) blocks of Lanes·Rows threads.
template <class Body, int V, int Lanes, int Rows, int Unroll>
INGOT_D void map_sweep(const typename Body::Operands& operands, i64 samples) {
  constexpr i64 kVectors = Body::kElements / V;
  constexpr u32 kTiles = static_cast<u32>((kVectors + Lanes - 1) / Lanes);
  u32 tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles;
  if constexpr (Body::kBySamples) {
    const u32 groups = gridDim.x / kTiles;
    tile = blockIdx.x / groups;
    group = blockIdx.x % groups;
  }
  const i64 vector = static_cast<i64>(tile) * Lanes + threadIdx.x % Lanes;
  const i64 first = static_cast<i64>(group) * (Rows * Unroll) + threadIdx.x / Lanes;

  let_next_kernel_start();
  wait_for_previous_kernel();
  if (vector >= kVectors) return;

  const auto e = static_cast<typename Body::Index>(vector * V);
  typename Body::template Feature<V> feature;
  typename Body::template Element<V> element[Unroll];
  Body::template feature<V>(operands, e, feature);
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    // Past the end the last sample again: behind a branch a load that converts would be waited for
    // before the next one starts.
    const i64 b = first + k * Rows;
    Body::template load<V>(operands, b < samples ? b : samples - 1, e, element[k]);
  }
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    const i64 b = first + k * Rows;
    if (b < samples) Body::template finish<V>(operands, feature, element[k], b, e);
  }
}

// V elements of each of a thread's samples: where they are, by sample, and whether there are any
// (else they are read, and nothing is done).
template <class Body, int V, int Rows, int Unroll, class Place>
INGOT_D void map_places(const typename Body::Operands& operands, i64 samples, i64 first,
                        Place place) {
  typename Body::template Feature<V> shared;
  typename Body::template Element<V> element[Unroll];
  Body::template feature<V>(operands, 0, shared);
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    const i64 b = first + k * Rows < samples ? first + k * Rows : samples - 1;
    Body::template load<V>(operands, b, place(b).e, element[k]);
  }
  INGOT_UNROLL
  for (int k = 0; k < Unroll; ++k) {
    const i64 b = first + k * Rows;
    const auto at = place(b);
    if (b < samples && at.inside) Body::template finish<V>(operands, shared, element[k], b, at.e);
  }
}

// Grid: ceil(kElements / (V·Lanes)) · ceil(samples / (Rows·Unroll)) blocks of Lanes·Rows threads.
template <class Body, int V, int Lanes, int Rows, int Unroll>
INGOT_D void odd_map(const typename Body::Operands& operands, i64 samples) {
  using Odd = OddRow<Body::kElements, V>;
  using Index = typename Body::Index;
  static_assert(Lanes >= Odd::kSingles);
  constexpr u32 kTiles = static_cast<u32>((Body::kElements + i64(V) * Lanes - 1) / (V * Lanes));
  struct Place {
    Index e;
    bool inside;
  };
  const u32 tile = blockIdx.x % kTiles;
  const int lane = static_cast<int>(threadIdx.x % Lanes);
  const i64 first = static_cast<i64>(blockIdx.x / kTiles) * (Rows * Unroll) + threadIdx.x / Lanes;

  let_next_kernel_start();
  wait_for_previous_kernel();

  const int offset = (static_cast<int>(tile) * Lanes + lane) * V;
  map_places<Body, V, Rows, Unroll>(operands, samples, first, [&](i64 b) {
    const Odd row(b);
    const bool inside = row.head + offset < row.end;
    return Place{static_cast<Index>(row.head + (inside ? offset : 0)), inside};
  });
  if (tile + 1 < kTiles || lane >= Odd::kSingles) return;
  map_places<Body, 1, Rows, Unroll>(operands, samples, first, [&](i64 b) {
    const int single = Odd(b).single(lane);
    return Place{static_cast<Index>(single < 0 ? 0 : single), single >= 0};
  });
}

}  // namespace ingot
