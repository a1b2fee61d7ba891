// Checks and times the product that splits a weight contiguous in n inside the kernel
// (product/hopper/fused_split.cuh, kAlongK = false): y = x · W, as gradients of inputs are, and
// y = aᵀ · b, as gradients of weights are.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/transposed.cu
//   ./a.out            checks, then times
//   ./a.out check      checks only (for compute-sanitizer: ./a.out small)
//   ./a.out time       times only
//
// Checks: every configuration bit for bit against the same one on the weight transposed in memory,
// whose fragments and scales must be the same. Times: products of training steps, packing included,
// beside both operands packed; candidates take turns, L2 evicted before each call, medians over
// rounds. The exit status is whether a check failed.
#include <algorithm>
#include <vector>

#include "configurations.cuh"
#include "epilogues.cuh"
#include "problem.cuh"
#include "timing.cuh"

using namespace bench;

namespace {

ProductShape contiguous_in_n(int64_t m, int64_t n, int64_t k, bool x_too, int64_t pitch = 0) {
  ProductShape shape = row_major(m, n, k);
  shape.w = {1, std::max(n, pitch), true};
  if (x_too) shape.x = {1, m, true};
  return shape;
}

__global__ void transpose(const float* source, i64 row_stride, i64 k_stride, float* destination,
                          i64 n, i64 k) {
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n * k;
       i += i64(gridDim.x) * blockDim.x) {
    destination[i] = source[i / k * row_stride + i % k * k_stride];
  }
}

__global__ void count_differences(const unsigned* a, const unsigned* b, i64 count,
                                  unsigned long long* found) {
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < count;
       i += i64(gridDim.x) * blockDim.x) {
    const bool both_nan = (a[i] & 0x7fffffffu) > 0x7f800000u && (b[i] & 0x7fffffffu) > 0x7f800000u;
    if (a[i] != b[i] && !both_nan) atomicAdd(found, 1ull);
  }
}

struct Case {
  const char* name;
  ProductShape shape;
  Data x, w;
};

// Elements that differ from the same product of the weight transposed in memory.
unsigned long long differences(const Case& c, const TileChoice& choice) {
  ProductShape along_k = c.shape;
  along_k.w = {(c.shape.k + 3) / 4 * 4, 1, true};
  TileChoice same = choice;
  same.w_along_k = true;
  const ProductPlan plan = plan_with(c.shape, choice, {});
  const ProductPlan expected = plan_with(along_k, same, {});
  Problem problem(c.shape, c.x, c.w, std::max(plan.workspace_bytes, expected.workspace_bytes));
  float *turned, *kept;
  unsigned long long* found;
  CHECK(cudaMalloc(&turned, size_t(c.shape.n * c.shape.k) * 4));
  CHECK(cudaMalloc(&kept, problem.y_count * 4));
  CHECK(cudaMallocManaged(&found, 8));
  *found = 0;
  transpose<<<512, 256>>>(problem.w, c.shape.w.row_stride, c.shape.w.k_stride, turned, c.shape.n,
                          c.shape.k);
  Buffers buffers = problem.buffers();
  problem.poison();
  bind(plan, c.shape, buffers, "plain", PlainEpilogue::Params{}).run();
  CHECK(cudaMemcpy(kept, problem.y, problem.y_count * 4, cudaMemcpyDeviceToDevice));
  problem.poison();
  buffers.w = turned;
  bind(expected, along_k, buffers, "plain", PlainEpilogue::Params{}).run();
  count_differences<<<512, 256>>>((const unsigned*)kept, (const unsigned*)problem.y,
                                  i64(problem.y_count), found);
  CHECK(cudaDeviceSynchronize());
  const unsigned long long count = *found;
  cudaFree(turned);
  cudaFree(kept);
  cudaFree(found);
  return count;
}

