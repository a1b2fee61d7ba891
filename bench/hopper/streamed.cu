// Checks and times the products that read their operands unpacked (product/hopper/streamed.cuh and
// split_both.cuh) in every tile and number of slices that `ingot tune` may choose, against fp64 on
// the host.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels \
//     bench/hopper/streamed.cu -ldl
//   ./a.out         one line a tile: µs with a cold L2, relative error; the exit status is whether
//                   one is wrong
//   ./a.out table   the same over the shapes that the cost model is held to, cuBLAS beside it, as
//                   JSON: bench/results/config-sweep/nvidia-h200-unpacked.json
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "epilogues.cuh"
#include "launch/runtime_maps.h"
#include "product/hopper/candidates.h"
#include "product/hopper/split_both.cuh"
#include "product/hopper/streamed.cuh"
#include "status.cuh"
#include "timing.cuh"

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
__global__ void __launch_bounds__(Config::kThreads, 1)
    split_both_product_kernel(const __grid_constant__ TensorMap w,
                              const __grid_constant__ TensorMap x,
                              const __grid_constant__ ProductArgs args) {
  product_split_both<Config, PlainEpilogue>(w, x, x, args, {});
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    split_both_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                      const __grid_constant__ ProductArgs args) {
  split_both_slices<Config>(w, x, args);
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
template <bool... kFlags>
void add_split_both(const std::string& flags) {
  using Config = SplitBothConfig<kFlags...>;
  const std::string config = "SplitBothConfig<" + flags + ">";
  kernels["product_split_both" + config] = (const void*)split_both_product_kernel<Config>;
  kernels["split_both_slices" + config] = (const void*)split_both_kernel<Config>;
  kernels["product_merged" + config] = (const void*)merged_kernel<Config>;
}
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
  add_split_both<true, true>("true, true");
  add_split_both<false, true>("false, true");
  add_split_both<false, false>("false, false");
  add_split_both<true, true, true>("true, true, true");
  add_split_both<false, true, true>("false, true, true");
}

constexpr double kMostError = 6e-7;
int failures = 0;

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
  if (!plan.sliced.kernel.empty()) {
    ProductPlan first = plan;
    first.grid = plan.sliced.grid;
    first.threads = plan.sliced.threads;
    first.shared_bytes = plan.sliced.shared_bytes;
    launch(kernels.at(plan.sliced.kernel + plan.config), first, args, x, w);
  }
  launch(kernels.at(plan.kernel + plan.config), plan, args, x, w);
}

// Median microseconds of a call before which L2 is cold.
double time_of(const std::function<void()>& call) {
  static const bench::ColdTimer timer;
  std::vector<double> times;
  for (int round = 0; round < 11; ++round) times.push_back(1e3 * timer.milliseconds(call));
  return bench::median(times);
}

struct Timed {
  double us, error;
};

Timed time_tile(const ProductShape& shape, const TileChoice& tile, const Matrix& x, const Matrix& w,
                float* y) {
  const ProductPlan plan = plan_with(shape, tile, DeviceLimits());
  ProductArgs args = args_of(plan, shape);
  args.x.data = x.device;
  args.w.data = w.device;
  args.y = y;
  if (plan.sums_bytes > 0) CHECK(cudaMalloc(&args.sums, plan.sums_bytes));
  std::vector<float> results(size_t(shape.batches * shape.m * shape.n));
  CHECK(cudaMemset(y, 0xff, results.size() * 4));
  const double us = time_of([&] { run(plan, args, x.device, w.device); });
  CHECK(cudaMemcpy(results.data(), y, results.size() * 4, cudaMemcpyDeviceToHost));
  cudaFree(args.sums);
  const double error = error_of(results, x, w, shape);
  failures += !(error < kMostError);
  return {us, error};
}

struct Extents {
  bool w_along_k, x_along_k;
  i64 m, k, n, batches = 1;
};

// Calls `each` with every tile of the shape and what it takes; `library` with cuBLAS's time.
void time_shape(const Extents& e, const std::function<void(const TileChoice&, Timed)>& each,
                const std::function<void(double)>& library = {}) {
  std::mt19937 random(1);
  const Matrix x(e.x_along_k, e.batches, e.m, e.k, random);
  const Matrix w(e.w_along_k, e.batches, e.n, e.k, random);
  ProductShape shape;
  shape.m = e.m, shape.n = e.n, shape.k = e.k, shape.batches = e.batches;
  shape.x = x.shape, shape.w = w.shape;
  shape.y_stride = e.n;
  float* y;
  CHECK(cudaMalloc(&y, size_t(e.batches * e.m * e.n) * 4));
  std::vector<TileChoice> menu;
  add_streamed_tiles(menu, shape, DeviceLimits());
  add_split_both_tile(menu, shape);
  add_split_both_slices(menu, shape, DeviceLimits());
  for (TileChoice& tile : menu) {
    tile.batched = e.batches > 1;
    each(tile, time_tile(shape, tile, x, w, y));
  }
  if (library) {
    static const bench::Blas blas;
    library(time_of([&] { blas.run(shape, x.device, w.device, y); }));
  }
  cudaFree(y);
}

