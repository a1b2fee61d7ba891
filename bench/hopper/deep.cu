// Checks and times the product that converts both operands on the way (deep.cuh), beside cuBLAS
// and what the library has for the same shape (packed: ./a.out of bench.cu; streamed: streamed.cu).
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/deep.cu -ldl
//   ./a.out            checks, then times
//   ./a.out check      checks only (for compute-sanitizer: ./a.out small)
//   ./a.out time       times only
//
// Errors are in units of fp32's promise (docs/numerics.md). The exit status is whether a check
// failed.
#include <cstring>

#include "checking.cuh"
#include "deep.cuh"
#include "timing.cuh"

using namespace bench;

namespace {

template <bool kWAlongK, bool kXAlongK>
using ConfigOf = DeepConfig<3, 2, 2, kWAlongK, kXAlongK>;
using Config = ConfigOf<true, true>;  // all are of one size

template <class Own>
__global__ void __launch_bounds__(Own::kThreads, 1)
    deep_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                const __grid_constant__ DeepArgs args) {
  product_deep<Own>(w, x, args);
}
using Kernel = void (*)(TensorMap, TensorMap, DeepArgs);
Kernel kernel_for(bool w_along_k, bool x_along_k) {
  if (w_along_k) {
    return x_along_k ? deep_kernel<ConfigOf<true, true>> : deep_kernel<ConfigOf<true, false>>;
  }
  return x_along_k ? deep_kernel<ConfigOf<false, true>> : deep_kernel<ConfigOf<false, false>>;
}
__global__ void __launch_bounds__(256)
    merged_kernel(const __grid_constant__ DeepArgs args, float* y) {
  deep_merged(args, y);
}

// Both kernels on a problem's buffers; its workspace holds the slices' sums.
struct Deep {
  Kernel kernel;
  TensorMap w, x;
  DeepArgs args;
  float* y;

  Deep(const Problem& problem, int slices, int multiprocessors = 132) {
    const ProductShape& s = problem.shape;
    const bool w_along_k = s.w.k_stride == 1, x_along_k = s.x.k_stride == 1;
    kernel = kernel_for(w_along_k, x_along_k);
    w = encode_map(w_along_k ? matrix_map(s.k, s.n, s.w.row_stride, Config::kRows)
                             : columns_map(s.n, s.k, s.w.k_stride),
                   problem.w);
    x = encode_map(x_along_k ? matrix_map(s.k, s.m, s.x.row_stride, Config::kRows)
                             : matrix_map(s.m, s.k, s.x.k_stride, 32),
                   problem.x);
    args.m = i32(s.m), args.n = i32(s.n);
    args.chunks = i32(divide_up(s.k, Config::kChunk));
    args.sample_tiles = i32(divide_up(s.m, Config::kRows));
    args.tiles = args.sample_tiles * i32(divide_up(s.n, Config::kRows));
    const int most = std::max(1, multiprocessors / args.tiles);
    args.slices = std::min(args.chunks, slices > 0 ? slices : most);
    args.sums = reinterpret_cast<float*>(problem.workspace);
    y = problem.y;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Config::kSharedBytes));
  }
  void run() const {
    kernel<<<unsigned(args.tiles * args.slices), Config::kThreads, Config::kSharedBytes>>>(w, x,
                                                                                           args);
    const i64 results = i64(args.m) * args.n;
    merged_kernel<<<unsigned(divide_up(results, 256)), 256>>>(args, y);
    CHECK(cudaGetLastError());
  }
};

size_t sums_bytes(const ProductShape& s) {
  return size_t(s.m) * size_t(s.n) * 132 * 4;
}

void check_case(const Case& c, int slices) {
  const Problem problem(c.shape, c.x, c.w, sums_bytes(c.shape));
  const Deep deep(problem, slices);
  const auto [nans, differing] = repeated(problem, c.repeats, [&] { deep.run(); });
  const Errors e = problem.errors([](double t, int64_t, int64_t) { return t; });
  const bool ok = e.worst_row <= c.limit && e.units <= c.unit_limit && e.class_mismatches == 0 &&
                  differing == 0 && nans == 0;
  verdict(c.name, "slices " + std::to_string(deep.args.slices), "deep", e, ok, nans, differing);
}

