#include "blas/product.h"

#include <climits>
#include <initializer_list>

namespace ingot::blas {
namespace {

bool is_operation(int operation) {
  return operation == kNone || operation == kTranspose || operation == kConjugate;
}

// Of an operand stored rows × columns or, if `transposed`, columns × rows.
bool is_matrix(const void* data, int64_t leading, int64_t rows, int64_t columns, bool transposed) {
  return data != nullptr && leading >= (transposed ? columns : rows) && leading <= INT_MAX;
}

}  // namespace

bool is_sound(const Product& p) {
  if (!is_operation(p.operation_a) || !is_operation(p.operation_b)) return false;
  for (const int64_t extent : {p.m, p.n, p.k, p.batches}) {
    if (extent < 1 || extent > INT_MAX) return false;
  }
  return is_matrix(p.a, p.lda, p.m, p.k, p.operation_a != kNone) &&
         is_matrix(p.b, p.ldb, p.k, p.n, p.operation_b != kNone) &&
         is_matrix(p.c, p.ldc, p.m, p.n, false) &&
         (p.added.data == nullptr || is_matrix(p.added.data, p.added.leading, p.m, p.n, false));
}

void merge_batches(Product& p) {
  const bool shared = p.stride_a == 0 && p.operation_b == kNone;
  if (p.batches == 1 || !shared || p.stride_b != p.n * p.ldb || p.stride_c != p.n * p.ldc) return;
  if (p.added.data != nullptr && p.added.stride != p.n * p.added.leading) return;
  if (p.n * p.batches > INT_MAX) return;
  p.n *= p.batches;
  p.batches = 1;
  p.stride_b = p.stride_c = p.added.stride = 0;
}

Product entry_of(const Product& batch, int64_t entry) {
  Product p = batch;
  p.a += entry * p.stride_a;
  p.b += entry * p.stride_b;
  p.c += entry * p.stride_c;
  if (p.added.data != nullptr) p.added.data += entry * p.added.stride;
  p.batches = 1;
  return p;
}

Matrices matrices_of(const Product& p) {
  const bool a_along_k = p.operation_a != kNone, b_along_k = p.operation_b == kNone;
  const Operand x = {p.b, b_along_k ? p.ldb : 1, b_along_k ? 1 : p.ldb, p.stride_b};
  const Operand w = {p.a, a_along_k ? p.lda : 1, a_along_k ? 1 : p.lda, p.stride_a};
  const Operand added = {p.added.data, p.added.leading, 1, p.added.stride};
  return {p.n, p.m, p.k, x, w, p.c, p.ldc, p.batches, p.stride_c, added};
}

}  // namespace ingot::blas
