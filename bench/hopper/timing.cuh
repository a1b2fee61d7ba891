// Times of calls, in milliseconds.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "blas.cuh"

namespace bench {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of single calls, before which L2 is cold.
class ColdTimer {
 public:
  ColdTimer() {
    CHECK(cudaMalloc(&flushed_, kFlushed));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }
  double milliseconds(const std::function<void()>& call) const {
    CHECK(cudaMemsetAsync(flushed_, 0, kFlushed));
    CHECK(cudaEventRecord(begin_));
    call();
    CHECK(cudaEventRecord(end_));
    CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  // More than L2 holds; also the head start that the host needs to have a call's launches queued.
  static constexpr size_t kFlushed = size_t(160) << 20;
  void* flushed_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

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
  const double start = seconds_now();
  const int calls = std::max(4, int(30 / estimate_ms));
  while (seconds_now() - start < 0.35) {
    for (int i = 0; i < calls; ++i) run();
    CHECK(cudaDeviceSynchronize());
  }
  for (int i = 0; i < calls; ++i) run();
  return burst(run, 0, 20);
}

}  // namespace bench
