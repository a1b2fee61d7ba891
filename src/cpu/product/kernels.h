// The inner parts of our own product, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace ingot::cpu {

// Cache lines to bring to level 2 while a tile is computed: `rows` runs of `lines` lines, `stride`
// bytes apart.
struct Ahead {
  const char* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t lines = 0;
};

// c[rows, columns] = add + a·b over k. Rows are those of the function that is called.
template <class T>
struct TileTask {
  int64_t k;
  const T* a;    // [k][rows]
  const T* b;    // [k][tile_columns]
  const T* add;  // sums over earlier k, or nullptr; may be c
  int64_t add_ld;
  T* c;
  int64_t ldc;
  int64_t columns;  // ≤ tile_columns
  Ahead ahead;
};

inline constexpr int kMostTileRows = 14;

// Operands come packed in panels, k outermost, so that a tile's loop reads both in order.
template <class T>
struct ProductKernels {
  int tile_rows, tile_columns;  // the largest tile
  // Packs `rows` ≤ width rows of a row-major [rows, k] matrix into a panel [k][width], zero-padded.
  // May write up to 64 bytes behind it.
  void (*pack_rows)(const T* source, int64_t ld, int64_t rows, int64_t k, int64_t width, T* panel);
  // The same from a row-major [k, columns] matrix.
  void (*pack_columns)(const T* source, int64_t ld, int64_t columns, int64_t k, int64_t width,
                       T* panel);
  // tile[r - 1]: for r rows, 1 ≤ r ≤ tile_rows.
  void (*tile[kMostTileRows])(const TileTask<T>& task);
  // c[0..m) = a[m, k] · row, for a few rows of a: the matrix-vector case.
  void (*dot_rows)(int64_t k, const T* a, int64_t lda, int64_t m, const T* row, T* c, int64_t ldc);
};

template <class T>
const ProductKernels<T>& product_kernels(Level level);

}  // namespace ingot::cpu
