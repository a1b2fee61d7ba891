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
  // Of a batch, whose rows are counted on from entry to entry: an entry's, and how many elements
  // beyond rows · row_stride the next one begins. 0: one matrix.
  i32 entry_rows = 0;
  i64 entry_skip = 0;
  // Not 0: nothing that the kernel before this one on the stream reads or writes is read or written
  // here, and that one lets this one start once all before it is complete. Both may run at once.
  i32 beside = 0;
};

INGOT_HD const float* source_row(const SplitArgs& args, i32 row) {
  const float* source = args.source + row * args.row_stride;
  return args.entry_rows == 0 ? source : source + row / args.entry_rows * args.entry_skip;
}

}  // namespace ingot
