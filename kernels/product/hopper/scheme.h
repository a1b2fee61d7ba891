// What a way to make fp32 products of fp16 ones is: a row of numbers and rules, which planning,
// packing and the cost model read. To add one, add a file beside scheme_split.h and name it in
// launch.h's scheme_of().
#pragma once

#include <vector>

#include "product/hopper/tiles.h"

namespace ingot::hopper {

// |error| ≤ factor · (roundoff · Σ|x||w| + range_floor · (max|x| · Σ|w| + max|w| · Σ|x|)), apart
// from what rounds in fp32 as any sum does: docs/numerics.md.
struct ErrorBound {
  double factor = 0, roundoff = 0, range_floor = 0;
};

struct SchemeSpec {
  // The packed form of either operand; of 16-bit operands, which are read as they are, none.
  int line_k = 0;        // elements of K in 128 bytes
  int whole_k = line_k;  // to multiples of which K is padded
  const char* pack_header = nullptr;
  const char *pack_rows = nullptr, *pack_columns = nullptr;  // its functions, by layout
  int vectors = 1;                 // that a lane of pack_rows loads at once
  int most_loads = 0;              // that it keeps in registers; longer rows are read twice
  int64_t most_terms = INT64_MAX;  // of a sum
  ErrorBound bound{};
  // Tiles that the cost model chooses from.
  std::vector<TileChoice> (*tiles)(const ProductShape&, const DeviceLimits&);
  // Microseconds: of the product in such tiles, packing included; of the library's.
  double (*estimate)(const ProductShape&, const TileChoice&, const DeviceLimits&);
  double (*estimate_library)(const ProductShape&);
};

// Cycles of a tile: for each element of K, and once for its epilogue.
struct TileCycles {
  double per_k, epilogue;
};

// Microseconds of all tiles, in waves, each a number of steps along K and an epilogue.
inline double tile_time(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device,
                        const TileCycles& cycles, double k) {
  constexpr double kCyclesPerMicrosecond = 1600;
  constexpr double kExchangePerSample = 57;  // cycles, where slices of K meet
  double tile = k * cycles.per_k + cycles.epilogue;
  if (c.slices > 1) {
    const double slice = 128 * double(divide_up(divide_up(shape.k, 128), c.slices));
    tile = slice * cycles.per_k + cycles.epilogue / c.slices + kExchangePerSample * c.samples;
  }
  const int64_t waves = divide_up(tiles_of(shape, c), cluster_slots(c, device));
  return double(waves) * tile / kCyclesPerMicrosecond;
}

}  // namespace ingot::hopper
