// Checks and times the product that reads its operands as they are (product/hopper/direct.cuh), for
// operands along k and along their rows, against fp64 on the host.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels -Ibench/hopper
//   bench/hopper/direct.cu
//   ./a.out      one line a tile: µs with a cold L2, relative error; the exit status is whether one
//                is wrong
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <tuple>
#include <vector>

#include "epilogues.cuh"
#include "product/hopper/direct.cuh"
#include "status.cuh"

using namespace ingot;
using bench::PlainEpilogue;
using hopper::DirectConfig;
using hopper::ProductArgs;

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    product_kernel(const __grid_constant__ ProductArgs args) {
  hopper::product_direct<Config, PlainEpilogue>({}, {}, {}, args, {});
}

constexpr double kMostError = 1e-6;
constexpr size_t kFlushed = size_t(256) << 20;  // bytes, more than L2 has
int failures = 0;
int* flush;

// A matrix of `rows` by k, along k or along its rows.
struct Matrix {
  bool along_k;
  i64 row_stride, k_stride;
  std::vector<float> host;
  float* device;

  Matrix(bool along_k_, i32 rows, i32 k, i32 gap, std::mt19937& random)
      : along_k(along_k_),
        row_stride(along_k ? k + gap : 1),
        k_stride(along_k ? 1 : rows + gap),
        host(size_t(along_k ? rows : k) * size_t(along_k ? row_stride : k_stride)) {
    for (float& v : host) v = float(random() >> 8) / 16777216.f;
    CHECK(cudaMalloc(&device, host.size() * 4));
    CHECK(cudaMemcpy(device, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  }
  ~Matrix() { cudaFree(device); }
  Matrix(const Matrix&) = delete;
  hopper::OperandView view() const { return {device, row_stride, k_stride}; }
  double at(i64 row, i64 k) const { return host[size_t(row * row_stride + k * k_stride)]; }
};

// Of a few hundred results, drawn at random.
double error_of(const std::vector<float>& y, const Matrix& x, const Matrix& w, i32 m, i32 n,
                i32 k) {
  std::mt19937 random(3);
  double difference = 0, size = 0;
  for (int drawn = 0; drawn < 300; ++drawn) {
    const i64 row = random() % u32(m), column = random() % u32(n);
    double truth = 0;
    for (i64 i = 0; i < k; ++i) truth += x.at(row, i) * w.at(column, i);
    difference += std::pow(y[size_t(row * n + column)] - truth, 2);
    size += truth * truth;
  }
  return std::sqrt(difference / size);
}

template <class Config>
void tile(const char* name, ProductArgs args, const Matrix& x, const Matrix& w) {
  constexpr size_t kShared =
      size_t(Config::kRingBytes) * Config::kSampleWarps * Config::kDepthWarps;
  CHECK(cudaFuncSetAttribute(product_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(kShared)));
  const i32 feature_tiles = (args.n + Config::kFeatures - 1) / Config::kFeatures;
  const i32 sample_tiles = (args.m + Config::kSamples - 1) / Config::kSamples;
  args.raster = {feature_tiles, sample_tiles, std::min(8, feature_tiles)};
  std::vector<float> y(size_t(args.m) * size_t(args.n)), times;
  CHECK(cudaMemset(args.y, 0xff, y.size() * 4));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < 9; ++round) {
    CHECK(cudaMemsetAsync(flush, round, kFlushed));
    CHECK(cudaEventRecord(begin));
    product_kernel<Config><<<feature_tiles * sample_tiles, Config::kThreads, kShared>>>(args);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    times.emplace_back();
    CHECK(cudaEventElapsedTime(&times.back(), begin, end));
  }
  CHECK(cudaGetLastError());
  std::sort(times.begin(), times.end());
  CHECK(cudaMemcpy(y.data(), args.y, y.size() * 4, cudaMemcpyDeviceToHost));
  const double error = error_of(y, x, w, args.m, args.n, args.k);
  failures += !(error < kMostError);
  std::printf("  <%s> %8.2f us, error %.2e%s\n", name, 1e3 * double(times[4]), error,
              error < kMostError ? "" : " WRONG");
}

template <bool kWAlongK, bool kXAlongK, bool kVectors>
void shape(i32 m, i32 k, i32 n) {
  std::mt19937 random(1);
  const i32 gap = kVectors ? 0 : 1;
  const Matrix x(kXAlongK, m, k, gap, random), w(kWAlongK, n, k, gap, random);
  ProductArgs args{};
  args.x = x.view();
  args.w = w.view();
  args.m = m, args.n = n, args.k = k, args.y_stride = n;
  CHECK(cudaMalloc(&args.y, size_t(m) * size_t(n) * 4));
  std::printf("%d x %d -> %d, w along %s, x along %s, %s\n", m, k, n, kWAlongK ? "k" : "rows",
              kXAlongK ? "k" : "rows", kVectors ? "pieces of 16 bytes" : "words");
  tile<DirectConfig<2, 1, 4, 4, kWAlongK, kXAlongK, kVectors>>("2, 1, 4, 4", args, x, w);
  tile<DirectConfig<2, 1, 8, 3, kWAlongK, kXAlongK, kVectors>>("2, 1, 8, 3", args, x, w);
  tile<DirectConfig<1, 1, 8, 4, kWAlongK, kXAlongK, kVectors>>("1, 1, 8, 4", args, x, w);
  tile<DirectConfig<2, 4, 1, 3, kWAlongK, kXAlongK, kVectors>>("2, 4, 1, 3", args, x, w);
  cudaFree(args.y);
}

}  // namespace

int main() {
  CHECK(cudaMalloc(&flush, kFlushed));
  for (const i32 s : {256, 384, 512, 640, 768, 1024}) shape<true, true, true>(s, s, s);
  shape<false, true, true>(512, 512, 512);
  shape<true, false, true>(512, 512, 512);
  shape<false, false, true>(512, 512, 512);
  shape<true, true, true>(509, 508, 515);
  shape<true, true, false>(509, 507, 515);
  shape<false, true, false>(129, 33, 67);
  shape<false, false, false>(77, 510, 255);
  shape<true, true, true>(1, 4, 5);
  for (const auto& [m, k, n] : {std::tuple{16, 4096, 4096},
                                {1024, 512, 512},
                                {256, 4096, 1024},
                                {256, 784, 10},
                                {65536, 64, 64},
                                {100000, 32, 32},
                                {16384, 16384, 16},
                                {8192, 128, 128}}) {
    shape<true, true, true>(m, k, n);
  }
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
