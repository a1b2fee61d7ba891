// Checks and times a columns sweep that packs on the way (columns_packed.cuh) beside what it
// would replace, a sweep that stores and a packing pass that reads again: the gradient dY of a
// linear layer before a scale and a batch norm, with its two column sums. Beside them one kernel
// that keeps both tensors on chip, and so makes the means in front of dY as well.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels \
//     bench/hopper/columns_packed.cu
//   ./a.out            checks, then times
//   ./a.out check      checks only (for compute-sanitizer: ./a.out small)
//   ./a.out time       times only
//
// dY, halves and exponents must have the same bits; sums are added up in another order and are held
// against double precision. The exit status is whether a check failed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "device.cuh"
#include "norm_gradient.cuh"
#include "sweeps/splits.h"

using namespace bench;

namespace {

template <class Body, int V>
__global__ void __launch_bounds__(256)
    sweep_kernel(const __grid_constant__ typename Body::Operands operands, i64 samples,
                 i64 split_samples, void* partials) {
  columns_sweep<Body, V, 32, 8, 4>(operands, samples, split_samples, partials);
}
template <class Body>
__global__ void __launch_bounds__(512)
    merge_kernel(const __grid_constant__ typename Body::Operands operands, const void* partials,
                 i64 splits) {
  merge_sweep<Body, 16, 32>(operands, partials, splits);
}
constexpr int kWholeWarps = 16;
template <i64 kColumns>
__global__ void __launch_bounds__(kWholeWarps * 32, 1)
    whole_kernel(const __grid_constant__ typename Gradient<kColumns>::Operands operands,
                 i64 samples, void* partials, void* packed, i32* exponent) {
  whole_gradient<Gradient<kColumns>, kWholeWarps>(operands, samples, partials, packed, exponent);
}
template <i64 kColumns, int kWarps, bool kStored>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 8 ? 2 : 1)
    packed_kernel(const __grid_constant__ typename Gradient<kColumns>::Operands operands,
                  i64 samples, void* partials, void* packed, i32* exponent) {
  columns_packed<Gradient<kColumns>, columns::FragmentForm<1>, kWarps, 2, 2, kStored>(
      operands, samples, partials, packed, exponent);
}

// In double precision, of each column: Σ of what sum_of_scale, sum, first and second are of, then
// of their magnitudes.
constexpr int kSums = 4;
template <i64 kColumns>
__global__ void reference_kernel(const __grid_constant__
                                 typename Gradient<kColumns>::Operands operands,
                                 i64 samples, double* sums) {
  using Body = Gradient<kColumns>;
  const i64 e = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= kColumns) return;
  typename Body::template Feature<1> shared;
  Body::template feature<1>(operands, e, shared);
  double sum[kSums] = {}, magnitude[kSums] = {};
  for (i64 b = 0; b < samples; ++b) {
    typename Body::template Element<1> held;
    float x[2][1], packed[1];
    Body::template load<1>(operands, b, e, held);
    Body::template values<1>(operands, shared, held, b, e, x, packed);
    const float added[kSums] = {x[0][0], x[1][0], held.given[0],
                                held.given[0] * Body::normal(shared, held, 0)};
    for (int n = 0; n < kSums; ++n) {
      sum[n] += added[n];
      magnitude[n] += fabs(added[n]);
    }
  }
  for (int n = 0; n < kSums; ++n) {
    sums[n * kColumns + e] = sum[n];
    sums[(kSums + n) * kColumns + e] = magnitude[n];
  }
}

__device__ float random(u64 x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
  return float(x >> 40) / float(1 << 24) - 0.5f;
}

// `hostile`: each 16th column has an infinity, a NaN, zeros alone or tiny numbers alone.
__global__ void fill_kernel(float* data, i64 count, i64 row_length, u64 seed, bool hostile) {
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += i64(gridDim.x) * 256) {
    float value = random(seed << 40 | u64(i));
    const i64 row = i % row_length, sample = i / row_length;
    if (hostile && row % 16 == 3 && sample % 29 == 7) value = __int_as_float(0x7f800000);
    if (hostile && row % 16 == 6 && sample % 31 == 0) value = __int_as_float(0x7fc00000);
    if (hostile && row % 16 == 9) value = 0.f;
    if (hostile && row % 16 == 12) value *= 0x1p-130f;
    data[i] = value;
  }
}

