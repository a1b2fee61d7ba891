// How a product is cut into strips of rows and rectangles for threads. No result depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/product/ranges.h"

namespace ingot::cpu::amx {

// In panels of 32.
inline constexpr int64_t kRowsPerThread = 32;  // with kSlabColumns: partial sums of 1 MB, in L2
inline constexpr int64_t kSlabColumns = 8;     // packed at a time, kept in L2
inline constexpr double kPackingCost = 6;      // of a right panel, in products of two panels
inline constexpr double kPairsPerThread = 32;  // below, another thread costs more than it brings

struct Blocking {
  int64_t over_m = 1, over_n = 1;  // threads
  int64_t strips = 1, strip = 1;   // of rows, packed at a time: number, panels
};

// m, n: panels; blocks: of k. Right operands are packed by each thread that needs them, rows once
// for all: cut n first, m where n is short.
inline Blocking choose_blocking(int64_t m, int64_t n, int64_t blocks, int64_t threads,
                                bool right_is_packed) {
  const double pairs =
      static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(blocks);
  threads = std::min(threads, std::max<int64_t>(1, static_cast<int64_t>(pairs / kPairsPerThread)));
  Blocking best;
  double best_cost = 1e300;
  for (int64_t over_m = 1; over_m <= threads; ++over_m) {
    const int64_t over_n = threads / over_m;
    Blocking b{over_m, over_n, ceil_div(m, kRowsPerThread * over_m), 1};
    b.strip = ceil_div(m, b.strips);
    const auto columns = static_cast<double>(ceil_div(n, over_n));
    const double each =
        static_cast<double>(ceil_div(b.strip, over_m)) + (right_is_packed ? 0 : kPackingCost);
    const double cost = static_cast<double>(b.strips) * columns * each;
    if (cost < best_cost) {
      best_cost = cost;
      best = b;
    }
  }
  return best;
}

}  // namespace ingot::cpu::amx
