// Launches through the CUDA runtime: standalone files and bench/hopper.
#pragma once

#include <cuda_runtime.h>

#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch/launch.h"

namespace ingot {

inline void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next check of somebody else's would report it
  throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(status));
}

// Of the current device.
inline int attribute_of_device(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "asking for the device");
  check(cudaDeviceGetAttribute(&value, which, device), "asking what the device offers");
  return value;
}

// More shared memory than a block has by itself must be asked for, once a device.
inline void reserve_shared(const void* kernel, size_t bytes) {
  constexpr size_t kByItself = 48 << 10;
  if (bytes <= kByItself) return;
  static thread_local std::set<std::pair<int, const void*>> reserved;
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  if (reserved.count({device, kernel})) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
        "reserving shared memory");
  reserved.insert({device, kernel});
}

inline void launch(const void* kernel, const Grid& grid, void** arguments, cudaStream_t stream,
                   bool dependent) {
  if (grid.blocks <= 0) return;
  if (grid.blocks > 0x7fffffff) throw std::runtime_error("the batch takes more blocks than 2^31");
  reserve_shared(kernel, grid.shared_bytes);
  const dim3 blocks(unsigned(grid.blocks)), threads(unsigned(grid.threads));
#if CUDART_VERSION >= 11080
  static_assert(sizeof(LaunchAttribute) == sizeof(cudaLaunchAttribute));
  LaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = reinterpret_cast<cudaLaunchAttribute*>(attributes);
  config.numAttrs = fill_attributes(grid, dependent, attributes);
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launching a kernel");
#else
  check(cudaLaunchKernel(kernel, blocks, threads, arguments, grid.shared_bytes, stream),
        "launching a kernel");
#endif
}

}  // namespace ingot
