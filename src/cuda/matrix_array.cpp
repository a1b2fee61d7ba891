#include "cuda/matrix_array.h"

#include "support/cache_folder.h"

namespace ingot::cuda {
namespace {

constexpr const char* kText =
    R"(// Matrices by an array of their addresses, to and from a workspace.
#include "product/matrix_array.cuh"

extern "C" __global__ void __launch_bounds__(ingot::kMatrixArrayThreads) gather_matrices(
    const __grid_constant__ ingot::MatrixArray matrices) {
  ingot::gather_matrices(matrices);
}

extern "C" __global__ void __launch_bounds__(ingot::kMatrixArrayThreads) scatter_products(
    const __grid_constant__ ingot::MatrixArray matrices,
    const __grid_constant__ ingot::MatrixScale scale) {
  ingot::scatter_products(matrices, scale);
}
)";
enum Function : size_t { kGather, kScatter };

struct Kernels {
  Modules modules;
  int unit;

  Kernels() : modules(CubinCache(folder())), unit(modules.add(matrix_array_unit())) {}
  static std::string folder() {
    const std::string root = default_cache_folder();
    return root.empty() ? root : root + "/kernels";
  }
};

Kernels& kernels() {
  static Kernels& made = *new Kernels;  // outlives every static that may multiply at exit
  return made;
}

void launch(int device, Function function, const MatrixArray& matrices, void** arguments,
            CUstream stream) {
  const CurrentContext context(device);
  Kernels& k = kernels();
  if (k.modules.find(*context, k.unit) == nullptr) k.modules.load(*context, {k.unit});
  const LaunchConfig config = {static_cast<unsigned>(matrix_array_blocks(matrices)),
                               1,
                               1,
                               kMatrixArrayThreads,
                               1,
                               1,
                               0,
                               stream,
                               nullptr,
                               0};
  check(driver().cuLaunchKernelEx(&config, k.modules.find(*context, k.unit)->functions[function],
                                  arguments, nullptr),
        "launching a kernel");
}

}  // namespace

Unit matrix_array_unit() {
  return {{"matrix_array", kText}, {"gather_matrices", "scatter_products"}, 0};
}

void prepare_matrix_arrays(int device) {
  const CurrentContext context(device);
  kernels().modules.load(*context, {kernels().unit});
}

void gather_matrices(int device, const MatrixArray& matrices, CUstream stream) {
  MatrixArray given = matrices;
  void* arguments[] = {&given};
  launch(device, kGather, matrices, arguments, stream);
}

void scatter_products(int device, const MatrixArray& matrices, const MatrixScale& scale,
                      CUstream stream) {
  MatrixArray given = matrices;
  MatrixScale by = scale;
  void* arguments[] = {&given, &by};
  launch(device, kScatter, matrices, arguments, stream);
}

}  // namespace ingot::cuda
