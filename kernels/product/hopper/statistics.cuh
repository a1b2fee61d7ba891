// Partial batch statistics of a tile: count, mean and centred sum of squares of each feature over
// the tile's samples, which the four lanes of a quad hold between them.
//
// Sums of deviations from a pivot that the quad shares, so that its lanes' sums just add and one
// division is left. The pivot is the mean of the four lanes' first values, members of the sample:
// its distance δ from the sample's mean has δ² ≤ m2/4, so of Σ(x − pivot)² = m2 + n·δ² at most a
// factor of 1 + n/4 (49 for 192 samples) cancels, whatever the mean.
#pragma once

#include "common/monoid.cuh"
#include "common/ptx.cuh"

namespace ingot::hopper {

// The order does not matter to the bits: sums of two, then of two of these.
INGOT_D float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// One feature in one thread. Everything is held in units of 1/8 of the value, exactly: Σ(x −
// pivot)² must not overflow where m2, at most 49 times smaller, does not.
struct MomentsAccumulator {
  static constexpr float kUnit = 0.125f;
  float pivot, sum, sum_squares;

  // `first`: the thread's first value, counted if valid. rows: of the tile that exist; lane i of a
  // quad holds columns 2i and 2i + 1 first. All lanes of the warp call this.
  INGOT_D void begin(float first, bool valid, i32 rows) {
    const float total = quad_sum(valid ? first * kUnit : 0.f);
    const float mean = total * (rows >= 7 ? 0.25f : rows >= 5 ? 1.f / 3 : rows >= 3 ? 0.5f : 1.f);
    // An infinite pivot would turn an infinite mean into NaN; m2 is NaN whatever serves there.
    pivot = mean - mean == 0.f ? mean : 0.f;
  }
  INGOT_D void add(float value, bool valid) {
    const float deviation = valid ? fmaf(value, kUnit, -pivot) : 0.f;
    sum += deviation;
    sum_squares = fmaf(deviation, deviation, sum_squares);
  }
  // Of all `count` samples of the quad; the same in its four lanes.
  INGOT_D Moments<float>::State state_of_quad(float count) const {
    const float total = quad_sum(sum), squares = quad_sum(sum_squares);
    if (count == 0.f) return Moments<float>::identity();
    const float shift = total / count;
    const float m2 = fmaf(-shift, total, squares);
    return {count, (pivot + shift) / kUnit, m2 < 0.f ? 0.f : m2 / (kUnit * kUnit)};
  }
};

}  // namespace ingot::hopper