void check_all(bool small) {
  std::vector<Case> cases = {
      {"128x128x64", row_major(128, 128, 64), u, w, 1e-6, 6},
      {"128x128x128", row_major(128, 128, 128), u, w, 1e-6, 6},
      {"1x4x4", row_major(1, 4, 4), u, w, 1e-6, 6},
      {"ragged 100x200x132", row_major(100, 200, 132), u, w, 1e-6, 6},
      {"ragged 65x130x1100", row_major(65, 130, 1100), u, w, 1e-6, 6},
      {"w along rows", transposed(100, 132, 1096, false), u, w, 1e-6, 6},
      {"both along rows", transposed(100, 132, 1096, true), u, w, 1e-6, 6},
  };
  const auto along_rows = transposed(260, 132, 4104, true);
  const auto shape = row_major(260, 131, 4100);
  if (!small) {
    const std::vector<Case> more = {
        {"256x256x131072", row_major(256, 256, 131072), u, w, 1e-6, 6},
        {"64x64x262144", row_major(64, 64, 262144), u, w, 1e-6, 6},
        {"normal", row_major(256, 256, 16384), Data::normal, Data::normal, 1e-6, 6},
        {"large mean", shape, Data::large_mean, w, 1e-6, 6},
        {"rows 2^+-60", shape, Data::wide_rows, Data::wide_rows, 2e-6, 6},
        {"chunks 2^+-30", shape, Data::wide_chunks, Data::wide_chunks, 2e-5, 6},
        {"x chunks 2^+-30", shape, Data::wide_chunks, u, 2e-6, 6},
        {"w chunks 2^+-30", shape, u, Data::wide_chunks, 2e-6, 6},
        {"elements 2^+-20", shape, Data::wide_elements, Data::wide_elements, 2e-5, 6},
        {"growing w", row_major(256, 256, 8192), Data::normal, Data::growing, 2e-6, 6},
        {"growing x", row_major(256, 256, 8192), Data::growing, Data::normal, 2e-6, 6},
        {"growing both", row_major(256, 256, 8192), Data::growing, Data::growing, 2e-6, 6},
        {"zero start w", shape, Data::normal, Data::zero_start, 1e-6, 6},
        {"zero start x", shape, Data::zero_start, Data::normal, 1e-6, 6},
        {"outlier", shape, Data::outlier, Data::outlier, 2e-6, 6},
        {"huge x tiny w", shape, Data::huge, Data::tiny, 1e-6, 6},
        {"tiny x huge w", shape, Data::tiny, Data::huge, 1e-6, 6},
        {"constant", shape, Data::constant, Data::constant, 1e-6, 6},
        {"rows: 256x256x131072", transposed(256, 256, 131072, true), u, w, 1e-6, 6},
        {"rows: rows 2^+-60", along_rows, Data::wide_rows, Data::wide_rows, 2e-6, 6},
        {"rows: x chunks 2^+-30", along_rows, Data::wide_chunks, u, 2e-6, 6},
        {"rows: w chunks 2^+-30", along_rows, u, Data::wide_chunks, 2e-6, 6},
        {"rows: growing both", along_rows, Data::growing, Data::growing, 2e-6, 6},
        {"rows: zero start x", along_rows, Data::zero_start, Data::normal, 1e-6, 6},
    };
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const Case& c : cases) {
    for (const int slices : {1, 3, 0}) check_case(c, slices);
  }
  std::printf("%d failures\n", failures);
}

// Medians, L2 cold: cuBLAS, and both kernels with two numbers of slices.
void time_shape(const ProductShape& shape) {
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  const Problem problem(shape, Data::uniform01, Data::weight, sums_bytes(shape));
  static const Blas blas;
  constexpr size_t kFlushed = size_t(256) << 20;
  void* flushed;
  CHECK(cudaMalloc(&flushed, kFlushed));
  const auto cold = [&](auto call) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times;
    for (int i = 0; i < 15; ++i) {
      float ms = 0;
      CHECK(cudaMemsetAsync(flushed, i, kFlushed));
      CHECK(cudaEventRecord(begin));
      call();
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 4) times.push_back(ms * 1e3);
    }
    return median(times);
  };
  const double bytes = 4.0 * double(m + n) * double(k);
  std::printf("%lld x %lld -> %lld, along %s: %.0f MB, 3 x 2MNK at 750 TF/s %.1f us\n",
              (long long)m, (long long)k, (long long)n, shape.x.k_stride == 1 ? "k" : "rows",
              bytes * 1e-6, 6.0 * double(m) * double(n) * double(k) / 750e6);
  if (blas.ready()) {
    const double us = cold([&] { blas.run(shape, problem.x, problem.w, problem.y); });
    std::printf("  cuBLAS fp32          %8.2f us\n", us);
  }
  const Deep whole(problem, 0);
  for (const int slices : {whole.args.slices, whole.args.slices / 2}) {
    if (slices < 1) continue;
    const Deep deep(problem, slices);
    const double us = cold([&] { deep.run(); });
    std::printf("  deep, %3d slices      %8.2f us  %.2f TB/s\n", slices, us, bytes / us * 1e-6);
  }
  CHECK(cudaFree(flushed));
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what != "time") check_all(what == "small");
  if (what.empty() || what == "time") {
    for (const bool along_rows : {false, true}) {
      const auto time = [&](int64_t m, int64_t n, int64_t k) {
        time_shape(along_rows ? transposed(m, n, k, true) : row_major(m, n, k));
      };
      time(256, 256, 131072);
      time(64, 64, 262144);
      time(128, 128, 1000000);
      time(256, 256, 16384);
      time(512, 512, 65536);
      time(384, 128, 65536);
    }
  }
  return failures == 0 ? 0 : 1;
}
