// Times of calls, in milliseconds.
#pragma once

#include <chrono>
#include <vector>

#include "blas.cuh"

namespace bench {

// The median of calls in a row.
template <class F>
inline double burst(F run, int warm = 5, int calls = 20) {
  for (int i = 0; i < warm; ++i) run();
  std::vector<cudaEvent_t> events(size_t(calls) * 2);
  for (auto& e : events) CHECK(cudaEventCreate(&e));
  for (int i = 0; i < calls; ++i) {
    CHECK(cudaEventRecord(events[size_t(2 * i)]));
    run();
    CHECK(cudaEventRecord(events[size_t(2 * i + 1)]));
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) {
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, events[size_t(2 * i)], events[size_t(2 * i + 1)]));
    times.push_back(ms);
  }
  for (auto& e : events) cudaEventDestroy(e);
  return median(times);
}

// The same after a third of a second of load.
template <class F>
inline double sustained(F run, double estimate_ms) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto start = now();
  const int calls = std::max(4, int(30 / estimate_ms));
  while (std::chrono::duration<double>(now() - start).count() < 0.35) {
    for (int i = 0; i < calls; ++i) run();
    CHECK(cudaDeviceSynchronize());
  }
  for (int i = 0; i < calls; ++i) run();
  return burst(run, 0, 20);
}

}  // namespace bench
