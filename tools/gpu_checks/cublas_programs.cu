// Programs of a stranger to Ingot, compiled against cuBLAS; blas_programs.py runs them with and
// without libingot_blas.so in front.
//
//   nvcc -O2 -std=c++17 -arch=sm_80 cublas_programs.cu -lcublas -o cublas_programs
//   cublas_programs cholesky|power N REPEATS
//
// cholesky: blocked, left-looking, as LAPACK's spotrf. Its error is ‖A − LLᵀ‖/‖A‖ in fp64.
// power: ten steps of block power iteration with 256 vectors. Its error is the largest of the 256
// Rayleigh quotients', relative to the same in fp64.
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr int kBlock = 1024;  // columns of a step of Cholesky
constexpr int kLeaf = 64;     // of what one thread block factors
constexpr int kVectors = 256, kSteps = 10;

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s failed\n", what);
  std::exit(1);
}

cublasHandle_t cublas() {
  static cublasHandle_t handle = [] {
    cublasHandle_t made;
    check(cublasCreate(&made) == CUBLAS_STATUS_SUCCESS, "cublasCreate");
    return made;
  }();
  return handle;
}

template <class T>
T* on_device(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)) == cudaSuccess, "cudaMalloc");
  return static_cast<T*>(memory);
}

// c = alpha · op(a) · op(b) + beta · c
template <class T>
void gemm(bool ta, bool tb, int m, int n, int k, T alpha, const T* a, int lda, const T* b, int ldb,
          T beta, T* c, int ldc) {
  if (m == 0 || n == 0 || k == 0) return;
  const auto op = [](bool t) { return t ? CUBLAS_OP_T : CUBLAS_OP_N; };
  cublasStatus_t status;
  if constexpr (sizeof(T) == 4) {
    status = cublasSgemm(cublas(), op(ta), op(tb), m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc);
  } else {
    status = cublasDgemm(cublas(), op(ta), op(tb), m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc);
  }
  check(status == CUBLAS_STATUS_SUCCESS, "gemm");
}

// b = b · L⁻ᵀ
template <class T>
void divide_by_factor(int m, int n, const T* l, int ldl, T* b, int ldb) {
  if (m == 0) return;
  const T one = 1;
  cublasStatus_t status;
  if constexpr (sizeof(T) == 4) {
    status = cublasStrsm(cublas(), CUBLAS_SIDE_RIGHT, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_T,
                         CUBLAS_DIAG_NON_UNIT, m, n, &one, l, ldl, b, ldb);
  } else {
    status = cublasDtrsm(cublas(), CUBLAS_SIDE_RIGHT, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_T,
                         CUBLAS_DIAG_NON_UNIT, m, n, &one, l, ldl, b, ldb);
  }
  check(status == CUBLAS_STATUS_SUCCESS, "trsm");
}

template <class T>
__global__ void factor_leaf(T* a, int lda, int n) {
  __shared__ T tile[kLeaf][kLeaf + 1];
  const int row = threadIdx.x;
  if (row < n) {
    for (int j = 0; j <= row; ++j) tile[row][j] = a[row + size_t(j) * lda];
  }
  for (int j = 0; j < n; ++j) {
    __syncthreads();
    const T pivot = sqrt(tile[j][j]);
    __syncthreads();
    if (row == j) tile[j][j] = pivot;
    if (row > j && row < n) tile[row][j] /= pivot;
    __syncthreads();
    if (row <= j || row >= n) continue;
    for (int i = j + 1; i <= row; ++i) tile[row][i] -= tile[row][j] * tile[i][j];
  }
  __syncthreads();
  if (row < n) {
    for (int j = 0; j <= row; ++j) a[row + size_t(j) * lda] = tile[row][j];
  }
}

// The lower triangle of a becomes its factor.
template <class T>
void factor_recursively(T* a, int lda, int n) {
  if (n <= kLeaf) {
    factor_leaf<<<1, kLeaf>>>(a, lda, n);
    return;
  }
  const int half = n / 2;
  T *below = a + half, *rest = a + half + size_t(half) * lda;
  factor_recursively(a, lda, half);
  divide_by_factor(n - half, half, a, lda, below, lda);
  gemm<T>(false, true, n - half, n - half, half, -1, below, lda, below, lda, 1, rest, lda);
  factor_recursively(rest, lda, n - half);
}

template <class T>
void cholesky(T* a, int n) {
  for (int j = 0; j < n; j += kBlock) {
    const int width = std::min(kBlock, n - j), below = n - j - width;
    T *diagonal = a + j + size_t(j) * n, *left = a + j;
    gemm<T>(false, true, width, width, j, -1, left, n, left, n, 1, diagonal, n);
    gemm<T>(false, true, below, width, j, -1, left + width, n, left, n, 1, diagonal + width, n);
    factor_recursively(diagonal, n, width);
    divide_by_factor(below, width, diagonal, n, diagonal + width, n);
  }
}

