// Checks and times the packing of transposed operands (product/pack_columns.cuh): every kernel
// variant and cluster size, for both formats, bit by bit against one lane that packs a row, and in
// TB/s (bytes read once and written once) beside a copy of the same bytes.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/columns.cu
//   ./a.out            checks, then times
//   ./a.out check      checks only (for compute-sanitizer: ./a.out small)
//   ./a.out time       times only
//
// The exit status is whether a check failed.
#include <algorithm>
#include <cstring>
#include <vector>

#include "device.cuh"

using namespace bench;

namespace {

// The definition: a thread packs a row.
template <int kSlabs>
__global__ void reference_kernel(const __grid_constant__ SplitArgs args) {
  const i32 row = static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= args.rows) return;
  const float* source = args.source + row * args.row_stride;
  const auto value = [&](i64 k) { return k < args.k ? source[k * args.k_stride] : 0.f; };
  float amax = 0.f;
  for (i64 k = 0; k < args.k; ++k) amax = fmaxf(amax, fabsf(value(k)));
  const i32 exponent = scale_exponent(amax, kExactTarget);
  args.exponent[row] = exponent;
  const i64 lines = (args.k + 32 * kSlabs - 1) / (32 * kSlabs);
  for (i64 line = 0; line < lines; ++line) {
    u32* packed = static_cast<u32*>(args.packed) + (row * lines + line) * 32;
    for (int i = 0; i < 16 * kSlabs; ++i) {
      const int c = i & 3, h = (i >> 2) & 1, j = (i >> 3) & 1;
      const i64 k = 32 * kSlabs * line + 32 * (i >> 4) + 8 * c + 4 * j + 2 * h;
      if (kSlabs == 1) {
        split_pair(value(k), value(k + 1), pow2(-exponent), packed[i], packed[16 + i]);
      } else {
        packed[i] = ptx::pack_half2(value(k) * pow2(-exponent), value(k + 1) * pow2(-exponent));
      }
    }
  }
}

// What this kernel replaced: a warp's lanes own rows and store their lines themselves.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    stored_by_lanes_kernel(const __grid_constant__ SplitArgs args) {
  __shared__ float partial[kWarps][32];
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x * 32 + lane;
  const bool valid = row < args.rows;
  const float* source = args.source + row * args.row_stride;
  float amax = 0.f;
