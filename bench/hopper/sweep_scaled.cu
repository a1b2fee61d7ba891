// Times every configuration of the tf32 product beside cuBLAS TF32 and fp16, and its errors beside
// theirs.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels
//   bench/hopper/sweep_scaled.cu
//        -ldl -o sweep_scaled
//   ./sweep_scaled [seconds] [seed]
//
// Calls take turns, L2 evicted before each, packing included; figures are medians over rounds.
// "burst": the median of 20 calls in a row, nothing evicted.

#include "epilogues.cuh"
#include "problem.cuh"
#include "scaled_configurations.cuh"
#include "timing.cuh"

using namespace bench;

namespace {

struct Extents {
  int64_t m, k, n;
};

constexpr Extents kShapes[] = {
    {1024, 8192, 8192}, {16384, 4096, 4096}, {1, 8192, 8192},    {16, 8192, 8192},
    {64, 4096, 4096},   {64, 32768, 32768},  {128, 8192, 8192},  {128, 32768, 32768},
    {256, 8192, 8192},  {512, 8192, 8192},   {2048, 8192, 8192}, {4096, 8192, 8192},
    {8192, 8192, 8192}, {128, 4096, 1024},   {256, 4096, 4096},  {128, 16384, 2048},
    {256, 32768, 256},  {64, 64, 64},        {256, 256, 256},    {512, 512, 512},
    {1024, 1024, 1024}, {2048, 2048, 2048},  {4096, 4096, 4096}, {32768, 1024, 4096},
    {65536, 256, 256},  {16384, 1024, 128},  {8192, 512, 2048},  {32768, 64, 1024},
    {7168, 1024, 4096}, {7168, 4096, 1024},  {12288, 768, 3072}, {12288, 3072, 768},
    {6144, 2048, 5632}, {1025, 4100, 8196},  {2047, 2047, 2047}, {1000, 1000, 1000},
};

struct Candidate {
  std::string name;
  std::function<void()> full, product;
  std::vector<double> full_ms, product_ms;
  double error = 0, worst_row = 0, burst_ms = 0;
};

__global__ void to_half(const float* in, unsigned short* out, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    out[i] = (unsigned short)(ptx::pack_half2(in[i], 0.f) & 0xffff);
  }
}

void note_errors(Candidate& candidate, const Problem& problem) {
  problem.poison();
  candidate.full();
  CHECK(cudaDeviceSynchronize());
  const Errors e = problem.errors([](double t, int64_t, int64_t) { return t; });
  candidate.error = e.frobenius;
  candidate.worst_row = e.worst_row;
}

void sweep(const Extents& e, const Blas& blas, const ColdTimer& timer, double budget, bool bursts) {
  ProductShape shape = row_major(e.m, e.n, e.k);
  shape.scheme = Scheme::scaled;
  size_t workspace = 0;
  const std::vector<TileChoice> choices = candidate_choices(shape, {});
  for (const TileChoice& c : choices) {
    workspace = std::max(workspace, plan_with(shape, c, {}).workspace_bytes);
  }
  const Problem problem(shape, Data::uniform01, Data::weight, workspace);
  float* vectors;
  CHECK(cudaMalloc(&vectors, size_t(2 * e.n) * 4));
  fill<<<64, 256>>>(vectors, 1, 2 * e.n, 0, 1, Data::normal, 11);
  unsigned short *hx, *hw;
  CHECK(cudaMalloc(&hx, size_t(e.m * e.k) * 2));
  CHECK(cudaMalloc(&hw, size_t(e.n * e.k) * 2));
  to_half<<<1024, 256>>>(problem.x, hx, size_t(e.m * e.k));
  to_half<<<1024, 256>>>(problem.w, hw, size_t(e.n * e.k));

  std::vector<Candidate> list;
  const int m = int(e.m), n = int(e.n), k = int(e.k);
  list.push_back(
      {"cublas tf32", [&] { blas.run(problem.x, problem.w, problem.y, m, n, k, false, true); }});
  list.push_back({"cublas fp16", [&] { blas.run(hx, hw, problem.y, m, n, k, true); }});
  for (Candidate& c : list) note_errors(c, problem);
  for (const TileChoice& choice : choices) {
    const ProductPlan plan = plan_with(shape, choice, {});
    require_kernel(plan, "plain");
    const std::string name = plan.config + " g" + std::to_string(choice.raster_group);
    auto plain = bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{});
    Candidate c{name, [plain]() mutable { plain.run(); }, [plain]() mutable { plain.product(); }};
    note_errors(c, problem);
    list.push_back(c);
    if (!bursts || choice.raster_group != 8 || !kernels().count(plan.config + "/moments")) continue;
    auto moments = bind(plan, shape, problem.buffers(), "moments",
                        BiasScaleMomentsEpilogue::Params{vectors, vectors + e.n});
    list.push_back({name + " moments", [moments]() mutable { moments.run(); },
                    [moments]() mutable { moments.product(); }});
  }
  const double begun = seconds_now();
  for (const Candidate& c : list) timer.milliseconds(c.full);
  size_t rounds = 0;
  for (; rounds < 25 && (rounds < 5 || seconds_now() - begun < budget); ++rounds) {
    for (size_t i = 0; i < list.size(); ++i) {
      Candidate& c = list[(i + rounds) % list.size()];
      c.full_ms.push_back(timer.milliseconds(c.full));
      if (c.product && rounds < 9) c.product_ms.push_back(timer.milliseconds(c.product));
    }
  }
  if (bursts) {
    for (Candidate& c : list) c.burst_ms = burst(c.full, 4);
  }
  std::printf("--- %dx%d->%d, %zu rounds\n", m, k, n, rounds);
  const double tf32 = median(list[0].full_ms);
  for (const Candidate& c : list) {
    const double full = median(c.full_ms);
    std::printf("%-52s full %.4f (tf32/full %.3f) product %.4f burst %.4f error %.3e row %.2e\n",
                c.name.c_str(), full, tf32 / full, median(c.product_ms), c.burst_ms, c.error,
                c.worst_row);
  }
  std::fflush(stdout);
  cudaFree(vectors);
  cudaFree(hx);
  cudaFree(hw);
}

