// cuBLAS for the bench programs, and the median that they report.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "device.cuh"

namespace bench {

// cuBLAS by dlopen (PyTorch's wheels hold one: LD_LIBRARY_PATH).
class Blas {
 public:
  Blas() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                             "/usr/local/cuda/lib64/libcublas.so.13"}) {
      if ((library_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL))) break;
    }
    if (!library_) {
      std::printf("no cuBLAS: %s\n", dlerror());
      return;
    }
    int (*create)(void**) = nullptr;
    int (*set_workspace)(void*, void*, size_t) = nullptr;
    *(void**)&create = dlsym(library_, "cublasCreate_v2");
    *(void**)&gemm_ = dlsym(library_, "cublasGemmEx");
    *(void**)&batched_ = dlsym(library_, "cublasSgemmStridedBatched");
    *(void**)&set_workspace = dlsym(library_, "cublasSetWorkspace_v2");
    if (create(&handle_)) std::printf("cublasCreate failed\n");
    void* workspace = nullptr;
    CHECK(cudaMalloc(&workspace, 64 << 20));
    set_workspace(handle_, workspace, 64 << 20);
  }
  bool ready() const { return handle_ != nullptr; }
  // y[m][n] = x[m][k] · w[n][k]ᵀ.
  void run(const void* x, const void* w, void* y, int m, int n, int k, bool half,
           bool tf32 = false) const {
    constexpr int kFloat = 0, kHalf = 2, kCompute32 = 68, kComputeTf32 = 77;
    const float one = 1.f, zero = 0.f;
    const int type = half ? kHalf : kFloat;
    if (gemm_(handle_, 1, 0, n, m, k, &one, w, type, k, x, type, k, &zero, y, kFloat, n,
              tf32 ? kComputeTf32 : kCompute32, -1)) {
      std::printf("cublasGemmEx failed\n");
    }
  }
  // The product of a shape in fp32, whatever its strides.
  void run(const ProductShape& s, const float* x, const float* w, float* y) const {
    const auto transposed = [](const OperandShape& o) { return o.k_stride == 1; };
    const auto line = [](const OperandShape& o) {
      return int(o.k_stride == 1 ? o.row_stride : o.k_stride);
    };
    const float one = 1.f, zero = 0.f;
    if (batched_(handle_, transposed(s.w), !transposed(s.x), int(s.n), int(s.m), int(s.k), &one, w,
                 line(s.w), s.w.batch_stride, x, line(s.x), s.x.batch_stride, &zero, y,
                 int(s.y_stride), s.m * s.y_stride, int(s.batches))) {
      std::printf("cublasSgemmStridedBatched failed\n");
    }
  }

 private:
  void* library_ = nullptr;
  void* handle_ = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
               int, const void*, void*, int, int, int, int) = nullptr;
  int (*batched_)(void*, int, int, int, int, int, const float*, const float*, int, long long,
                  const float*, int, long long, const float*, float*, int, long long,
                  int) = nullptr;
};

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

}  // namespace bench
