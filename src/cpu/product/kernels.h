// The inner parts of our own product, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace ingot::cpu {

// A register tile of c is kRows × columns; operands come packed in panels of that many rows or
// columns, k outermost, so that the tile's loop reads both in order.
template <class T>
struct ProductKernels {
  int tile_rows, tile_columns;
  // Packs `rows` ≤ width rows of a row-major [rows, k] matrix into a panel [k][width], zero-padded.
  void (*pack_rows)(const T* source, int64_t ld, int64_t rows, int64_t k, int64_t width, T* panel);
  // The same from a row-major [k, columns] matrix.
  void (*pack_columns)(const T* source, int64_t ld, int64_t columns, int64_t k, int64_t width,
                       T* panel);
  // c[rows, columns] (+)= a_panel · b_panel over k.
  void (*tile)(int64_t k, const T* a_panel, const T* b_panel, T* c, int64_t ldc, int64_t rows,
               int64_t columns, bool accumulate);
  // c[0..m) = a[m, k] · row, for a few rows of a: the matrix-vector case.
  void (*dot_rows)(int64_t k, const T* a, int64_t lda, int64_t m, const T* row, T* c, int64_t ldc);
};

template <class T>
const ProductKernels<T>& product_kernels(Level level);

}  // namespace ingot::cpu
