// Scalar names and function qualifiers shared by host code, nvcc and NVRTC. Includes nothing, since
// NVRTC compiles these headers on machines that have no CUDA or C++ headers at all.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define INGOT_HD __host__ __device__ __forceinline__
#define INGOT_D __device__ __forceinline__
#else
#define INGOT_HD inline __attribute__((always_inline))
#endif

namespace ingot {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u16 = unsigned short;

}  // namespace ingot