// Errors against fp64 beside cuBLAS TF32's, by K.
void compare_errors(const Blas& blas, Data x, Data w, const char* name) {
  for (const int64_t k : {256, 1024, 4096, 8192, 32768}) {
    ProductShape shape = row_major(256, 512, k);
    shape.scheme = Scheme::scaled;
    const TileChoice fused = scheme_scaled::fused_tile(256, 2);
    const TileChoice packed = {
        .variant = Variant::scaled, .samples = 256, .stages = 4, .staging = 1, .cluster = 2};
    const ProductPlan plans[] = {plan_with(shape, fused, {}), plan_with(shape, packed, {})};
    const Problem problem(shape, x, w, plans[1].workspace_bytes);
    std::printf("%-16s K %6lld ", name, (long long)k);
    for (const ProductPlan& plan : plans) {
      auto bound = bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{});
      Candidate c{"", [bound]() mutable { bound.run(); }};
      note_errors(c, problem);
      std::printf(" %.3e/%.3e", c.error, c.worst_row);
    }
    Candidate c{"",
                [&] { blas.run(problem.x, problem.w, problem.y, 256, 512, int(k), false, true); }};
    note_errors(c, problem);
    std::printf("  cublas tf32 %.3e/%.3e\n", c.error, c.worst_row);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 30;
  const bool seed_only = argc > 2;
  add_scale_kernels();
  add_scaled_configurations<PlainEpilogue>("plain");
  add_scaled_kernel<BiasScaleMomentsEpilogue, FusedScaledConfig<256, 3, 3, true, 1, 2, 1>>(
      "FusedScaledConfig<256, 3, 3, true, 1, 2, 1>", "moments");
  add_scaled_kernel<BiasScaleMomentsEpilogue, ScaledConfig<256, 2, 4, 1>>(
      "ScaledConfig<256, 2, 4, 1>", "moments");
  const Blas blas;
  const ColdTimer timer;
  const double begun = seconds_now();
  const size_t count = seed_only ? 2 : std::size(kShapes);
  for (size_t i = 0; i < count; ++i) {
    const double left = seconds - (seconds_now() - begun);
    sweep(kShapes[i], blas, timer, i < 2 ? 6 : std::max(0.1, left / double(count - i)), i < 2);
  }
  compare_errors(blas, Data::uniform01, Data::weight, "rand, Linear");
  compare_errors(blas, Data::normal, Data::normal, "normal, normal");
  compare_errors(blas, Data::uniform01, Data::uniform01, "rand, rand");
  compare_errors(blas, Data::uniform01, Data::wide_elements, "rand, 2^+-20");
  compare_errors(blas, Data::wide_elements, Data::wide_elements, "both 2^+-20");
}
