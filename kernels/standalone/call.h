// Host side of a standalone file: one call of a program, and how its kernels are launched. Written
// into the file before the launches that libingot generates (src/standalone).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "sweeps/splits.h"
#include "sweeps/tensor.cuh"

namespace ingot::standalone {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next check of somebody else's would report it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Device {
  int index = 0, sm = 0, multiprocessors = 0;
  size_t shared_bytes = 0;        // that a thread block may have
  bool dependent_launch = false;  // kernels may start while their predecessors end
};

// The current device's facts, asked for once.
inline const Device& current_device() {
  static std::mutex mutex;
  static std::map<int, Device> known;
  int index = 0;
  check(cudaGetDevice(&index), "asking for the device");
  const std::lock_guard lock(mutex);
  const auto [found, inserted] = known.try_emplace(index);
  Device& device = found->second;
  if (!inserted) return device;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index), "asking what the device offers");
    return value;
  };
  device.index = index;
  device.sm = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
              attribute(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = size_t(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  // Drivers from 12.4 on capture dependent launches in CUDA graphs.
  device.dependent_launch = device.sm >= 90 && driver >= 12040;
  return device;
}

struct Call {
  const Device& device;
  void* const* tensors;  // the program's leaves in order, then its results; dense
  i64 batch;
  unsigned char* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
};

// Memory handed out piece by piece, each aligned to 256 bytes.
struct Pieces {
  size_t bytes = 0;
  size_t take(i64 wanted) {
    const size_t offset = bytes;
    bytes += (size_t(wanted) + 255) / 256 * 256;
    return offset;
  }
};

inline i64 divide_up(i64 a, i64 b) {
  return (a + b - 1) / b;
}

// A tensor with its strides over [batch, rows, groups, features].
inline Tensor bind(void* data, i64 batch, i64 rows, i64 groups, i64 features) {
  return {data, {batch, rows, groups, features}};
}

struct Grid {
  i64 blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
  unsigned cluster = 0;  // blocks of a cluster; 0: none
};

inline void launch(const Call& call, const void* kernel, const Grid& grid, void** arguments) {
  if (grid.blocks <= 0) return;
  if (grid.blocks > 0x7fffffff) throw std::runtime_error("the batch takes more blocks than 2^31");
  const dim3 blocks(unsigned(grid.blocks)), threads{unsigned(grid.threads)};
#if CUDART_VERSION >= 11080
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (call.device.dependent_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = grid.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = call.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launching a kernel");
#else
  check(cudaLaunchKernel(kernel, blocks, threads, arguments, grid.shared_bytes, call.stream),
        "launching a kernel");
#endif
}

// Launches kernel(arguments...), converted to the types of its parameters.
template <class... Parameters, class... Arguments>
void launch(const Call& call, void (*kernel)(Parameters...), i64 blocks, int threads,
            Arguments... arguments) {
  std::tuple<Parameters...> values{static_cast<Parameters>(arguments)...};
  std::apply(
      [&](auto&... value) {
        void* addresses[] = {const_cast<void*>(static_cast<const void*>(&value))...};
        launch(call, reinterpret_cast<const void*>(kernel), Grid{blocks, threads}, addresses);
      },
      values);
}

// Runs the body of an exported function; nullptr, or why it failed.
template <class Body>
const char* guarded(Body&& body) {
  static thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace ingot::standalone
