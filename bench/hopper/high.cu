// Checks the "high" product (product/hopper/crossed.cuh) against fp64, as check.cu checks the fp32
// product, and times it beside cuBLAS TF32 and Ingot's fp32 product.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/high.cu -ldl
//   ./a.out check          all cases, one line each
//   ./a.out small          small cases only (for compute-sanitizer)
//   ./a.out time [rounds]
//
// The exit status is whether a check failed.
#include <unistd.h>

#include "checking.cuh"
#include "product/hopper/candidates.h"
#include "timing.cuh"

using namespace bench;

namespace {

template <class Epilogue>
void add_crossed_configurations(const std::string& epilogue) {
#define ADD(...)                                                         \
  kernels()["CrossedConfig<" #__VA_ARGS__ ">/" + epilogue] =             \
      (const void*)crossed_kernel<CrossedConfig<__VA_ARGS__>, Epilogue>; \
  shared_by_config()["CrossedConfig<" #__VA_ARGS__ ">"] = CrossedConfig<__VA_ARGS__>::kSharedBytes;
  ADD(256, 2, 4, 1)
  ADD(192, 2, 5, 1)
  ADD(192, 2, 5, 0)
  ADD(128, 2, 6, 1)
  ADD(128, 2, 6, 0)
  ADD(128, 1, 6, 1)
  ADD(128, 1, 6, 0)
#undef ADD
}

// Those of fp32's product that the shapes below ask for.
template <class Epilogue>
void add_split_configurations(const std::string& epilogue) {
#define ADD_PACKED(...)                                     \
  kernels()["PackedConfig<" #__VA_ARGS__ ">/" + epilogue] = \
      (const void*)packed_kernel<PackedConfig<__VA_ARGS__>, Epilogue>;
#define ADD_FUSED(...)                                          \
  kernels()["FusedSplitConfig<" #__VA_ARGS__ ">/" + epilogue] = \
      (const void*)fused_split_kernel<FusedSplitConfig<__VA_ARGS__>, Epilogue>;
  ADD_PACKED(128, 1, 6, 2)
  ADD_PACKED(160, 1, 5, 2)
  ADD_PACKED(192, 2, 5, 1)
  ADD_FUSED(128, 3, 4, true, 1)
  ADD_FUSED(128, 3, 4, true, 2)
#undef ADD_PACKED
#undef ADD_FUSED
}

// The fp32 product's case, with what sixteen bits cost. Where roundings all go one way, or only
// what e4m3 cannot hold counts, the promise is all there is; denormals keep fp16's eleven bits.
Case as_high(Case c, bool promise_alone = false) {
  const bool denormal = c.x == Data::denormal || c.w == Data::denormal;
  c.shape.scheme = Scheme::high;
  c.limit = promise_alone ? 1 : denormal ? 1e-3 : c.limit * 25;
  c.unit_limit = scheme_high::kSpec.bound.factor;
  return c;
}

void check_every_kernel(const Case& c) {
  const bool epilogues =
      c.x == Data::uniform01 && c.w == Data::weight && c.shape.m <= 1024 && c.shape.n <= 1024;
  std::vector<std::string> seen;
  for (const TileChoice& choice : candidate_choices(c.shape, {})) {
    if (choice.variant != Variant::crossed) continue;  // fp32's: check.cu
    const ProductPlan plan = plan_with(c.shape, choice, {});
    if (std::find(seen.begin(), seen.end(), plan.config) != seen.end()) continue;
    seen.push_back(plan.config);
    if (shared_by_config()[plan.config] != plan.shared_bytes) {
      std::printf("FAIL launch.h and the kernel disagree on shared memory: %s %d %d\n",
                  plan.config.c_str(), int(shared_by_config()[plan.config]),
                  int(plan.shared_bytes));
      ++failures;
    }
    check(c, plan, epilogues);
    if (epilogues && c.shape.m < 512) check_mixed_statistics(c, plan);
  }
}

std::vector<Case> own_cases() {
  const Data outlier = Data::outlier, constant = Data::constant, normal = Data::normal;
  return {{"one sign", row_major(256, 512, 8192), u, u, 1e-6, 0},
          {"one sign long", row_major(256, 256, 32768), u, u, 1e-6, 0},
          {"normal long", row_major(256, 256, 32768), normal, normal, 1e-6, 0},
          {"outlier x", row_major(260, 516, 1028), outlier, w, 4e-2, 0},
          {"outlier both", row_major(260, 516, 1028), outlier, outlier, 4e-2, 0},
          {"constant", row_major(130, 260, 8192), constant, constant, 4e-2, 0},
          {"constant long", row_major(130, 260, 32768), constant, constant, 4e-2, 0},
          {"constant w", row_major(130, 260, 8192), normal, constant, 4e-2, 0},
          {"x @ W 2048", transposed(2048, 1024, 2048, false), normal, normal, 1e-6, 0},
          {"xT @ y 2050", transposed(1026, 2050, 4100, true), normal, normal, 1e-6, 0},
          {"thin 8x4096x4096", row_major(8, 4096, 4096), normal, normal, 1e-6, 0}};
}

struct Contender {
  std::string name;
  std::function<void()> run;
  std::vector<double> times;
  double sustained = 0, error = 0;
};

template <class Params>
std::function<void()> packing_x_alone(Bound<Params> bound) {
  std::erase_if(bound.plan.splits,
                [](const SplitStep& step) { return step.operand == SplitStep::Operand::w; });
  return [bound]() mutable { bound.run(); };
}

void time_shape(const Blas& blas, int64_t m, int64_t n, int64_t k, Data x, Data w, int rounds) {
  ProductShape high = row_major(m, n, k);
  high.scheme = Scheme::high;
  size_t workspace = 0;
  for (const TileChoice& c : tile_choices(high, {})) {
    workspace = std::max(workspace, plan_with(high, c, {}).workspace_bytes);
  }
  const Problem problem(high, x, w, workspace);
  float* vectors;
  CHECK(cudaMalloc(&vectors, size_t(2 * n) * 4));
  fill<<<64, 256>>>(vectors, 1, 2 * n, 0, 1, Data::normal, 11);
  std::vector<Contender> list = {
      {"cublas tf32",
       [&] { blas.run(problem.x, problem.w, problem.y, int(m), int(n), int(k), false, true); }}};
  const auto add = [&](const ProductShape& shape, const TileChoice& choice, bool all) {
    const ProductPlan plan = plan_with(shape, choice, {});
    auto plain = bind(plan, shape, problem.buffers(), "plain", PlainEpilogue::Params{});
    const std::string name = plan.config + " g" + std::to_string(choice.raster_group);
    list.push_back({name, [plain]() mutable { plain.run(); }});
    if (!all) return;
    auto moments = bind(plan, shape, problem.buffers(), "moments",
                        BiasScaleMomentsEpilogue::Params{vectors, vectors + n});
    list.push_back({name + " product", [plain]() mutable { plain.product(); }});
    list.push_back({name + " moments", [moments]() mutable { moments.run(); }});
    list.push_back({name + " moments, w packed", packing_x_alone(moments)});
  };
  for (const TileChoice& c : candidate_choices(high, {})) {
    if (c.variant == Variant::crossed) add(high, c, c.samples == 256);
  }
  for (const TileChoice& c : tile_choices(as_split(high), {})) {
    const ProductPlan plan = plan_product(as_split(high), {});
    if (plan_with(as_split(high), c, {}).config == plan.config) add(as_split(high), c, false);
  }
  for (Contender& c : list) {
    problem.poison();
    list[1].run();  // the products alone find operands packed
    c.run();
    CHECK(cudaDeviceSynchronize());
    c.error = problem.errors([](double t, int64_t, int64_t) { return t; }).frobenius;
  }
  for (int round = 0; round < rounds; ++round) {
    for (Contender& c : list) {
      c.times.push_back(burst(c.run));
      usleep(60000);
    }
  }
  for (Contender& c : list) c.sustained = sustained(c.run, median(c.times));
  const ProductPlan chosen = plan_product(high, {});
  std::printf("--- %lldx%lldx%lld (m×n×k), the plan takes %s (estimated %.4f ms)\n", (long long)m,
              (long long)n, (long long)k, chosen.config.c_str(), chosen.estimated_us * 1e-3);
  const double tf32 = median(list[0].times);
  for (const Contender& c : list) {
    const bool plain = c.name.find("moments") == std::string::npos;
    std::printf("%-44s %.4f (over tf32 %.3f) sustained %.4f (%.3f)", c.name.c_str(),
                median(c.times), median(c.times) / tf32, c.sustained,
                c.sustained / list[0].sustained);
    plain ? std::printf("  error %.2e\n", c.error) : std::printf("\n");
  }
  std::fflush(stdout);
  cudaFree(vectors);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "check";
  add_split_kernels();
  add_cross_kernels();
  add_crossed_configurations<PlainEpilogue>("plain");
  add_crossed_configurations<BiasScaleMomentsEpilogue>("moments");
  if (which == "time") {
    add_split_configurations<PlainEpilogue>("plain");
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
    const Blas blas;
    time_shape(blas, 1024, 8192, 8192, Data::uniform01, Data::weight, rounds);
    time_shape(blas, 1024, 8192, 8192, Data::normal, Data::normal, rounds);
    time_shape(blas, 16384, 4096, 4096, Data::uniform01, Data::weight, rounds);
    time_shape(blas, 8192, 4096, 1024, Data::uniform01, Data::weight, rounds);
    time_shape(blas, 2048, 2048, 2048, Data::uniform01, Data::weight, rounds);
    return 0;
  }
  add_crossed_configurations<FullEpilogue>("full");
  add_crossed_configurations<SumEpilogue>("sum");
  for (const Case& c : row_major_cases(which == "small")) check_every_kernel(as_high(c));
  for (const Case& c : odd_cases()) check_every_kernel(as_high(c));
  check_every_kernel(as_high(strided_case()));
  if (which != "small") {
    for (const Case& c : own_cases()) check_every_kernel(as_high(c, c.limit > 1e-2));
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
