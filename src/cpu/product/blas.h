// A BLAS library's sgemm and dgemm behind the product interface.
#pragma once

#include "cpu/product/provider.h"

namespace ingot::cpu {

// A Fortran BLAS, found by address: gemm(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c,
// ldc), all by pointer. integer_bytes: 4 or 8, the size of its integers.
struct BlasFunctions {
  void* sgemm = nullptr;
  void* dgemm = nullptr;
  int integer_bytes = 4;
};

// False for a dtype that it has no function for, or sizes beyond its integers.
bool blas_takes(const BlasFunctions& blas, const ProductCall& call);
void blas_product(const BlasFunctions& blas, const ProductCall& call);

// An OpenBLAS, MKL or BLIS of the system; nullptr where there is none.
std::shared_ptr<const ProductProvider> library_product();

}  // namespace ingot::cpu
