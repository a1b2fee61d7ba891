// fp32 values as two TF32 operands of mma.sync: v = hi + lo (docs/numerics.md, "Small and thin
// products").
#pragma once

#include "common/types.cuh"

namespace ingot::hopper {

// v = hi + lo, as TF32 operands. Infinite and NaN values make hi or lo so.
INGOT_D void split_tf32(float v, u32& hi, u32& lo) {
  hi = (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
  lo = __float_as_uint(v - __uint_as_float(hi));
}

// The four elements of a lane, for two steps of 8 of k: [step][first or second].
struct SplitElements {
  u32 hi[2][2], lo[2][2];

  INGOT_D void set(const float4& v) {
    split_tf32(v.x, hi[0][0], lo[0][0]);
    split_tf32(v.y, hi[0][1], lo[0][1]);
    split_tf32(v.z, hi[1][0], lo[1][0]);
    split_tf32(v.w, hi[1][1], lo[1][1]);
  }
};

}  // namespace ingot::hopper