float* floats(i64 count) {
  void* memory;
  CHECK(cudaMalloc(&memory, size_t(count) * 4));
  return static_cast<float*>(memory);
}

// One shape with memory of its own: results by either way.
template <i64 kColumns>
class Case {
 public:
  using Operands = typename Gradient<kColumns>::Operands;

  Case(i64 samples, bool hostile)
      : samples_(samples), lines_(kColumns * divide_up(samples, 32) * 32) {
    const i64 all = samples * kColumns;
    u64 seed = 1;
    operands_.given = filled(all, seed++, hostile);
    operands_.y = filled(all, seed++, false);
    for (float** tensor : {&operands_.scale, &operands_.weight, &operands_.mean, &operands_.rstd,
                           &operands_.first, &operands_.second}) {
      *tensor = filled(kColumns, seed++, false);
    }
    for (float** tensor : {&operands_.sum_of_scale, &operands_.sum}) *tensor = own(kColumns);
    operands_.made = own(all);
    packed_ = own(lines_ + kColumns);
    partials_ = own(1024 * (kColumns + 4) * 4);  // two states of two numbers each
    step_ = plan_split(SplitStep::Operand::x, kColumns, samples, {1, kColumns, true}, Scheme::split,
                       true);
  }
  Case(const Case&) = delete;
  ~Case() {
    for (float* memory : memory_) cudaFree(memory);
  }

  void run_means() { sweep(sweep_kernel<Means<kColumns>, kVector>, merge_kernel<Means<kColumns>>); }
  void run_apart() {
    sweep(sweep_kernel<StoredGradient<kColumns>, kVector>, merge_kernel<StoredGradient<kColumns>>);
    SplitArgs args = {operands_.made, 1,       kColumns,   i32(kColumns),
                      i32(samples_),  packed_, exponents()};
    void* split[] = {&args};
    const Grid grid = {step_.grid, int(step_.threads), step_.shared_bytes, step_.cluster};
    step_.threads == 512 ? start(split_columns_kernel<16, 2, 2>, grid, split)
                         : start(split_columns_kernel<8, 2, 2>, grid, split);
  }
  void run_together(bool stored) {
    i32* exponent = exponents();
    void* sweep[] = {&operands_, &samples_, &partials_, &packed_, &exponent};
    const Grid grid = {step_.grid, int(step_.threads), step_.shared_bytes, step_.cluster};
    if (step_.threads == 512) {
      stored ? start(packed_kernel<kColumns, 16, true>, grid, sweep)
             : start(packed_kernel<kColumns, 16, false>, grid, sweep);
    } else {
      stored ? start(packed_kernel<kColumns, 8, true>, grid, sweep)
             : start(packed_kernel<kColumns, 8, false>, grid, sweep);
    }
    merge(merge_kernel<StoredGradient<kColumns>>, std::max(step_.cluster, 1u));
  }
  // Means, dY and sums; false where the GPU takes no such cluster.
  bool run_whole() {
    Grid grid = {divide_up(kColumns, 32), kWholeWarps * 32, kWholeWarps * 8192, 1};
    while (i64(grid.cluster) * kWholeWarps * 2 < divide_up(samples_, 32)) grid.cluster *= 2;
    grid.blocks *= grid.cluster;
    if (!takes_cluster(grid)) return false;
    i32* exponent = exponents();
    void* sweep[] = {&operands_, &samples_, &partials_, &packed_, &exponent};
    start(whole_kernel<kColumns>, grid, sweep);
    merge(merge_kernel<StoredGradient<kColumns>>, grid.cluster);
    return true;
  }

