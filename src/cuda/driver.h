// The part of the CUDA driver API that Ingot uses, declared here (no CUDA header is needed) and
// loaded from libcuda.so.1 at run time. Layouts and numbers are those of CUDA 12.0 and later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "launch/launch.h"

namespace ingot::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

inline constexpr CUresult kCudaSuccess = 0;

enum DeviceAttribute : int {
  kMultiprocessors = 16,
  kMemoryClockKhz = 36,
  kMemoryBusBits = 37,
  kL2Bytes = 38,
  kMaxSharedBytes = 97,  // that a thread block may have, if it asks
  kComputeMajor = 75,
  kComputeMinor = 76
};
enum FunctionAttribute : int { kMaxDynamicSharedBytes = 8 };

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

// X(function, symbol, parameters): every function that must be there.
#define INGOT_DRIVER_FUNCTIONS(X)                                                            \
  X(cuInit, "cuInit", (unsigned))                                                            \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int*))                                        \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int*))                                            \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int))                                            \
  X(cuDeviceGetName, "cuDeviceGetName", (char*, int, CUdevice))                              \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                     \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, CUdevice))                            \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))            \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                        \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                    \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext*))                                     \
  X(cuCtxGetDevice, "cuCtxGetDevice", (CUdevice*))                                           \
  X(cuModuleLoadData, "cuModuleLoadData", (CUmodule*, const void*))                          \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule))                                            \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))        \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction, int, int))                        \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", (const LaunchConfig*, CUfunction, void**, void**)) \
  X(cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters",                            \
    (int*, CUfunction, const LaunchConfig*))                                                 \
  X(cuStreamCreate, "cuStreamCreate", (CUstream*, unsigned))                                 \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                       \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream, int*))                            \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream, int))                        \
  X(cuStreamEndCapture, "cuStreamEndCapture", (CUstream, CUgraph*))                          \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))          \
  X(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags",                              \
    (CUgraphExec*, CUgraph, unsigned long long))                                             \
  X(cuGraphDestroy, "cuGraphDestroy", (CUgraph))                                             \
  X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec, CUstream))                                 \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec))                                 \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char**))                              \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char**))                          \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                        \
    (CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,  \
     const uint32_t*, int, int, int, int))

struct Driver {
#define INGOT_DECLARE(function, symbol, parameters) CUresult(*function) parameters = nullptr;
  INGOT_DRIVER_FUNCTIONS(INGOT_DECLARE)
#undef INGOT_DECLARE
  int version = 0;  // 13000 is CUDA 13.0
  int devices = 0;
};

// The driver, initialised; throws Error (INGOT_UNAVAILABLE) saying what is missing, also in a
// process that was forked after the driver had been initialised, where CUDA cannot work.
const Driver& driver();
// The same without throwing: nullptr, and why.
const Driver* try_driver(std::string* why);

// Throws Error (INGOT_FAILED) naming what was being done and the driver's own words.
void check(CUresult result, const char* doing);

int device_attribute(CUdevice device, DeviceAttribute attribute);

}  // namespace ingot::cuda