#pragma unroll 8
  for (i32 k = warp; valid && k < args.k; k += kWarps) {
    amax = fmaxf(amax, fabsf(source[k * args.k_stride]));
  }
  partial[warp][lane] = amax;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) amax = fmaxf(amax, partial[i][lane]);
  if (!valid) return;
  const i32 exponent = scale_exponent(amax, kExactTarget);
  if (warp == 0) args.exponent[row] = exponent;
  const i32 slabs = slab_count(args.k);
  u32* packed = static_cast<u32*>(args.packed) + static_cast<i64>(row) * slabs * 32;
  for (i32 slab = warp; slab < slabs; slab += kWarps) {
    u32 line[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const i32 k = 32 * slab + 8 * (i & 3) + 4 * (i >> 3) + 2 * ((i >> 2) & 1);
      split_pair(k < args.k ? source[k * args.k_stride] : 0.f,
                 k + 1 < args.k ? source[(k + 1) * args.k_stride] : 0.f, pow2(-exponent), line[i],
                 line[16 + i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      reinterpret_cast<uint4*>(packed + slab * 32)[i] =
          uint4{line[4 * i], line[4 * i + 1], line[4 * i + 2], line[4 * i + 3]};
    }
  }
}

template <int kSlabs, int kWarps, int kRegisters, int kShared, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    columns_kernel(const __grid_constant__ SplitArgs args) {
  pack_columns<columns::FragmentForm<kSlabs>, kWarps, kRegisters, kShared>(args);
}

struct Kernel {
  std::string name;
  const void* function;
  int slabs, warps, registers, shared, resident;

  size_t shared_bytes() const {
    return warps == 0 ? 0 : size_t(pack_columns_bytes(warps, slabs, registers, shared));
  }
  bool takes(i64 k, int blocks) const {
    if (warps == 0) return blocks == 1;
    return registers == 0 || divide_up(k, 32 * slabs) <= i64(blocks) * warps * (registers + shared);
  }
};

template <int kSlabs, int kWarps, int kRegisters, int kShared, int kResident>
Kernel kernel() {
  void (*function)(SplitArgs) = columns_kernel<kSlabs, kWarps, kRegisters, kShared, kResident>;
  Kernel k = {
      "", reinterpret_cast<const void*>(function), kSlabs, kWarps, kRegisters, kShared, kResident};
  k.name = std::string(kSlabs == 1 ? "split" : "scale") + "<" + std::to_string(kWarps) + ", " +
           std::to_string(kRegisters) + ", " + std::to_string(kShared) + "> " +
           std::to_string(kResident) + " an SM";
  // For asking how many the GPU holds; a launch sees to it by itself.
  CHECK(cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(k.shared_bytes())));
  CHECK(cudaFuncSetAttribute(k.function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  return k;
}

std::vector<Kernel> all_kernels() {
  return {kernel<1, 8, 2, 0, 2>(),  kernel<1, 8, 2, 0, 3>(),  kernel<1, 8, 1, 1, 2>(),
          kernel<1, 8, 1, 3, 2>(),  kernel<1, 8, 2, 2, 2>(),  kernel<1, 8, 2, 3, 2>(),
          kernel<1, 16, 2, 0, 1>(), kernel<1, 16, 2, 2, 1>(), kernel<1, 8, 0, 0, 2>(),
          kernel<1, 8, 0, 0, 3>(),  kernel<1, 16, 0, 0, 2>(), kernel<2, 8, 1, 1, 2>(),
          kernel<2, 16, 1, 1, 1>(), kernel<2, 16, 0, 0, 2>()};
}

Kernel replaced() {
  return {"as it was", reinterpret_cast<const void*>(stored_by_lanes_kernel<16>), 1, 0, 0, 0, 1};
}

// Blocks that the GPU holds at once; 0 where it takes no such cluster.
int blocks_at_once(const Kernel& kernel, int blocks) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(kernel.warps * 32));
  config.dynamicSmemBytes = kernel.shared_bytes();
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters * blocks;
}

void run(const Kernel& kernel, int blocks, SplitArgs args) {
  void* arguments[] = {&args};
  const int threads = kernel.warps == 0 ? 512 : kernel.warps * 32;
  const Grid grid = {divide_up(args.rows, 32) * blocks, threads, kernel.shared_bytes(),
                     unsigned(blocks)};
  launch(kernel.function, grid, arguments, nullptr, false);
}

__device__ u32 mixed(u64 x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
  return static_cast<u32>(x >> 32);
}

// Finite values of many magnitudes; `hostile`: any bits at times, and each 64th row zeroes alone,
// or denormals alone.
__global__ void fill_kernel(float* data, i64 count, i64 row_length, bool hostile) {
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += i64(gridDim.x) * 256) {
    const u32 bits = mixed(u64(i)), other = mixed(u64(i) + (1ull << 40));
    float value = (float(bits) / 4294967296.f - 0.5f) * exp2f(float(other % 24) - 12.f);
    const i64 row = i % row_length;
    if (hostile && row % 3 == 0 && other % 97 == 0) value = __uint_as_float(bits);
    if (hostile && row % 64 == 5) value = 0.f;
    if (hostile && row % 64 == 9) value = __uint_as_float(bits & 0x807fffffu);
    data[i] = value;
  }
}

__global__ void compare_kernel(const u32* a, const u32* b, i64 count, unsigned long long* differ) {
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += i64(gridDim.x) * 256) {
    if (a[i] != b[i]) atomicAdd(differ, 1ull);
  }
}

u32* words(i64 count) {
  void* memory;
  CHECK(cudaMalloc(&memory, size_t(count) * 4));
  return static_cast<u32*>(memory);
}

