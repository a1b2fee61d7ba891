// Checks the tf32 product (product/hopper/fused_scaled.cuh, scaled.cuh) against fp64, as check.cu
// checks the fp32 product. Prints one line a case; the exit status is the number of failures.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels
//   bench/hopper/check_scaled.cu
//   ./a.out            all cases
//   ./a.out small      small cases only (for compute-sanitizer)
#include "checking.cuh"
#include "scaled_configurations.cuh"

using namespace bench;

namespace {

// The fp32 product's case, with what one rounded value an element may cost.
Case as_scaled(Case c) {
  c.shape.scheme = Scheme::scaled;
  c.limit *= 1000;
  c.unit_limit = scheme_scaled::kSpec.bound.factor;
  return c;
}

void check_every_kernel(const Case& given) {
  const Case c = as_scaled(given);
  const bool epilogues = c.x == Data::uniform01 && c.w == Data::weight && c.shape.m <= 1024;
  std::vector<std::string> seen;
  for (const TileChoice& choice : candidate_choices(c.shape, {})) {
    const ProductPlan plan = plan_with(c.shape, choice, {});
    require_kernel(plan, "full");
    if (std::find(seen.begin(), seen.end(), plan.config) != seen.end()) continue;
    seen.push_back(plan.config);
    if (shared_by_config()[plan.config] != plan.shared_bytes) {
      std::printf("launch.h and the kernel disagree on shared memory: %s %d %d\n",
                  plan.config.c_str(), int(shared_by_config()[plan.config]),
                  int(plan.shared_bytes));
      ++failures;
    }
    check(c, plan, epilogues);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool small = argc > 1 && !std::strcmp(argv[1], "small");
  add_scale_kernels();
  add_scaled_configurations<PlainEpilogue>("plain");
  add_scaled_configurations<BiasScaleMomentsEpilogue>("moments");
  add_scaled_configurations<FullEpilogue>("full");
  for (const Case& c : row_major_cases(small)) check_every_kernel(c);
  for (const Case& c : odd_cases()) check_every_kernel(c);
  check_every_kernel(strided_case());
  std::printf("%d failures\n", failures);
  return failures != 0;
}
