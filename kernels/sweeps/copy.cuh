// Copies a tensor of any strides into a dense one, converting the dtype: the operands of library
// products, which take neither every stride nor a mixture of dtypes.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

struct CopyExtents {
  i64 batch, rows, groups, features;
};

// Grid: any number of blocks; each thread moves V features at a time. V > 1 where the source's
// features are dense and aligned and their number is a multiple of V.
template <class From, class To, int V>
INGOT_D void copy_sweep(const Tensor& source, void* destination, const CopyExtents& extents) {
  const i64 vectors = extents.features / V;
  const i64 total = extents.batch * extents.rows * extents.groups * vectors;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const i64 f = i % vectors * V, line = i / vectors;
    const i64 g = line % extents.groups, upper = line / extents.groups;
    decltype(widen(From{})) values[V];
    ingot::load(source.at<From>(upper / extents.rows, upper % extents.rows, g, f), values);
    ingot::store(static_cast<To*>(destination) + i * V, values);
  }
}

}  // namespace ingot