i64 words_of(int slabs, i64 rows, i64 k) {
  return rows * divide_up(k, 32 * slabs) * 32;
}

struct Case {
  i32 rows, k;
  i64 row_stride, k_stride;
};

// Lines, the exponents behind them, and 32 words that nobody may touch.
int check(const Case& c, const std::vector<Kernel>& kernels, int* done) {
  const i64 count = (c.rows - 1) * c.row_stride + (c.k - 1) * c.k_stride + 1;
  float* source = reinterpret_cast<float*>(words(count + 1)) + 1;  // of no alignment
  fill_kernel<<<512, 256>>>(source, count, c.k_stride, true);
  unsigned long long* differ = reinterpret_cast<unsigned long long*>(words(2));
  int failures = 0;
  for (const int slabs : {1, 2}) {
    const i64 lines = words_of(slabs, c.rows, c.k), all = lines + c.rows + 32;
    u32 *want = words(all), *got = words(all);
    CHECK(cudaMemset(want, 0xab, size_t(all) * 4));
    SplitArgs args = {
        source, c.row_stride, c.k_stride, c.rows, c.k, want, reinterpret_cast<i32*>(want + lines)};
    const unsigned blocks = unsigned(divide_up(c.rows, 64));
    slabs == 1 ? reference_kernel<1><<<blocks, 64>>>(args)
               : reference_kernel<2><<<blocks, 64>>>(args);
    args.packed = got;
    args.exponent = reinterpret_cast<i32*>(got + lines);
    for (const Kernel& kernel : kernels) {
      for (const int cluster : {1, 2, 4, 8, 16}) {
        if (kernel.slabs != slabs || !kernel.takes(c.k, cluster)) continue;
        if (kernel.warps > 0 && blocks_at_once(kernel, cluster) == 0) continue;
        CHECK(cudaMemset(got, 0xab, size_t(all) * 4));
        CHECK(cudaMemset(differ, 0, 8));
        run(kernel, cluster, args);
        compare_kernel<<<512, 256>>>(want, got, all, differ);
        unsigned long long words_apart = 0;
        CHECK(cudaMemcpy(&words_apart, differ, 8, cudaMemcpyDeviceToHost));
        ++*done;
        if (words_apart == 0) continue;
        ++failures;
        std::printf("FAIL %s cluster %d rows %d k %d strides %lld %lld: %llu of %lld words\n",
                    kernel.name.c_str(), cluster, c.rows, c.k, c.row_stride, c.k_stride,
                    words_apart, all);
      }
    }
    cudaFree(want);
    cudaFree(got);
  }
  cudaFree(source - 1);
  cudaFree(differ);
  return failures;
}

int check_all(bool small) {
  std::vector<Kernel> kernels = all_kernels();
  kernels.push_back(replaced());
  int failures = 0, done = 0;
  const std::vector<i32> rows = small ? std::vector<i32>{1, 33, 70}
                                      : std::vector<i32>{1, 2, 31, 32, 33, 100, 1024, 4099, 20000};
  const std::vector<i32> ks =
      small ? std::vector<i32>{1, 33, 1000, 2049}
            : std::vector<i32>{1,    2,    31,   32,   33,   63,    64,    65,    127,
                               255,  256,  1000, 1023, 1024, 1025,  2049,  4096,  5000,
                               7168, 8191, 8192, 8193, 9001, 12345, 16384, 16385, 20000};
  for (const i32 r : rows) {
    for (const i32 k : ks) {
      if (i64(r) * k > (i64(1) << 27)) continue;
      failures += check({r, k, 1, r}, kernels, &done);
      if (r < 200) failures += check({r, k, 1, r + 3}, kernels, &done);
      if (r < 40) failures += check({r, k, 3, 3 * r + 1}, kernels, &done);
    }
  }
  std::printf("%d packings checked, %d failures\n", done, failures);
  return failures;
}

