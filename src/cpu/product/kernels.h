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

// c[rows, columns] = add + a·b over k, + row. Rows are those of the function that is called.
template <class T>
struct TileTask {
  int64_t k;
  const T* a;    // [k][rows], or as it lies
  int64_t lda;   // where it is read as it lies
  const T* b;    // [k][tile_columns]
  const T* add;  // sums over earlier k, or nullptr; may be c
  int64_t add_ld;
  const T* row;  // added to each row last, or nullptr
  T* c;
  int64_t ldc;
  int64_t columns;  // ≤ tile_columns
  Ahead ahead;
};

// A few rows of one matrix against all of another, both as they lie, rows along k:
// c[i·c_rows + j·c_columns] = a[i]·b[j], + added[i·added_rows + j·added_columns].
template <class T>
struct DotTask {
  int64_t k;
  const T* a;
  int64_t lda, m;
  const T* b;
  int64_t ldb, n;
  T* c;
  int64_t c_rows, c_columns;
  const T* added = nullptr;
  int64_t added_rows = 0, added_columns = 0;
};

inline constexpr int kMostTileRows = 14;
inline constexpr int kMostTurned = 8;

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
  // tile[r - 1]: for r rows, 1 ≤ r ≤ tile_rows. plain_tile: a's rows are read where they lie.
  void (*tile[kMostTileRows])(const TileTask<T>& task);
  void (*plain_tile[kMostTileRows])(const TileTask<T>& task);
  // Vectors along k, or along b's rows, which suits short ones; the latter for m ≤ kMostTurned.
  void (*dot_rows)(const DotTask<T>& task);
  void (*dot_turned)(const DotTask<T>& task);
};

// narrow: tiles of half as many columns.
template <class T>
const ProductKernels<T>& product_kernels(Level level, bool narrow = false);

}  // namespace ingot::cpu
