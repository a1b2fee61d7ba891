// Rows whose length no vector divides, one behind another in memory: where a row's whole vectors
// lie. Row `index` begins at element index · Length of the tensor, which is any place within a
// vector:
//
//   | head | vector | vector | ... | vector | tail |      head, tail: fewer than V elements each
//          ^ a multiple of V from where the tensor begins
//
// so that all tensors that lie so, of whatever types, have their vectors at the same elements. Head
// and tail are moved one by one, by 2·V threads.
#pragma once

#include "common/types.cuh"

namespace ingot {

template <i64 Length, int V>
struct OddRow {
  static_assert(Length >= 2 * V && Length < (i64{1} << 31), "a row has whole vectors");
  static constexpr int kSingles = 2 * V, kLength = static_cast<int>(Length);
  int head;
  int end;  // of the whole vectors

  INGOT_HD explicit OddRow(i64 index)
      : head(static_cast<int>(-static_cast<u32>(index) * static_cast<u32>(kLength) & (V - 1))),
        end(head + (kLength - head) / V * V) {}

  // The element of the n-th thread that moves single ones, 0 ≤ n < kSingles, or -1.
  INGOT_HD int single(int n) const {
    if (n < V) return n < head ? n : -1;
    const int at = end + (n - V);
    return at < kLength ? at : -1;
  }
};

}  // namespace ingot
