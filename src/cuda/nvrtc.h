// CUDA's run-time compiler, loaded when the first kernel is compiled.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ingot::cuda {

struct NvrtcInfo {
  bool available = false;
  int major = 0, minor = 0;
  std::vector<int> architectures;  // that it can compile for: 90 is sm_90
  std::string path, why;           // why it is not available
};
const NvrtcInfo& nvrtc_info();

// The architecture to compile a GPU's code for: "sm_90a", or "compute_…" where this NVRTC is too
// old to know the GPU (the driver then compiles the rest when it loads the code).
std::string nvrtc_architecture(int sm);

struct Compilation {
  std::string code;  // a cubin, or PTX for a compute_ architecture
  std::string log;   // warnings, and what --ptxas-options=-v says
};
// Compiles one translation unit; headers are (path, text). Throws Error: INGOT_UNAVAILABLE where
// there is no NVRTC, INGOT_FAILED with the compiler's messages otherwise. Needs no GPU.
Compilation nvrtc_compile(const std::string& name, const std::string& source,
                          const std::vector<std::pair<std::string, std::string>>& headers,
                          const std::vector<std::string>& options);

}  // namespace ingot::cuda
