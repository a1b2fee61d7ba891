// Times every configuration of the Hopper product on 30 shapes, and says how far the one that the
// cost model chooses is from the best.
//
//   build: nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels
//          bench/hopper/sweep.cu -ldl -o sweep
//   run:   ./sweep [seconds] > config-sweep.json          (progress and a table on stderr)
//
// Configurations take turns, one call each a round, L2 evicted before each call, split passes
// included; a figure is the median over rounds. Each configuration's result is checked against
// fp64 first.

#include "configurations.cuh"
#include "epilogues.cuh"
#include "problem.cuh"
#include "timing.cuh"

using namespace bench;

namespace {

struct Extents {
  int64_t m, k, n;
  const char* kind;
};

constexpr Extents kShapes[] = {
    {64, 64, 64, "square"},       {128, 128, 128, "square"},    {256, 256, 256, "square"},
    {512, 512, 512, "square"},    {1024, 1024, 1024, "square"}, {2048, 2048, 2048, "square"},
    {4096, 4096, 4096, "square"}, {8192, 8192, 8192, "square"}, {1024, 8192, 8192, "seed"},
    {16384, 4096, 4096, "seed"},  {128, 32768, 32768, "seed"},  {32768, 1024, 4096, "seed"},
    {1, 8192, 8192, "thin"},      {16, 8192, 8192, "thin"},     {64, 4096, 4096, "thin"},
    {64, 32768, 32768, "thin"},   {128, 4096, 1024, "thin"},    {256, 4096, 4096, "thin"},
    {512, 8192, 8192, "thin"},    {65536, 256, 256, "tall"},    {32768, 64, 1024, "tall"},
    {16384, 1024, 128, "tall"},   {8192, 512, 2048, "tall"},    {256, 32768, 256, "deep"},
    {128, 16384, 2048, "deep"},   {67, 133, 91, "odd"},         {1000, 1000, 1000, "odd"},
    {2047, 2047, 2047, "odd"},    {5000, 3000, 1111, "odd"},    {1025, 4100, 8196, "odd"},
    {7168, 1024, 4096, "block"},  {7168, 4096, 1024, "block"},  {12288, 768, 3072, "block"},
    {12288, 3072, 768, "block"},  {6144, 2048, 5632, "block"},  {8192, 2048, 2048, "block"},
};

constexpr int kRounds = 25, kFewestRounds = 7, kProductRounds = 5;
constexpr double kWrong = 2e-6;  // row errors beyond this are no rounding

struct Candidate {
  std::string name;
  std::function<void()> full, product;
  double estimated_us = 0, error = 0;
  std::vector<double> full_ms, product_ms;
};

Candidate candidate_for(const TileChoice& choice, const ProductShape& shape,
                        const DeviceLimits& device, const Problem& problem) {
  Candidate candidate;
  candidate.name = name_of(choice);
  candidate.estimated_us = estimate(shape, choice, device);
  auto bound = bind(plan_with(shape, choice, device), shape, problem.buffers(), "plain",
                    PlainEpilogue::Params{});
  problem.poison();
  bound.run();
  CHECK(cudaDeviceSynchronize());
  candidate.error = problem.errors([](double t, int64_t, int64_t) { return t; }).worst_row;
  candidate.full = [bound]() mutable { bound.run(); };
  candidate.product = [bound]() mutable { bound.product(); };
  return candidate;
}

// The choice with the least estimate: what plan_product() takes.
std::string chosen_name(const ProductShape& shape, const DeviceLimits& device) {
  const std::vector<TileChoice> menu = tile_choices(shape, device);
  const auto best =
      std::min_element(menu.begin(), menu.end(), [&](const TileChoice& a, const TileChoice& b) {
        return estimate(shape, a, device) < estimate(shape, b, device);
      });
  return name_of(*best);
}

void measure(std::vector<Candidate>& list, const ColdTimer& timer, double budget) {
  const double begun = seconds_now();
  for (Candidate& c : list) timer.milliseconds(c.full);
  for (int round = 0; round < kRounds; ++round) {
    if (round >= kFewestRounds && seconds_now() - begun > budget) break;
    for (size_t i = 0; i < list.size(); ++i) {
      Candidate& c = list[(i + size_t(round)) % list.size()];
      c.full_ms.push_back(timer.milliseconds(c.full));
      if (c.product && round < kProductRounds) {
        c.product_ms.push_back(timer.milliseconds(c.product));
      }
    }
  }
}

// One object of the file; returns chosen/best.
double report(const Extents& e, const std::vector<Candidate>& list, const std::string& chosen,
              double library_us, bool last) {
  const auto full = [](const Candidate& c) { return median(c.full_ms); };
  const Candidate* best = nullptr;
  const Candidate* taken = nullptr;
  const Candidate* library = nullptr;
  for (const Candidate& c : list) {
    if (c.name == "library") library = &c;
    if (c.name == chosen) taken = &c;
    if (best == nullptr || full(c) < full(*best)) best = &c;
  }
  const double ratio = full(*taken) / full(*best);
  std::printf(
      "  {\"m\": %lld, \"k\": %lld, \"n\": %lld, \"kind\": \"%s\", \"rounds\": %zu,\n"
      "   \"chosen\": \"%s\", \"best\": \"%s\", \"ratio\": %.4f, \"library_estimated_us\": %.2f,\n"
      "   \"configurations\": [\n",
      (long long)e.m, (long long)e.k, (long long)e.n, e.kind, list[0].full_ms.size(),
      chosen.c_str(), best->name.c_str(), ratio, library_us);
  for (const Candidate& c : list) {
    std::printf(
        "    {\"name\": \"%s\", \"ms\": %.5f, \"product_ms\": %.5f, \"estimated_ms\": %.5f, "
        "\"worst_row_error\": %.2e}%s\n",
        c.name.c_str(), full(c), median(c.product_ms), c.estimated_us * 1e-3, c.error,
        &c == &list.back() ? "" : ",");
  }
  std::printf("   ]}%s\n", last ? "" : ",");
  std::fflush(stdout);
  std::fprintf(stderr,
               "%6lldx%lld->%lld: chosen %s %.4f ms, best %s %.4f (%.3f), library %.4f, rounds "
               "%zu\n",
               (long long)e.m, (long long)e.k, (long long)e.n, chosen.c_str(), full(*taken),
               best->name.c_str(), full(*best), ratio, library ? full(*library) : 0.,
               list[0].full_ms.size());
  return ratio;
}

// chosen/best, or a negative number if a result was wrong.
double sweep_shape(const Extents& e, const Blas& blas, const ColdTimer& timer,
                   const DeviceLimits& device, double budget, bool last) {
  const ProductShape shape = row_major(e.m, e.n, e.k);
  size_t workspace = 0;
  for (const TileChoice& c : candidate_choices(shape, device)) {
    workspace = std::max(workspace, plan_with(shape, c, device).workspace_bytes);
  }
  const Problem problem(shape, Data::uniform01, Data::weight, workspace);
  std::vector<Candidate> list;
  bool wrong = false;
  for (const TileChoice& choice : candidate_choices(shape, device)) {
    list.push_back(candidate_for(choice, shape, device, problem));
    if (list.back().error < kWrong) continue;
    std::fprintf(stderr, "WRONG: %s, worst row's error %.1e\n", list.back().name.c_str(),
                 list.back().error);
    wrong = true;
  }
  if (blas.ready()) {
    Candidate library;
    library.name = "library";
    library.estimated_us = estimate_library(shape);
    library.full = [&] {
      blas.run(problem.x, problem.w, problem.y, int(e.m), int(e.n), int(e.k), false);
    };
    list.push_back(library);
  }
  measure(list, timer, budget);
  const ProductPlan plan = plan_product(shape, device);
  const bool library = plan.library_faster && blas.ready();
  const double ratio =
      report(e, list, library ? "library" : chosen_name(shape, device), plan.library_us, last);
  return wrong ? -1 : ratio;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 45;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const DeviceLimits device = limits_of(properties.multiProcessorCount);
  add_split_kernels();
  add_configurations<PlainEpilogue>("plain");
  require_candidates("plain");
  const Blas blas;
  const ColdTimer timer;
  const double begun = seconds_now();
  constexpr size_t kCount = std::size(kShapes);
  std::printf("{\"gpu\": \"%s\", \"shapes\": [\n", properties.name);
  double worst = 1;
  int beyond = 0, wrong = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const double left = seconds - (seconds_now() - begun);
    const double budget = std::max(0., left / double(kCount - i));
    const double ratio = sweep_shape(kShapes[i], blas, timer, device, budget, i + 1 == kCount);
    wrong += ratio < 0;
    beyond += ratio > 1.05;
    worst = std::max(worst, ratio);
  }
  std::printf("]}\n");
  std::fprintf(stderr, "worst chosen/best %.3f; %d of %zu beyond 1.05; %d wrong; %.1f s\n", worst,
               beyond, kCount, wrong, seconds_now() - begun);
  return wrong > 0;
}