__device__ double uniform(size_t at) {
  unsigned long long z = (at + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return double((z ^ (z >> 31)) >> 11) / double(1ull << 53) - 0.5;
}

template <class T, class F>
__global__ void for_each(T* to, size_t count, F value) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    to[i] = T(value(i));
  }
}
struct Uniform {
  __device__ double operator()(size_t i) const { return uniform(i); }
};
template <class T>
struct Value {
  const T* of;
  __device__ double operator()(size_t i) const { return double(of[i]); }
};
template <class T>
struct LowerPart {
  const T* of;
  int n;
  __device__ double operator()(size_t i) const { return i % n >= i / n ? double(of[i]) : 0; }
};
struct AddDiagonal {
  const double* of;
  int n;
  __device__ double operator()(size_t i) const { return of[i] + (i % n == i / n ? 0.1 : 0); }
};
template <class T, class F>
void fill(T* to, size_t count, F value) {
  for_each<<<1024, 256>>>(to, count, value);
}

// B·Bᵀ/n with 0.1 more on the diagonal, rounded to fp32.
float* positive_definite(int n) {
  const size_t count = size_t(n) * n;
  double *b = on_device<double>(count), *a = on_device<double>(count);
  float* rounded = on_device<float>(count);
  fill(b, count, Uniform{});
  gemm<double>(false, true, n, n, n, 12.0 / n, b, n, b, n, 0, a, n);
  fill(rounded, count, AddDiagonal{a, n});
  cudaFree(b);
  cudaFree(a);
  return rounded;
}

double norm(const double* of, size_t count) {
  double found = 0;
  const int piece = 1 << 30;
  for (size_t i = 0; i < count; i += piece) {
    double part = 0;
    cublasDnrm2(cublas(), int(std::min<size_t>(piece, count - i)), of + i, 1, &part);
    found += part * part;
  }
  return std::sqrt(found);
}

// The median of the runs' seconds, the first not counted. `before` is not timed.
double timed(int repeats, const std::function<void()>& before, const std::function<void()>& run) {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    before();
    cudaDeviceSynchronize();
    const auto start = std::chrono::steady_clock::now();
    run();
    check(cudaDeviceSynchronize() == cudaSuccess, "the device");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (i > 0) seconds.push_back(took.count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void run_cholesky(int n, int repeats) {
  const size_t count = size_t(n) * n;
  float *a = positive_definite(n), *l = on_device<float>(count);
  const double seconds = timed(
      repeats, [&] { fill(l, count, Value<float>{a}); }, [&] { cholesky(l, n); });
  double *truth = on_device<double>(count), *lower = on_device<double>(count);
  fill(truth, count, Value<float>{a});
  fill(lower, count, LowerPart<float>{l, n});
  const double size = norm(truth, count);
  gemm<double>(false, true, n, n, n, -1, lower, n, lower, n, 1, truth, n);
  std::printf("{\"seconds\": %.6f, \"error\": %.3e}\n", seconds, norm(truth, count) / size);
}

// Rayleigh quotients of vectors that ten steps made orthonormal.
template <class T>
std::vector<T> power_iteration(const T* a, int n, T* q, T* z, T* gram) {
  const int v = kVectors;
  fill(q, size_t(n) * v, Uniform{});
  for (int step = 0; step <= kSteps; ++step) {
    // Twice, as one Cholesky factor of a Gram matrix leaves too much.
    for (int again = 0; again < 2; ++again) {
      gemm<T>(true, false, v, v, n, 1, q, n, q, n, 0, gram, v);
      factor_recursively(gram, v, v);
      divide_by_factor(n, v, gram, v, q, n);
    }
    gemm<T>(false, false, n, v, n, 1, a, n, q, n, 0, z, n);
    if (step < kSteps) std::swap(q, z);
  }
  gemm<T>(true, false, v, v, n, 1, q, n, z, n, 0, gram, v);
  std::vector<T> all(size_t(v) * v), found(v);
  cudaMemcpy(all.data(), gram, all.size() * sizeof(T), cudaMemcpyDeviceToHost);
  for (int i = 0; i < v; ++i) found[i] = all[size_t(i) * v + i];
  return found;
}

void run_power(int n, int repeats) {
  const size_t count = size_t(n) * n, vectors = size_t(n) * kVectors, few = kVectors * kVectors;
  float* a = positive_definite(n);
  std::vector<float> found;
  float *q = on_device<float>(vectors), *z = on_device<float>(vectors), *g = on_device<float>(few);
  const double seconds = timed(
      repeats, [] {}, [&] { found = power_iteration(a, n, q, z, g); });
  double* wide = on_device<double>(count);
  fill(wide, count, Value<float>{a});
  const std::vector<double> truth = power_iteration(
      wide, n, on_device<double>(vectors), on_device<double>(vectors), on_device<double>(few));
  double error = 0;
  for (int i = 0; i < kVectors; ++i) {
    error = std::max(error, std::fabs(found[i] - truth[i]) / std::fabs(truth[i]));
  }
  std::printf("{\"seconds\": %.6f, \"error\": %.3e}\n", seconds, error);
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "cublas_programs cholesky|power N REPEATS\n");
    return 2;
  }
  const bool power = std::strcmp(words[1], "power") == 0;
  (power ? run_power : run_cholesky)(std::atoi(words[2]), std::atoi(words[3]));
  return 0;
}
