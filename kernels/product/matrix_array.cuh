// Matrices whose addresses lie in an array, to and from memory where they lie behind one another:
// what a batch by pointers takes before and after the product of such memory.
#pragma once

#include "common/types.cuh"

namespace ingot {

// `count` matrices of `lines` lines of `length` contiguous elements each.
struct MatrixArray {
  float* const* matrices;
  i64 leading;  // elements from line to line
  float* dense;
  i64 dense_leading;
  i64 count;
  i32 lines, length;
};

// Where alpha_at and beta_at are given, alpha and beta lie there.
struct MatrixScale {
  float alpha, beta;
  const float *alpha_at, *beta_at;
};

// As BLAS has it: what counts for nothing is not looked at, whatever it is.
INGOT_HD float scaled_sum(float alpha, float product, float beta, float added) {
  const float scaled = alpha == 0.f ? 0.f : alpha * product;
  return beta == 0.f ? scaled : scaled + beta * added;
}

constexpr int kMatrixArrayThreads = 256, kMatrixArrayPiece = 256;  // of a line, a warp's

INGOT_HD i64 matrix_array_blocks(const MatrixArray& a) {
  const i64 pieces = (a.length + kMatrixArrayPiece - 1) / kMatrixArrayPiece;
  const i64 warps = kMatrixArrayThreads / 32;
  return (a.count * a.lines * pieces + warps - 1) / warps;
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// A lane's elements of the warp's piece of a line. Addresses are whatever the array holds, so they
// are read and written in words.
struct MatrixArrayPiece {
  static constexpr int kElements = kMatrixArrayPiece / 32;
  float *apart = nullptr, *dense = nullptr;
  i32 left = 0;  // of the line, from the lane's first element on

  INGOT_D explicit MatrixArrayPiece(const MatrixArray& a) {
    const i32 pieces = (a.length + kMatrixArrayPiece - 1) / kMatrixArrayPiece;
    const i64 warp = static_cast<i64>(blockIdx.x) * (kMatrixArrayThreads / 32) + (threadIdx.x >> 5);
    const i64 line = warp / pieces, matrix = line / a.lines;
    if (matrix >= a.count) return;
    const i32 first =
        static_cast<i32>(warp - line * pieces) * kMatrixArrayPiece + (threadIdx.x & 31);
    apart = a.matrices[matrix] + (line - matrix * a.lines) * a.leading + first;
    dense = a.dense + line * a.dense_leading + first;
    left = a.length - first;
  }
  INGOT_D bool has(int i) const { return 32 * i < left; }
};

INGOT_D void gather_matrices(const MatrixArray& a) {
  const MatrixArrayPiece piece(a);
  float v[MatrixArrayPiece::kElements];
#pragma unroll
  for (int i = 0; i < MatrixArrayPiece::kElements; ++i) {
    v[i] = piece.has(i) ? piece.apart[32 * i] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < MatrixArrayPiece::kElements; ++i) {
    if (piece.has(i)) piece.dense[32 * i] = v[i];
  }
}

INGOT_D void scatter_products(const MatrixArray& a, const MatrixScale& scale) {
  const MatrixArrayPiece piece(a);
  const float alpha = scale.alpha_at == nullptr ? scale.alpha : *scale.alpha_at;
  const float beta = scale.beta_at == nullptr ? scale.beta : *scale.beta_at;
  float product[MatrixArrayPiece::kElements], added[MatrixArrayPiece::kElements];
#pragma unroll
  for (int i = 0; i < MatrixArrayPiece::kElements; ++i) {
    product[i] = piece.has(i) ? piece.dense[32 * i] : 0.f;
    added[i] = beta != 0.f && piece.has(i) ? piece.apart[32 * i] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < MatrixArrayPiece::kElements; ++i) {
    if (piece.has(i)) piece.apart[32 * i] = scaled_sum(alpha, product[i], beta, added[i]);
  }
}

#endif

}  // namespace ingot