void print_shape(const Extents& e) {
  std::printf("%lld of %lld x %lld -> %lld, w along %s, x along %s\n", (long long)e.batches,
              (long long)e.m, (long long)e.k, (long long)e.n, e.w_along_k ? "k" : "rows",
              e.x_along_k ? "k" : "rows");
  time_shape(e, [](const TileChoice& tile, Timed timed) {
    std::printf("  %-60s %8.2f us, error %.2e%s\n", name_of(tile).c_str(), timed.us, timed.error,
                timed.error < kMostError ? "" : " WRONG");
  });
}

constexpr bool kK = true, kRows = false;  // how an operand lies

// Squares, few samples, few features, short sums, deep ones, batches.
constexpr Extents kTable[] = {
    {kK, kK, 128, 128, 128},          {kRows, kK, 192, 192, 192},
    {kRows, kK, 256, 256, 256},       {kRows, kK, 384, 384, 384},
    {kRows, kK, 512, 512, 512},       {kRows, kRows, 512, 512, 512},
    {kK, kK, 640, 640, 640},          {kRows, kK, 768, 768, 768},
    {kRows, kK, 1024, 1024, 1024},    {kK, kK, 1024, 256, 1024},
    {kK, kK, 2048, 128, 512},         {kK, kK, 1, 4096, 4096},
    {kRows, kK, 1, 4096, 4096},       {kK, kK, 1, 1024, 1024},
    {kK, kK, 8, 4096, 4096},          {kRows, kK, 8, 4096, 11008},
    {kK, kK, 16, 4096, 4096},         {kK, kK, 16, 1024, 1024},
    {kK, kK, 16, 16384, 1024},        {kK, kK, 32, 4096, 4096},
    {kK, kK, 32, 768, 3072},          {kK, kK, 64, 4096, 4096},
    {kRows, kK, 64, 1024, 1024},      {kK, kK, 128, 4096, 1024},
    {kK, kK, 128, 512, 256},          {kK, kK, 256, 784, 12},
    {kK, kK, 512, 64, 1000},          {kK, kK, 100000, 32, 32},
    {kK, kK, 100000, 784, 12},        {kK, kK, 65536, 64, 64},
    {kRows, kK, 65536, 128, 128},     {kRows, kK, 65536, 256, 256},
    {kK, kK, 16384, 64, 256},         {kRows, kK, 16384, 16384, 16},
    {kK, kK, 16384, 1024, 64},        {kRows, kK, 128, 512, 65536},
    {kK, kK, 8192, 128, 128},         {kRows, kK, 256, 131072, 256},
    {kRows, kK, 64, 262144, 64},      {kRows, kRows, 64, 262144, 64},
    {kRows, kRows, 128, 500000, 128}, {kRows, kRows, 512, 65536, 512},
    {kRows, kRows, 784, 8192, 16},    {kRows, kRows, 256, 4096, 256},
    {kK, kK, 256, 8192, 256},         {kRows, kK, 64, 64, 64, 4096},
    {kK, kK, 128, 64, 128, 1024},     {kK, kK, 196, 64, 196, 192},
    {kK, kK, 512, 64, 512, 96},       {kRows, kK, 512, 512, 64, 96},
    {kRows, kK, 128, 128, 128, 64},   {kK, kK, 1024, 128, 1024, 32},
    {kRows, kK, 32, 32, 32, 8192},    {kRows, kK, 256, 256, 256, 16},
    {kRows, kK, 1, 1024, 1024, 32},   {kRows, kK, 512, 512, 512, 8},
};

void print_table() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("{\"gpu\": \"%s\", \"shapes\": [\n", properties.name);
  for (const Extents& e : kTable) {
    const char* between = &e == kTable ? "" : ",\n";
    std::printf("%s {\"m\": %lld, \"k\": %lld, \"n\": %lld, \"batches\": %lld, \"w_along_k\": %d, ",
                between, (long long)e.m, (long long)e.k, (long long)e.n, (long long)e.batches,
                e.w_along_k);
    std::printf("\"x_along_k\": %d,\n  \"us\": {", e.x_along_k);
    const auto each = [](const TileChoice& tile, Timed timed) {
      std::printf("\"%s\": %.2f,\n   ", name_of(tile).c_str(), timed.us);
    };
    time_shape(e, each, [](double us) { std::printf("\"library\": %.2f}}", us); });
  }
  std::printf("\n]}\n");
}

}  // namespace

int main(int count, char** arguments) {
  add_kernels();
  if (count > 1 && std::strcmp(arguments[1], "table") == 0) {
    print_table();
    return failures == 0 ? 0 : 1;
  }
  for (const bool w_along_k : {true, false}) {
    print_shape({w_along_k, true, 512, 512, 512});
    print_shape({w_along_k, true, 77, 264, 131});
    print_shape({w_along_k, true, 16, 4096, 4096});
    print_shape({w_along_k, true, 20000, 64, 64});
    print_shape({w_along_k, true, 100, 40, 72, 300});
  }
  print_shape({false, false, 64, 65536, 64});
  print_shape({false, false, 130, 1032, 67});
  print_shape({true, true, 20000, 784, 10});
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