  int check() {
    run_means();
    int failures = differing_sums("means", 2, kSums);
    const bool whole = run_whole();
    const std::vector<u32> by_one = words(packed_, lines_ + kColumns);
    if (whole) failures += differing_sums("all at once", 0, kSums);
    run_apart();
    const std::vector<u32> made = words(operands_.made, samples_ * kColumns),
                           packed = words(packed_, lines_ + kColumns);
    failures += differing_sums("apart", 0, 2);
    if (whole) failures += differs(packed, by_one, "all at once", "packed words");
    for (const bool stored : {true, false}) {
      CHECK(cudaMemset(operands_.made, 0xab, made.size() * 4));
      CHECK(cudaMemset(packed_, 0xab, packed.size() * 4));
      run_together(stored);
      const char* way = stored ? "stored" : "packed alone";
      failures += differs(packed, words(packed_, i64(packed.size())), way, "packed words");
      std::vector<u32> want = made;
      if (!stored) std::fill(want.begin(), want.end(), 0xabababab);
      failures += differs(want, words(operands_.made, i64(made.size())), way, "elements of dY");
      failures += differing_sums(way, 0, 2);
    }
    return failures;
  }

  i64 bytes() const { return samples_ * kColumns * 4; }

 private:
  template <class F>
  void start(F* function, const Grid& grid, void** arguments) {
    launch(reinterpret_cast<const void*>(function), grid, arguments, nullptr, false);
  }
  template <class Sweep, class Merge>
  void sweep(Sweep* kernel, Merge* merging) {
    const i64 tiles = divide_up(kColumns / kVector, 32);
    const SampleSplits cut = split_samples(samples_, 32, tiles);
    i64 per_split = cut.per_split;
    void* arguments[] = {&operands_, &samples_, &per_split, &partials_};
    start(kernel, {tiles * cut.splits, 256}, arguments);
    merge(merging, cut.splits);
  }
  template <class Merge>
  void merge(Merge* kernel, i64 splits) {
    void* arguments[] = {&operands_, &partials_, &splits};
    start(kernel, {divide_up(kColumns, 16), 512}, arguments);
  }
  static bool takes_cluster(const Grid& grid) {
    const auto kernel = reinterpret_cast<const void*>(whole_kernel<kColumns>);
    reserve_shared(kernel, grid.shared_bytes);
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.cluster);
    config.blockDim = dim3(unsigned(grid.threads));
    config.dynamicSmemBytes = grid.shared_bytes;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {grid.cluster, 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    const auto status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (status != cudaSuccess) cudaGetLastError();
    return status == cudaSuccess && clusters > 0;
  }
  i32* exponents() { return reinterpret_cast<i32*>(packed_ + lines_); }
  float* own(i64 count) { return memory_.emplace_back(floats(count)); }
  float* filled(i64 count, u64 seed, bool hostile) {
    float* memory = own(count);
    fill_kernel<<<1024, 256>>>(memory, count, kColumns, seed, hostile);
    return memory;
  }
  static std::vector<u32> words(const float* memory, i64 count) {
    std::vector<u32> found(static_cast<size_t>(count));
    CHECK(cudaMemcpy(found.data(), memory, found.size() * 4, cudaMemcpyDeviceToHost));
    return found;
  }
  int differs(const std::vector<u32>& want, const std::vector<u32>& got, const char* way,
              const char* what) const {
    size_t count = 0;
    for (size_t i = 0; i < want.size(); ++i) count += want[i] != got[i];
    if (count > 0) {
      std::printf("FAIL %lld x %lld, %s: %zu of %zu %s differ\n", samples_, kColumns, way, count,
                  want.size(), what);
    }
    return count > 0;
  }
  // Of the results [from, to) in the order of reference_kernel().
  int differing_sums(const char* way, int from, int to) const {
    double* sums;
    CHECK(cudaMalloc(&sums, kColumns * 2 * kSums * sizeof(double)));
    reference_kernel<kColumns>
        <<<unsigned(divide_up(kColumns, 64)), 64>>>(operands_, samples_, sums);
    std::vector<double> exact(size_t(kColumns) * 2 * kSums);
    CHECK(cudaMemcpy(exact.data(), sums, exact.size() * 8, cudaMemcpyDeviceToHost));
    cudaFree(sums);
    const float* results[] = {operands_.sum_of_scale, operands_.sum, operands_.first,
                              operands_.second};
    int count = 0;
    for (int n = from; n < to; ++n) {
      const double terms = n < 2 ? 1 : double(samples_);
      const std::vector<u32> found = words(results[n], kColumns);
      for (size_t e = 0; e < found.size(); ++e) {
        float got;
        std::memcpy(&got, &found[e], 4);
        const double want = exact[size_t(n) * kColumns + e] / terms;
        const double bound = 1e-5 * exact[size_t(kSums + n) * kColumns + e] / terms + 1e-36;
        if (std::isnan(want)) {
          count += !std::isnan(got);
        } else {
          count += std::isfinite(want) ? std::abs(got - want) > bound : got != want;
        }
      }
    }
    if (count > 0) {
      std::printf("FAIL %lld x %lld, %s: %d sums differ\n", samples_, kColumns, way, count);
    }
    return count > 0;
  }

