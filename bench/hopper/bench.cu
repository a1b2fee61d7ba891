// Times the Hopper product: tile choices × shapes, beside cuBLAS fp16 and fp32, in interleaved
// rounds.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/bench.cu -ldl
//   ./a.out [rounds] [seed | one | search | thin | small | all | profile | errors]
//
// A burst is 5 warm-up calls and the median of 20; a table's figure is the median over rounds.
// "full" includes the split passes. "limit" is three times the fp16 product of the same run.
#include <unistd.h>

#include "blas.cuh"
#include "configurations.cuh"
#include "epilogues.cuh"
#include "problem.cuh"
#include "timing.cuh"

using namespace bench;

namespace {

__global__ void to_half(const float* in, unsigned short* out, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    out[i] = (unsigned short)(ptx::pack_half2(in[i], 0.f) & 0xffff);
  }
}

struct Candidate {
  std::string name;
  std::function<void()> product, full;
  std::vector<double> product_ms, full_ms;
  double sustained_ms = 0;
};

// What the cost model chooses from; in a wide search all that is worth measuring.
std::vector<TileChoice> choices(const ProductShape& shape, bool wide_search) {
  return wide_search ? candidate_choices(shape, {}) : tile_choices(shape, {});
}

template <class Params>
Candidate candidate_of(const std::string& name, Bound<Params> bound) {
  Candidate candidate;
  candidate.name = name;
  candidate.product = [bound]() mutable { bound.product(); };
  candidate.full = [bound]() mutable { bound.run(); };
  return candidate;
}

// Fast and wrong is no candidate's merit.
template <class Params>
void report_wrong(const std::string& name, Bound<Params>& bound, Problem& problem) {
  problem.poison();
  bound.run();
  const Errors e = problem.errors([](double t, int64_t, int64_t) { return t; });
  if (e.worst_row < 2e-6) return;
  std::printf("WRONG %s row error %.2e frob %.2e mismatches %lld\n", name.c_str(), e.worst_row,
              e.frobenius, e.class_mismatches);
}

// vectors: the bias, then the scale.
std::vector<Candidate> own_candidates(const ProductShape& shape, Problem& problem,
                                      const float* vectors, bool wide_search) {
  std::vector<Candidate> list;
  for (const TileChoice& c : choices(shape, wide_search)) {
    const ProductPlan plan = plan_with(shape, c, {});
    const std::string name = plan.config + " g" + std::to_string(c.raster_group);
    auto plain = bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{});
    report_wrong(name, plain, problem);
    list.push_back(candidate_of(name, plain));
    if (wide_search && c.raster_group != 8) continue;
    list.push_back(candidate_of(
        name + " moments", bind(plan, shape, problem.buffers(), "moments",
                                BiasScaleMomentsEpilogue::Params{vectors, vectors + shape.n})));
  }
  const ProductPlan plan = portable::plan_product(shape, 232448);
  list.push_back(candidate_of("portable::" + plan.config, bind(plan, shape, problem.buffers(),
                                                               "plain", PlainEpilogue::Params{})));
  return list;
}

void time_in_turns(std::vector<Candidate>& list, int rounds) {
  const auto measured = [](const std::function<void()>& run) {
    const double ms = burst(run);
    CHECK(cudaDeviceSynchronize());
    usleep(60000);
    return ms;
  };
  for (int r = 0; r < rounds; ++r) {
    for (Candidate& c : list) {
      if (c.full) c.full();  // its own packed operands
      c.product_ms.push_back(measured(c.product));
      if (c.full) c.full_ms.push_back(measured(c.full));
    }
  }
  for (Candidate& c : list) {
    if (c.full) c.full();
    c.sustained_ms = sustained(c.full ? c.full : c.product, median(c.product_ms));
  }
}

// fp16_ms and fp32_ms: cuBLAS's, 0 where there is none.
void print_times(const ProductShape& s, const std::vector<Candidate>& list, double fp16_ms,
                 double fp32_ms) {
  const double flops = 2. * double(s.m) * double(s.n) * double(s.k), limit = 3 * fp16_ms;
  std::printf("--- %lldx%lldx%lld (m×n×k)  fp16 %.1f TF/s, limit %.4f ms, cublas fp32 %.4f ms\n",
              (long long)s.m, (long long)s.n, (long long)s.k,
              fp16_ms > 0 ? flops / fp16_ms * 1e-9 : 0., limit, fp32_ms);
  for (const Candidate& c : list) {
    const double product = median(c.product_ms), full = c.full ? median(c.full_ms) : product;
    std::printf("%-52s product %.4f full %.4f (limit/full %.3f, fp32/full %.2f) sustained %.4f\n",
                c.name.c_str(), product, full, limit / full, fp32_ms / full, c.sustained_ms);
  }
  std::fflush(stdout);
}