int check_all(bool small) {
  const Data u = Data::uniform01, w = Data::weight;
  std::vector<Case> cases = {
      {"128x128x128", contiguous_in_n(128, 128, 128, false), u, w},
      {"xT 128x128x128", contiguous_in_n(128, 128, 128, true), u, w},
      {"ragged 100x200x136", contiguous_in_n(100, 200, 136, false), u, w},
      {"ragged xT 68x36x72", contiguous_in_n(68, 36, 72, true), u, w},
      {"1x4x8", contiguous_in_n(1, 4, 8, false), u, w},
      {"pitch 65x130x1104", contiguous_in_n(65, 130, 1104, false, 180), u, w},
  };
  if (!small) {
    const auto shape = contiguous_in_n(260, 516, 1032, false);
    for (const auto& [name, x, data] :
         {std::tuple{"normal", Data::normal, Data::normal},
          {"large mean", Data::large_mean, w},
          {"rows 2^+-60", Data::wide_rows, Data::wide_rows},
          {"chunks 2^+-30", Data::wide_chunks, Data::wide_chunks},
          {"elements 2^+-20", Data::wide_elements, Data::wide_elements},
          {"growing", Data::normal, Data::growing},
          {"zero start", Data::normal, Data::zero_start},
          {"denormal w", Data::normal, Data::denormal},
          {"huge x tiny w", Data::huge, Data::tiny},
          {"tiny x huge w", Data::tiny, Data::huge},
          {"overflow", Data::huge, Data::huge},
          {"special w", Data::normal, Data::special},
          {"special both", Data::special, Data::special}}) {
      cases.push_back({name, shape, x, data});
    }
    cases.push_back({"1024x8192x8192", contiguous_in_n(1024, 8192, 8192, false), u, w});
    cases.push_back({"xT 4096x4096x16384", contiguous_in_n(4096, 4096, 16384, true), u, w});
  }
  int failures = 0;
  for (const Case& c : cases) {
    if (!c.shape.w.vector_columns(c.shape.k)) continue;
    for (const auto& [samples, promotion, slices] :
         {std::tuple{128, 1, 1}, {128, 2, 1}, {64, 1, 1}, {128, 1, 2}, {64, 1, 4}, {128, 1, 8}}) {
      if (divide_up(c.shape.k, 128) < slices) continue;
      const TileChoice choice = scheme_split::fused_tile(samples, promotion, slices, false);
      const unsigned long long count = differences(c, choice);
      std::printf("%-4s %-22s %-52s %llu differ\n", count == 0 ? "ok" : "FAIL", c.name,
                  plan_with(c.shape, choice, {}).config.c_str(), count);
      failures += count != 0;
    }
  }
  std::printf("%d failures\n", failures);
  return failures;
}

struct Contender {
  std::string name;
  double estimated_us = 0;
  Bound<PlainEpilogue::Params> bound;
  std::vector<double> all, alone;  // µs: with packing, the product's kernel
};

void time_shape(const char* what, const ProductShape& shape, const ColdTimer& timer) {
  constexpr int kRounds = 15;
  std::vector<TileChoice> choices = tile_choices(shape, {});
  const TileChoice other =
      scheme_split::fused_tile(128, 3 - scheme_split::promotion_of(shape), 1, false);
  choices.push_back(other);
  size_t workspace = 0;
  for (const TileChoice& c : choices) {
    workspace = std::max(workspace, plan_with(shape, c, {}).workspace_bytes);
  }
  Problem problem(shape, Data::normal, Data::weight, workspace);
  std::vector<Contender> contenders;
  for (const TileChoice& c : choices) {
    const ProductPlan plan = estimated_plan(shape, c, {});
    contenders.push_back({name_of(c),
                          plan.estimated_us,
                          bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{}),
                          {},
                          {}});
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) {
      c.all.push_back(1e3 * timer.milliseconds([&] { c.bound.run(); }));
      if (round < 5) {
        c.alone.push_back(1e3 * timer.milliseconds([&] { c.bound.product(); }));
      }
    }
  }
  std::printf("\n%s: m %lld, n %lld, k %lld; the plan takes %s\n", what, (long long)shape.m,
              (long long)shape.n, (long long)shape.k, plan_product(shape, {}).config.c_str());
  for (const Contender& c : contenders) {
    std::printf("  %-64s %9.1f us, of which the product %9.1f; estimated %9.1f\n", c.name.c_str(),
                median(c.all), median(c.alone), c.estimated_us);
  }
  std::fflush(stdout);
}

void time_all() {
  const ColdTimer timer;
  const auto time = [&](const char* what, int64_t m, int64_t n, int64_t k, bool x_too) {
    time_shape(what, contiguous_in_n(m, n, k, x_too), timer);
  };
  time("dX of 1024x8192->8192", 1024, 8192, 8192, false);
  time("dW of 1024x8192->8192", 8192, 8192, 1024, true);
  time("dX of 16384x4096->4096", 16384, 4096, 4096, false);
  time("dW of 16384x4096->4096", 4096, 4096, 16384, true);
  time("dX of 7168x1024->4096", 7168, 1024, 4096, false);
  time("dW of 7168x1024->4096", 4096, 1024, 7168, true);
  time("dX of 7168x4096->1024", 7168, 4096, 1024, false);
  time("dW of 7168x4096->1024", 1024, 4096, 7168, true);
  time("dX of 64x4096->4096", 64, 4096, 4096, false);
  time("dX of 512x1024->1024", 512, 1024, 1024, false);
  time("dW of 512x1024->1024", 1024, 1024, 512, true);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  add_split_kernels();
  add_configurations<PlainEpilogue>("plain");
  require_candidates("plain");
  int failures = 0;
  if (what != "time") failures = check_all(what == "small");
  if (what != "check" && what != "small") time_all();
  return failures != 0;
}
