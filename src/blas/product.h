// An fp32 product as BLAS asks for it, and the same as Ingot's programs take it.
#pragma once

#include <cstdint>

#include "blas/cublas.h"

namespace ingot::blas {

// A matrix that is only read.
struct Addend {
  const float* data = nullptr;
  int64_t leading = 0, stride = 0;
};

// C = alpha · op(A) · op(B) + beta · C, `batches` times; matrices are column-major, op(A) is m × k,
// op(B) is k × n. Strides lead from one product of the batch to the next, in elements.
struct Product {
  int operation_a = kNone, operation_b = kNone;
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t lda = 0, stride_a = 0;
  const float* b = nullptr;
  int64_t ldb = 0, stride_b = 0;
  float* c = nullptr;
  int64_t ldc = 0, stride_c = 0;
  int64_t batches = 1;
  Addend added = {};  // cublasLt's C where it lies apart from the result D, which then is `c`
};

// Whether BLAS defines the product and it is not empty: what else there is, the library judges.
bool is_sound(const Product& product);

// Where all products share A and their columns lie behind one another, they are one product.
void merge_batches(Product& product);

// Product number `entry` of a batch.
Product entry_of(const Product& product, int64_t entry);

// Element (row, k) of an operand lies at data[row · row_stride + k · k_stride].
struct Operand {
  const float* data;
  int64_t row_stride, k_stride;
  int64_t batch_stride = 0;
};

// Row-major y[s, f] = Σ_k x[s, k] · w[f, k]. That is Cᵀ: its samples are C's columns, its features
// C's rows.
struct Matrices {
  int64_t samples, features, k;
  Operand x, w;
  float* y;
  int64_t y_stride;
  int64_t batches, y_batch_stride;
  Operand added;  // row-major too, one element a result; its data nullptr where C is y

  // Whether the rows of all results lie in memory as those of one matrix, which a launch for a
  // whole batch needs.
  bool results_follow() const { return batches == 1 || y_batch_stride == samples * y_stride; }
};
Matrices matrices_of(const Product& product);

}  // namespace ingot::blas
