// Checks and times the product that streams its operands (product/hopper/streamed.cuh) in every
// tile and number of slices that `ingot tune` may choose, against fp64 on the host.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels \
//     bench/hopper/streamed.cu -ldl
//   ./a.out      one line a tile: µs with a cold L2, relative error; the exit status is whether one
//                is wrong
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "epilogues.cuh"
#include "launch/runtime_maps.h"
#include "product/hopper/candidates.h"
#include "product/hopper/streamed.cuh"
#include "status.cuh"

using namespace ingot;
using bench::PlainEpilogue;
using namespace ingot::hopper;

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    product_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                   const __grid_constant__ ProductArgs args) {
  product_streamed<Config, PlainEpilogue>(w, x, x, args, {});
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kResident)
    slices_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                  const __grid_constant__ ProductArgs args) {
  streamed_slices<Config>(w, x, args);
}
template <class Config>
__global__ void __launch_bounds__(kMergeThreads, 1)
    merged_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                  const __grid_constant__ ProductArgs args) {
  product_merged<Config, PlainEpilogue>(w, x, x, args, {});
}

// By the kernel's name and its configuration.
std::map<std::string, const void*> kernels;

template <int... kNumbers>
struct Tile {
  template <bool kWAlongK, bool kXAlongK, bool... kBatched>
  static void add(const char* numbers, const char* flags) {
    using Config = StreamedConfig<kNumbers..., kWAlongK, kXAlongK, kBatched...>;
    const std::string config = std::string("StreamedConfig<") + numbers + ", " + flags + ">";
    kernels["product_streamed" + config] = (const void*)product_kernel<Config>;
    kernels["streamed_slices" + config] = (const void*)slices_kernel<Config>;
    kernels["product_merged" + config] = (const void*)merged_kernel<Config>;
  }
  static void add_orders(const char* numbers) {
    add<true, true>(numbers, "true, true");
    add<false, true>(numbers, "false, true");
    add<false, false>(numbers, "false, false");
    add<true, true, true>(numbers, "true, true, true");
    add<false, true, true>(numbers, "false, true, true");
  }
};
#define TILE(...) Tile<__VA_ARGS__>::add_orders(#__VA_ARGS__)

void add_kernels() {
  TILE(2, 2, 1, 1, 4, 16);
  TILE(4, 1, 1, 1, 4, 8);
  TILE(1, 8, 1, 2, 2, 4);
  TILE(2, 4, 1, 1, 4, 8);
  TILE(2, 4, 2, 1, 4, 12);
  TILE(2, 8, 2, 1, 4, 8);
  TILE(2, 8, 4, 2, 1, 6);
  TILE(2, 4, 2, 2, 1, 6);
  TILE(2, 8, 2, 2, 1, 4);
  TILE(2, 8, 1, 4, 1, 3);
}

constexpr double kMostError = 6e-7;
constexpr size_t kFlushed = size_t(256) << 20;  // bytes, more than L2 has
int failures = 0;
int* flush;

// Matrices of `rows` by k, along k or along their rows; behind each line a gap, which is NaN.
struct Matrix {
  OperandShape shape;
  std::vector<float> host;
  float* device;

  Matrix(bool along_k, i64 batches, i64 rows, i64 k, std::mt19937& random) {
    const i64 lines = along_k ? rows : k, line = along_k ? k : rows;
    const i64 stride = i64(align_up(size_t(line), 4)) + 4;
    shape = {along_k ? stride : 1, along_k ? 1 : stride, true, batches > 1 ? lines * stride : 0};
    host.assign(size_t(batches * lines * stride), std::nanf(""));
    for (i64 i = 0; i < batches * lines; ++i) {
      for (i64 j = 0; j < line; ++j) host[size_t(i * stride + j)] = float(random() >> 8) * 0x1p-24f;
    }
    CHECK(cudaMalloc(&device, host.size() * 4));
    CHECK(cudaMemcpy(device, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  }
  ~Matrix() { cudaFree(device); }
  Matrix(const Matrix&) = delete;
  double at(i64 entry, i64 row, i64 k) const {
    return host[size_t(entry * shape.batch_stride + row * shape.row_stride + k * shape.k_stride)];
  }
};

// Of a few hundred results, drawn at random.
double error_of(const std::vector<float>& y, const Matrix& x, const Matrix& w,
                const ProductShape& shape) {
  std::mt19937 random(3);
  double difference = 0, size = 0;
  for (int drawn = 0; drawn < 300; ++drawn) {
    const i64 entry = random() % u32(shape.batches), row = random() % u32(shape.m),
              column = random() % u32(shape.n);
    double truth = 0;
    for (i64 i = 0; i < shape.k; ++i) truth += x.at(entry, row, i) * w.at(entry, column, i);
    const i64 place = (entry * shape.m + row) * shape.n + column;
    difference += std::pow(double(y[size_t(place)]) - truth, 2);
    size += truth * truth;
  }
  return std::sqrt(difference / size);
}

void launch(const void* kernel, const ProductPlan& plan, ProductArgs args, float* x, float* w) {
  TensorMap w_map = encode_map(plan.w_map, w), x_map = encode_map(plan.x_map, x);
  void* values[] = {&w_map, &x_map, &args};
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(plan.shared_bytes)));
  CHECK(cudaLaunchKernel(kernel, dim3(plan.grid), dim3(plan.threads), values, plan.shared_bytes,
                         nullptr));
}