// Microseconds of each launch in a row, over as many pairs of buffers as no cache holds.
template <class Launch>
double time_of(int pairs, Launch&& launch_on) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  const int launches = std::max(2 * pairs, 8);
  launch_on(0);
  CHECK(cudaEventRecord(begin));
  for (int i = 0; i < launches; ++i) launch_on(i % pairs);
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float milliseconds = 0;
  CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return 1e3 * milliseconds / launches;
}

struct Contender {
  std::string name;
  int blocks = 1, at_once = 0;
  std::function<void(int)> launch_on;
  std::vector<double> times;
};

void time_shape(i32 rows, i32 k, const std::vector<Kernel>& kernels, int slabs) {
  constexpr int kRounds = 9;
  const i64 source_words = i64(rows) * k, packed_words = words_of(slabs, rows, k);
  const double bytes = 4.0 * double(source_words + packed_words);
  const int pairs = int(std::clamp(1.2e9 / bytes, 2., 32.));
  std::vector<SplitArgs> args;
  for (int i = 0; i < pairs; ++i) {
    u32 *source = words(source_words), *packed = words(packed_words + rows);
    fill_kernel<<<1024, 256>>>(reinterpret_cast<float*>(source), source_words, rows, false);
    args.push_back({reinterpret_cast<float*>(source), 1, rows, rows, k, packed,
                    reinterpret_cast<i32*>(packed + packed_words)});
  }
  std::vector<Contender> contenders;
  const size_t copied = size_t(std::min(source_words, packed_words)) * 4;
  contenders.push_back({"copy of the bytes packed", 1, 0, [&](int i) {
                          CHECK(cudaMemcpyAsync(args[i].packed, args[i].source, copied,
                                                cudaMemcpyDeviceToDevice, 0));
                        }});
  for (const Kernel& kernel : kernels) {
    for (const int blocks : {1, 2, 4, 8, 16}) {
      if (kernel.slabs != slabs || !kernel.takes(k, blocks)) continue;
      const int at_once = kernel.warps == 0 ? 0 : blocks_at_once(kernel, blocks);
      if (kernel.warps > 0 && at_once == 0) continue;
      contenders.push_back({kernel.name, blocks, at_once,
                            [&, blocks](int i) { run(kernel, blocks, args[size_t(i)]); }});
    }
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) c.times.push_back(time_of(pairs, c.launch_on));
  }
  const SplitStep step = plan_split(SplitStep::Operand::w, rows, k, {1, rows, true},
                                    slabs == 1 ? Scheme::split : Scheme::scaled, true);
  std::printf("\nrows %d, k %d: %.1f MB read and written; the plan takes %s in clusters of %u\n",
              rows, k, bytes / 1e6, step.kernel.c_str(), std::max(step.cluster, 1u));
  for (Contender& c : contenders) {
    std::sort(c.times.begin(), c.times.end());
    const double time = c.times[kRounds / 2];
    const double moved = c.at_once == 0 && c.name[0] == 'c' ? 8.0 * double(packed_words) : bytes;
    std::printf("  %-26s cluster %2d, %4d blocks at once %9.2f us  %.2f TB/s\n", c.name.c_str(),
                c.blocks, c.at_once, time, moved / time * 1e-6);
  }
  std::fflush(stdout);
  for (const SplitArgs& a : args) {
    cudaFree(const_cast<float*>(a.source));
    cudaFree(a.packed);
  }
}

void time_all() {
  std::vector<Kernel> kernels = all_kernels();
  kernels.insert(kernels.begin(), replaced());
  const i32 shapes[][2] = {{8192, 1024}, {8192, 8192}, {4096, 16384}, {4096, 4096},  {4096, 7168},
                           {1024, 7168}, {1024, 1024}, {1024, 4096},  {4096, 32768}, {8190, 8190}};
  for (const auto& shape : shapes) time_shape(shape[0], shape[1], kernels, 1);
  for (const auto& shape : {shapes[0], shapes[1], shapes[2]}) {
    time_shape(shape[0], shape[1], kernels, 2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  int failures = 0;
  if (what != "time") failures = check_all(what == "small");
  if (what != "check" && what != "small") time_all();
  return failures != 0;
}
