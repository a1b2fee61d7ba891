// Launches of product/matrix_array.cuh, which belong to no program.
#pragma once

#include "cuda/modules.h"
#include "product/matrix_array.cuh"

namespace ingot::cuda {

Unit matrix_array_unit();

// Compiles and loads what both need.
void prepare_matrix_arrays(int device);
void gather_matrices(int device, const MatrixArray& matrices, CUstream stream);
void scatter_products(int device, const MatrixArray& matrices, const MatrixScale& scale,
                      CUstream stream);

}  // namespace ingot::cuda
