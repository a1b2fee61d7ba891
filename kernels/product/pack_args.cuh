// What a packing pass is told, whichever format it packs into.
#pragma once

#include "common/types.cuh"

namespace ingot {

struct SplitArgs {
  const float* source;  // element (row, k) at source[row · row_stride + k · k_stride]
  i64 row_stride, k_stride;
  i32 rows, k;
  void* packed;
  i32* exponent;  // [rows]
};

}  // namespace ingot
