// CUDA C++ as the generated kernels and the headers of kernels/ use it, for the host's compiler: to
// run them without a GPU, slowly (tests/python/emulation.py). Threads of a block are fibers
// (scheduler.cpp), blocks run one after another, and the path of devices of compute capability 8.0
// is taken, which has neither clusters nor dependent launches.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define __CUDACC__ 1
#define __CUDA_ARCH__ 800
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static  // of the one block that runs

#define EMULATOR_API __attribute__((visibility("default")))

// --- threads: scheduler.cpp ------------------------------------------------------------------

struct EmulatedIndex {
  unsigned x = 1, y = 1, z = 1;
};
extern EMULATOR_API EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
extern EMULATOR_API unsigned dynamic_shared_bytes;
EMULATOR_API void wait_for_block();
EMULATOR_API void wait_at_barrier(int id, int threads);
EMULATOR_API int lane();
// Every lane of a warp shows what it has, and then looks at what the lanes have shown.
constexpr std::size_t kMostShown = 64;
EMULATOR_API void show(const void* value, std::size_t bytes);
EMULATOR_API void look(int lane, void* value, std::size_t bytes);
EMULATOR_API void looked();

template <class T>
T from_lane(T value, int lane) {
  static_assert(sizeof(T) <= kMostShown);
  show(&value, sizeof(T));
  T found;
  look(lane, &found, sizeof(T));
  looked();
  return found;
}
}  // namespace emulator

inline void __syncthreads() {
  emulator::wait_for_block();
}
inline void __syncwarp(unsigned = 0xffffffffu) {
  emulator::from_lane(char{}, emulator::lane());
}
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const int first = emulator::lane() & ~(width - 1);
  return emulator::from_lane(value, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulator::from_lane(value, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = emulator::lane(), within = lane & (width - 1);
  return emulator::from_lane(value, within < distance ? lane : lane - distance);
}
inline bool __any_sync(unsigned, bool predicate) {
  const char own = predicate;
  emulator::show(&own, 1);
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) {
    char other;
    emulator::look(lane, &other, 1);
    any = any || other != 0;
  }
  emulator::looked();
  return any;
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};

// --- numbers ---------------------------------------------------------------------------------

template <class To, class From>
To emulated_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
inline float __uint_as_float(unsigned bits) {
  return emulated_bits<float>(bits);
}
inline float __int_as_float(int bits) {
  return emulated_bits<float>(bits);
}
inline unsigned __float_as_uint(float value) {
  return emulated_bits<unsigned>(value);
}
inline int __float_as_int(float value) {
  return emulated_bits<int>(value);
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
inline float rsqrtf(float a) {
  return 1.f / std::sqrt(a);
}
inline double rsqrt(double a) {
  return 1. / std::sqrt(a);
}

// Instructions of PTX that the headers hold between their lines, in the place of which
// emulation.py puts calls: results first.
namespace emulator {

inline std::uint16_t half_of(float value) {
  return emulated_bits<std::uint16_t>(static_cast<_Float16>(value));
}
inline float of_half(std::uint16_t bits) {
  return static_cast<float>(emulated_bits<_Float16>(bits));
}
inline std::uint16_t bf16_of(float value) {
  if (value != value) return 0x7fff;
  const unsigned bits = __float_as_uint(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void max_NaN_f32(float& result, float a, float b) {
  result = a != a || b != b ? NAN : a > b ? a : b;
}
inline void min_NaN_f32(float& result, float a, float b) {
  result = a != a || b != b ? NAN : a < b ? a : b;
}
inline void rcp_approx_ftz_f32(float& result, float a) {
  result = 1.f / a;
}
inline constexpr float kSmallestNormal = 1.17549435e-38f;
inline void ex2_approx_ftz_f32(float& result, float a) {
  result = std::exp2(a);
  if (result < kSmallestNormal) result = 0;
}
inline void lg2_approx_ftz_f32(float& result, float a) {
  result = std::log2(std::fabs(a) < kSmallestNormal ? 0 * a : a);
}
inline void rsqrt_approx_f32(float& result, float a) {
  result = rsqrtf(a);
}
inline void mul_sat_f32(float& result, float a, float b) {
  const float product = a * b;
  result = product > 1 ? 1 : product > 0 ? product : 0;
}
inline void tanh_approx_f32(float& result, float a) {
  result = std::tanh(a);
}
inline void cvt_f32_f16(float& result, std::uint16_t bits) {
  result = of_half(bits);
}
inline void cvt_rn_f16_f32(std::uint16_t& result, float value) {
  result = half_of(value);
}

}  // namespace emulator
