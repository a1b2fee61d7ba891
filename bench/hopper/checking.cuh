// Checks products against fp64: shapes, operand layouts, hostile data, statistics, the redo,
// bitwise repeats. One line a case; `failures` counts.
#pragma once

#include <cstring>

#include "epilogues.cuh"
#include "problem.cuh"

namespace bench {

inline int failures = 0;

struct Case {
  const char* name;
  ProductShape shape;
  Data x, w;
  double limit;       // of the worst row's relative error
  double unit_limit;  // of the worst error in units of the promise
  int misalign = 0;
  int repeats = 3;
};

inline void verdict(const char* name, const std::string& config, const char* what, const Errors& e,
                    bool ok, unsigned long long nans, int differing) {
  std::printf(
      "%-4s %-26s %-34s %-10s frob %.2e row %.2e units %5.2f class %lld nan %llu repeats %d\n",
      ok ? "ok" : "FAIL", name, config.c_str(), what, e.frobenius, e.worst_row, e.units,
      e.class_mismatches, nans, differing);
  std::fflush(stdout);
  failures += !ok;
}

// The same product several times, over memory that held NaN: how many results are NaN, and how many
// runs differ from the first.
struct Repeats {
  unsigned long long nans = 0;
  int differing = 0;
};
template <class Run>
Repeats repeated(const Problem& problem, int count, Run run) {
  Repeats repeats;
  unsigned long long first = 0;
  for (int i = 0; i < count; ++i) {
    problem.poison();
    run();
    CHECK(cudaDeviceSynchronize());
    const auto [hash_value, nan_count] = problem.digest_result();
    if (i == 0) first = hash_value, repeats.nans = nan_count;
    repeats.differing += hash_value != first;
  }
  return repeats;
}

template <class B, class Finish>
void check_runs(const Case& c, Problem& problem, B& bound, const char* what, Finish finish,
                bool redo) {
  bound.args.redo_all = redo;
  const auto [nans, differing] = repeated(problem, c.repeats, [&] { bound.run(); });
  const Errors e = problem.errors(finish, c.x == Data::huge ? c.unit_limit : 0);
  const bool special = c.x == Data::special || c.w == Data::special || c.x == Data::huge;
  const bool padded = c.shape.y_stride != c.shape.n || !c.shape.y_aligned;
  const bool ok = e.worst_row <= c.limit && e.units <= c.unit_limit && e.class_mismatches == 0 &&
                  differing == 0 && (special || padded || nans == 0);
  verdict(c.name, bound.plan.config, what, e, ok, nans, differing);
}

// Column means and variances from the partial states against fp64 over the stored result.
inline void check_statistics(const Case& c, const Problem& problem, const ProductPlan& plan,
                             int index) {
  const size_t n = size_t(c.shape.n), tiles = size_t(plan.moment_tiles);
  std::vector<Moments<float>::State> states(n * tiles);
  CHECK(cudaMemcpy(states.data(), problem.buffers().partials[index],
                   states.size() * sizeof(states[0]), cudaMemcpyDeviceToHost));
  std::vector<float> y(problem.y_count);
  CHECK(cudaMemcpy(y.data(), problem.y, y.size() * 4, cudaMemcpyDeviceToHost));
  double worst_mean = 0, worst_variance = 0;
  for (size_t column = 0; column < n; ++column) {
    Moments<double>::State merged = Moments<double>::identity();
    for (size_t t = 0; t < tiles; ++t) {
      const auto& s = states[t * n + column];
      merged = Moments<double>::merge(merged, {s.count, s.mean, s.m2});
    }
    double mean = 0, m2 = 0;
    const auto value = [&](int64_t m) {
      const double v = y[size_t(m * c.shape.y_stride) + column];
      return index == 0 ? v : double(float(v) * float(v));
    };
    for (int64_t m = 0; m < c.shape.m; ++m) mean += value(m);
    mean /= double(c.shape.m);
    for (int64_t m = 0; m < c.shape.m; ++m) m2 += (value(m) - mean) * (value(m) - mean);
    if (merged.count != double(c.shape.m)) worst_mean = INFINITY;
    const double deviation = std::sqrt(m2 / double(c.shape.m)) + 1e-30;
    worst_mean =
        std::max(worst_mean, std::fabs(merged.mean - mean) / (deviation + std::fabs(mean)));
    worst_variance =
        std::max(worst_variance, m2 > 0 ? std::fabs(merged.m2 - m2) / m2 : std::fabs(merged.m2));
  }
  const bool ok = worst_mean < 1e-6 && worst_variance < 2e-5;
  std::printf("%-4s %-26s %-34s stats %d    mean %.2e m2 %.2e\n", ok ? "ok" : "FAIL", c.name,
              plan.config.c_str(), index, worst_mean, worst_variance);
  failures += !ok;
}

// Column sums from partial sums against fp64 over the stored result.
inline void check_sums(const Case& c, const Problem& problem, const ProductPlan& plan) {
  const size_t n = size_t(c.shape.n), tiles = size_t(plan.moment_tiles);
  std::vector<float> sums(n * tiles), y(problem.y_count);
  CHECK(cudaMemcpy(sums.data(), problem.buffers().partials[0], sums.size() * 4,
                   cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(y.data(), problem.y, y.size() * 4, cudaMemcpyDeviceToHost));
  double worst = 0;
  for (size_t column = 0; column < n; ++column) {
    double found = 0, truth = 0, total = 1e-300;
    for (size_t t = 0; t < tiles; ++t) found += sums[t * n + column];
    for (int64_t m = 0; m < c.shape.m; ++m) {
      const double v = y[size_t(m * c.shape.y_stride) + column];
      truth += v, total += std::fabs(v);
    }
    const double error = std::fabs(found - truth) / total;
    worst = error <= worst ? worst : error;  // NaN too
  }
  const bool ok = worst < 1e-6;
  std::printf("%-4s %-26s %-34s sums       %.2e\n", ok ? "ok" : "FAIL", c.name, plan.config.c_str(),
              worst);
  failures += !ok;
}

// A plain sum and moments, by an epilogue called "sum".
inline void check_mixed_statistics(const Case& c, const ProductPlan& plan) {
  Problem problem(c.shape, c.x, c.w, plan.workspace_bytes);
  float* row;
  CHECK(cudaMalloc(&row, size_t(c.shape.m) * 4));
  fill<<<64, 256>>>(row, 1, c.shape.m, 0, 1, Data::normal, 11);
  problem.poison();
  bind(plan, c.shape, problem.buffers(), "sum", SumEpilogue::Params{row}).run();
  CHECK(cudaDeviceSynchronize());
  check_sums(c, problem, plan);
  check_statistics(c, problem, plan, 1);
  cudaFree(row);
}

inline void check(const Case& c, const ProductPlan& plan, bool epilogues) {
  Problem problem(c.shape, c.x, c.w, plan.workspace_bytes, c.misalign);
  const auto identity = [](double t, int64_t, int64_t) { return t; };
  auto plain = bind(plan, c.shape, problem.buffers(), "plain", PlainEpilogue::Params{});
  check_runs(c, problem, plain, "plain", identity, false);
  Case redo = c;
  redo.repeats = 1;
  redo.limit = std::max(c.limit, 1e-5);
  // fp32 itself overflows or loses denormals on the way where the split product, scaled, does not.
  const bool extreme = c.x == Data::huge || c.x == Data::denormal || c.w == Data::denormal;
  if (!extreme && c.shape.m * c.shape.n * c.shape.k < (int64_t(1) << 31)) {
    check_runs(redo, problem, plain, "redo", identity, true);
  }
  if (!epilogues) return;

  const size_t n = size_t(c.shape.n), m = size_t(c.shape.m);
  float *vectors, *full;
  CHECK(cudaMalloc(&vectors, (2 * n + m) * 4));
  CHECK(cudaMalloc(&full, m * n * 4));
  fill<<<64, 256>>>(vectors, 1, (long long)(2 * n + m), 0, 1, Data::normal, 11);
  fill<<<512, 256>>>(full, (long long)m, (long long)n, (long long)n, 1, Data::normal, 12);
  std::vector<float> v(2 * n + m), f(m * n);
  CHECK(cudaMemcpy(v.data(), vectors, v.size() * 4, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(f.data(), full, f.size() * 4, cudaMemcpyDeviceToHost));
  Case with = c;
  with.unit_limit = 1e9;  // the unit knows nothing of the epilogue's own operands
  with.limit = std::max(c.limit, 1e-6);
  for (const bool redone : {false, true}) {
    auto scaled = bind(plan, c.shape, problem.buffers(), "moments",
                       BiasScaleMomentsEpilogue::Params{vectors, vectors + n});
    check_runs(
        with, problem, scaled, redone ? "moments/r" : "moments",
        [&](double t, int64_t, int64_t j) { return (t + v[size_t(j)]) * v[n + size_t(j)]; },
        redone);
    check_statistics(c, problem, plan, 0);
  }
  auto all = bind(plan, c.shape, problem.buffers(), "full",
                  FullEpilogue::Params{vectors + 2 * n, full, c.shape.n});
  check_runs(
      with, problem, all, "full",
      [&](double t, int64_t i, int64_t j) {
        return t * v[2 * n + size_t(i)] + f[size_t(i) * n + size_t(j)];
      },
      false);
  check_statistics(c, problem, plan, 0);
  check_statistics(c, problem, plan, 1);
  cudaFree(vectors);
  cudaFree(full);
}

inline void check(const Case& c, const TileChoice& choice, bool epilogues) {
  check(c, plan_with(c.shape, choice, {}), epilogues);
}

inline ProductShape transposed(int64_t m, int64_t n, int64_t k, bool x_too) {
  ProductShape s = row_major(m, n, k);
  s.w = {1, n, true};
  if (x_too) s.x = {1, m, true};
  return s;
}

inline constexpr Data u = Data::uniform01, w = Data::weight;

inline std::vector<Case> row_major_cases(bool small) {
  std::vector<Case> cases = {
      {"128x128x128", row_major(128, 128, 128), u, w, 1e-6, 6},
      {"ragged 100x200x132", row_major(100, 200, 132), u, w, 1e-6, 6},
      {"ragged 300x333x68", row_major(300, 333, 68), u, w, 1e-6, 6},
      {"1x4x4", row_major(1, 4, 4), u, w, 1e-6, 6},
      {"ragged 65x130x1100", row_major(65, 130, 1100), u, w, 1e-6, 6},
  };
  if (small) return cases;
  const auto shape = row_major(260, 516, 1028);
  cases.insert(
      cases.end(),
      {
          {"normal", row_major(512, 512, 2048), Data::normal, Data::normal, 1e-6, 6},
          {"large mean", shape, Data::large_mean, w, 1e-6, 6},
          {"rows 2^+-60", shape, Data::wide_rows, Data::wide_rows, 2e-6, 6},
          {"chunks 2^+-30", shape, Data::wide_chunks, Data::wide_chunks, 2e-5, 6},
          {"w chunks 2^+-30", shape, u, Data::wide_chunks, 2e-6, 6},
          {"elements 2^+-20", shape, Data::wide_elements, Data::wide_elements, 2e-5, 6},
          {"w elements 2^+-20", shape, u, Data::wide_elements, 2e-5, 6},
          {"growing", row_major(256, 256, 8192), Data::normal, Data::growing, 2e-6, 6},
          {"growing both", row_major(256, 256, 8192), Data::growing, Data::growing, 2e-6, 6},
          {"zero start", shape, Data::normal, Data::zero_start, 1e-6, 6},
          {"zero start x", shape, Data::zero_start, Data::normal, 1e-6, 6},
          {"denormal w", shape, Data::normal, Data::denormal, 1e-4, 6},
          {"denormal x", shape, Data::denormal, Data::normal, 1e-4, 6},
          {"huge x tiny w", shape, Data::huge, Data::tiny, 1e-6, 6},
          {"tiny x huge w", shape, Data::tiny, Data::huge, 1e-6, 6},
          {"huge x denormal w", shape, Data::huge, Data::denormal, 1e-6, 6},
          {"overflow", shape, Data::huge, Data::huge, 1e-6, 6},
          {"special x", shape, Data::special, Data::normal, 2e-6, 6},
          {"special w", shape, Data::normal, Data::special, 2e-6, 6},
          {"special both", shape, Data::special, Data::special, 2e-6, 6},
          {"1024x8192x8192", row_major(1024, 8192, 8192), u, w, 1e-6, 6, 0, 8},
          {"16384x4096x4096", row_major(16384, 4096, 4096), u, w, 1e-6, 6, 0, 6},
          {"33x1024x40000", row_major(33, 1024, 40000), u, w, 1e-6, 6, 0, 4},
      });
  return cases;
}

// Layouts and alignments that only packed operands allow.
inline std::vector<Case> odd_cases() {
  std::vector<Case> odd = {
      {"odd 77x131x333", row_major(77, 131, 333), u, w, 1e-6, 6},
      {"1x1x1", row_major(1, 1, 1), u, w, 1e-6, 6},
      {"misaligned 96x64x64", row_major(96, 64, 64), u, w, 1e-6, 6, 1},
      {"x @ W", transposed(200, 150, 300, false), u, w, 1e-6, 6},
      {"xT @ y", transposed(200, 150, 300, true), u, w, 1e-6, 6},
      {"xT @ y special", transposed(200, 150, 300, true), Data::special, w, 2e-6, 6},
  };
  odd[2].shape.x.aligned = odd[2].shape.w.aligned = false;
  return odd;
}

// Rows of the result that TMA cannot store.
inline Case strided_case() {
  Case strided = {"strided y", row_major(70, 132, 64), u, w, 1e-6, 6};
  strided.shape.y_stride = 137;
  strided.shape.y_aligned = false;
  return strided;
}

}  // namespace bench