void time_shape(const Blas& blas, int64_t m, int64_t n, int64_t k, int rounds, bool wide_search) {
  const ProductShape shape = row_major(m, n, k);
  size_t workspace = portable::plan_product(shape, 232448).workspace_bytes;
  for (const TileChoice& c : choices(shape, wide_search)) {
    workspace = std::max(workspace, plan_with(shape, c, {}).workspace_bytes);
  }
  Problem problem(shape, Data::uniform01, Data::weight, workspace);
  float* vectors;
  CHECK(cudaMalloc(&vectors, size_t(2 * n) * 4));
  fill<<<64, 256>>>(vectors, 1, 2 * n, 0, 1, Data::normal, 11);
  unsigned short *hx, *hw;
  CHECK(cudaMalloc(&hx, size_t(m * k) * 2));
  CHECK(cudaMalloc(&hw, size_t(n * k) * 2));
  to_half<<<1024, 256>>>(problem.x, hx, size_t(m * k));
  to_half<<<1024, 256>>>(problem.w, hw, size_t(n * k));

  std::vector<Candidate> list = own_candidates(shape, problem, vectors, wide_search);
  if (blas.ready()) {
    const auto fp16 = [&] { blas.run(hx, hw, problem.y, int(m), int(n), int(k), true); };
    list.insert(list.begin(), Candidate{"cublas fp16", fp16, {}, {}, {}, 0});
  }
  time_in_turns(list, rounds);
  double fp16_ms = 0, fp32_ms = 0;
  if (blas.ready()) {
    fp16_ms = median(list[0].product_ms);
    const auto fp32 = [&] {
      blas.run(problem.x, problem.w, problem.y, int(m), int(n), int(k), false);
    };
    fp32_ms = burst(fp32, 2, double(m) * double(n) * double(k) > 5e10 ? 5 : 20);
  }
  print_times(shape, list, fp16_ms, fp32_ms);
  cudaFree(vectors);
  cudaFree(hx);
  cudaFree(hw);
}

// Errors against fp64 beside cuBLAS fp32's: relative Frobenius and the worst row's.
void compare_errors(const Blas& blas, Data x, Data w, const char* name) {
  for (const int64_t k : {64, 256, 1024, 4096, 8192, 32768}) {
    const ProductShape shape = row_major(256, 512, k);
    const ProductPlan plans[] = {
        plan_with(shape, scheme_split::fused_tile(128), {}),
        plan_with(shape, scheme_split::fused_tile(128, 2), {}),
        plan_with(
            shape,
            {.variant = Variant::packed, .samples = 128, .stages = 6, .staging = 2, .cluster = 2},
            {}),
        portable::plan_product(shape, 232448)};
    Problem problem(shape, x, w, plans[2].workspace_bytes + plans[3].workspace_bytes);
    const auto identity = [](double t, int64_t, int64_t) { return t; };
    std::printf("%-18s K %6lld ", name, (long long)k);
    for (const ProductPlan& plan : plans) {
      bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{}).run();
      const Errors e = problem.errors(identity);
      std::printf(" %.2e/%.2e", e.frobenius, e.worst_row);
    }
    if (blas.ready()) blas.run(problem.x, problem.w, problem.y, 256, 512, int(k), false);
    const Errors e = problem.errors(identity);
    std::printf("  cublas fp32 %.2e/%.2e\n", e.frobenius, e.worst_row);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  const std::string which = argc > 2 ? argv[2] : "seed";
  add_split_kernels();
  add_configurations<PlainEpilogue>("plain");
  add_configurations<BiasScaleMomentsEpilogue>("moments");
  require_candidates("moments");
  if (which == "profile") {  // one launch of each choice, for a profiler
    const ProductShape shape = row_major(1024, 8192, 8192);
    for (const TileChoice& c : choices(shape, false)) {
      const ProductPlan plan = plan_with(shape, c, {});
      Problem problem(shape, Data::uniform01, Data::weight, plan.workspace_bytes);
      auto bound = bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{});
      bound.split();
      for (int i = 0; i < 3; ++i) bound.product();
      CHECK(cudaDeviceSynchronize());
    }
    return 0;
  }
  const Blas blas;
  const bool wide_search = which == "search" || which == "all";
  if (which == "errors") {
    std::printf("frobenius/worst row: fused 64, fused 128, packed 64, portable 128\n");
    compare_errors(blas, Data::uniform01, Data::weight, "rand x Linear");
    compare_errors(blas, Data::normal, Data::normal, "normal x normal");
    compare_errors(blas, Data::uniform01, Data::uniform01, "rand x rand");
    compare_errors(blas, Data::uniform01, Data::wide_elements, "rand x 2^+-20");
    return 0;
  }
  if (which == "one") {
    time_shape(blas, 1024, 8192, 8192, rounds, false);
    return 0;
  }
  if (which != "thin" && which != "small") {
    time_shape(blas, 1024, 8192, 8192, rounds, wide_search);
    time_shape(blas, 16384, 4096, 4096, rounds, wide_search);
    time_shape(blas, 128, 32768, 32768, std::max(1, rounds / 2), wide_search);
    time_shape(blas, 32768, 4096, 1024, rounds, wide_search);
  }
  if (which == "thin" || which == "all") {
    time_shape(blas, 64, 32768, 32768, 1, false);
    time_shape(blas, 16, 8192, 8192, rounds, false);
    time_shape(blas, 128, 8192, 8192, rounds, false);
    time_shape(blas, 512, 8192, 8192, rounds, false);
  }
  if (which == "small" || which == "all") {
    for (int64_t e : {64, 128, 256, 512, 1024, 2048}) time_shape(blas, e, e, e, rounds, false);
    time_shape(blas, 4096, 4096, 4096, rounds, false);
    time_shape(blas, 1024, 1024, 1024, rounds, false);
    time_shape(blas, 128, 1024, 4096, rounds, false);
  }
}