  static constexpr int kVector = kColumns % 4 == 0 ? 4 : 1;
  i64 samples_, lines_;
  Operands operands_{};
  float *packed_ = nullptr, *partials_ = nullptr;
  SplitStep step_;
  std::vector<float*> memory_;
};

template <i64 kColumns>
int check(const std::vector<i64>& batches, int* done) {
  int failures = 0;
  for (const i64 samples : batches) {
    for (const bool hostile : {false, true}) {
      failures += Case<kColumns>(samples, hostile).check();
      ++*done;
    }
  }
  return failures;
}

int check_all(bool small) {
  const std::vector<i64> batches =
      small ? std::vector<i64>{1, 33, 1000}
            : std::vector<i64>{1, 7, 31, 32, 33, 100, 1000, 1024, 1025, 4097, 8191, 16384};
  int done = 0;
  int failures = check<2>(batches, &done) + check<33>(batches, &done) + check<70>(batches, &done);
  if (!small) failures += check<1024>(batches, &done) + check<4099>({1000, 2049}, &done);
  std::printf("%d shapes checked, %d failures\n", done, failures);
  return failures;
}

// Medians of microseconds, launches one behind the other over memory that no cache holds.
template <i64 kColumns>
void time_shape(i64 samples) {
  constexpr int kRounds = 9, kCases = 4;
  std::vector<std::unique_ptr<Case<kColumns>>> cases;
  for (int i = 0; i < kCases; ++i) {
    cases.push_back(std::make_unique<Case<kColumns>>(samples, false));
  }
  const double mb = 1e-6 * double(cases[0]->bytes());
  using Own = Case<kColumns>;
  const struct {
    const char* name;
    std::function<void(Own&)> run;
    double tensors;  // that it moves
  } ways[] = {{"means' sweep", [](Own& c) { c.run_means(); }, 2},
              {"dY's sweep, packing pass", [](Own& c) { c.run_apart(); }, 5},
              {"together, dY stored too", [](Own& c) { c.run_together(true); }, 4},
              {"together, packed alone", [](Own& c) { c.run_together(false); }, 3},
              {"means too, all at once", [](Own& c) { c.run_whole(); }, 3}};
  constexpr int kWays = 5;
  std::vector<double> times[kWays];
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round <= kRounds; ++round) {
    for (int way = 0; way < kWays; ++way) {
      CHECK(cudaEventRecord(begin));
      for (int i = 0; i < 2 * kCases; ++i) ways[way].run(*cases[size_t(i % kCases)]);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float milliseconds = 0;
      CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round > 0) times[way].push_back(1e3 * milliseconds / (2 * kCases));
    }
  }
  std::printf("\n%lld x %lld, dY of %.1f MB\n", samples, kColumns, mb);
  for (int way = 0; way < kWays; ++way) {
    std::sort(times[way].begin(), times[way].end());
    const double time = times[way][kRounds / 2];
    std::printf("  %-26s %9.2f us  %.2f TB/s\n", ways[way].name, time,
                mb * ways[way].tensors / time);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count > 1 ? arguments[1] : "";
  const int failures = mode == "time" ? 0 : check_all(mode == "small");
  if (mode.empty() || mode == "time") {
    time_shape<4096>(16384);
    time_shape<8192>(1024);
    time_shape<4096>(7168);
    time_shape<8192>(4096);
  }
  CHECK(cudaDeviceSynchronize());
  return failures > 0;
}
