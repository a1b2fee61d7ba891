// Tensor maps where the CUDA runtime is used: standalone files and bench/hopper.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "common/ptx.cuh"
#include "launch/tensor_map.h"

namespace ingot::hopper {

// By the driver's own function, so that nothing is linked beside the runtime.
inline TensorMap encode_map(const TensorMapSpec& spec, void* base) {
  static const EncodeTiled<TensorMap> encode = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<EncodeTiled<TensorMap>>(driver ? dlsym(driver, "cuTensorMapEncodeTiled")
                                                           : nullptr);
  }();
  if (!encode) throw std::runtime_error("the driver knows no tensor maps: it is older than 12.0");
  TensorMap map = {};
  if (const int status = encode_map(&map, encode, spec, base); status != 0) {
    throw std::runtime_error("describing a matrix to the copy engine failed with CUDA error " +
                             std::to_string(status));
  }
  return map;
}

}  // namespace ingot::hopper
