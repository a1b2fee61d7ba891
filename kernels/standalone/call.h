// Host side of a standalone file: how a call launches kernels, and its workspace. Written into the
// file before what libingot generates (src/standalone).
#pragma once

#include <algorithm>
#include <functional>
#include <tuple>

#include "launch/runtime.h"
#include "sweeps/tensor.cuh"

namespace ingot::standalone {

using Allocate = std::function<void*(size_t)>;  // memory aligned to 256 bytes

// Pieces of a call's workspace, each aligned to 256 bytes.
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

// Shared memory that a kernel makes use of if it gets it: as much of it as the device gives a
// block.
inline size_t most_shared(size_t bytes) {
  return std::min(bytes, size_t(attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin)));
}

// Launches kernel(arguments...), converted to the types of its parameters, on a stream.
class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
    constexpr int kCapturesDependent = 12040;  // the first driver whose CUDA graphs hold such
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "asking for the driver's version");
    dependent_ =
        driver >= kCapturesDependent && attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9;
  }

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), i64 blocks, int threads,
                  Arguments... arguments) const {
    (*this)(kernel, Grid{blocks, threads}, arguments...);
  }
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), const Grid& grid, Arguments... arguments) const {
    std::tuple<Parameters...> values{static_cast<Parameters>(arguments)...};
    const auto all = [&](auto&... value) {
      (*this)(reinterpret_cast<const void*>(kernel), grid, {&value...});
    };
    std::apply(all, values);
  }
  void operator()(const void* kernel, const Grid& grid, std::initializer_list<void*> values) const {
    ingot::launch(kernel, grid, const_cast<void**>(values.begin()), stream_, dependent_);
  }

 private:
  cudaStream_t stream_;
  bool dependent_ = false;
};

}  // namespace ingot::standalone