void run(const ProductPlan& plan, const ProductArgs& args, float* x, float* w) {
  if (plan.sliced.kernel != nullptr) {
    ProductPlan first = plan;
    first.grid = plan.sliced.grid;
    first.threads = plan.sliced.threads;
    first.shared_bytes = plan.sliced.shared_bytes;
    launch(kernels.at(plan.sliced.kernel + plan.config), first, args, x, w);
  }
  launch(kernels.at(plan.kernel + plan.config), plan, args, x, w);
}

void time_tile(const ProductShape& shape, const TileChoice& tile, const Matrix& x, const Matrix& w,
               float* y) {
  const ProductPlan plan = plan_with(shape, tile, DeviceLimits());
  ProductArgs args = args_of(plan, shape);
  args.x.data = x.device;
  args.w.data = w.device;
  args.y = y;
  if (plan.sums_bytes > 0) CHECK(cudaMalloc(&args.sums, plan.sums_bytes));
  std::vector<float> results(size_t(shape.batches * shape.m * shape.n)), times;
  CHECK(cudaMemset(y, 0xff, results.size() * 4));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < 9; ++round) {
    CHECK(cudaMemsetAsync(flush, round, kFlushed));
    CHECK(cudaEventRecord(begin));
    run(plan, args, x.device, w.device);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    times.emplace_back();
    CHECK(cudaEventElapsedTime(&times.back(), begin, end));
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaMemcpy(results.data(), y, results.size() * 4, cudaMemcpyDeviceToHost));
  cudaFree(args.sums);
  const double error = error_of(results, x, w, shape);
  failures += !(error < kMostError);
  std::printf("  %-60s %8.2f us, error %.2e%s\n", name_of(tile).c_str(), 1e3 * double(times[4]),
              error, error < kMostError ? "" : " WRONG");
}

void time_shape(bool w_along_k, bool x_along_k, i64 m, i64 k, i64 n, i64 batches = 1) {
  std::mt19937 random(1);
  const Matrix x(x_along_k, batches, m, k, random), w(w_along_k, batches, n, k, random);
  ProductShape shape;
  shape.m = m, shape.n = n, shape.k = k, shape.batches = batches;
  shape.x = x.shape, shape.w = w.shape;
  shape.y_stride = n;
  float* y;
  CHECK(cudaMalloc(&y, size_t(batches * m * n) * 4));
  std::printf("%lld of %lld x %lld -> %lld, w along %s, x along %s\n", (long long)batches,
              (long long)m, (long long)k, (long long)n, w_along_k ? "k" : "rows",
              x_along_k ? "k" : "rows");
  std::vector<TileChoice> menu;
  add_streamed_tiles(menu, shape, DeviceLimits());
  for (TileChoice& tile : menu) {
    tile.batched = batches > 1;
    time_tile(shape, tile, x, w, y);
  }
  cudaFree(y);
}

}  // namespace

int main() {
  CHECK(cudaMalloc(&flush, kFlushed));
  add_kernels();
  for (const bool w_along_k : {true, false}) {
    time_shape(w_along_k, true, 512, 512, 512);
    time_shape(w_along_k, true, 77, 264, 131);
    time_shape(w_along_k, true, 16, 4096, 4096);
    time_shape(w_along_k, true, 20000, 64, 64);
    time_shape(w_along_k, true, 100, 40, 72, 300);
  }
  time_shape(false, false, 64, 65536, 64);
  time_shape(false, false, 130, 1032, 67);
  time_shape(true, true, 20000, 784, 10);
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
