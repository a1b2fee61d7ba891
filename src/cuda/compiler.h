// From a kernel's source to machine code: the cache on disk, else NVRTC.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cuda/cubin_cache.h"

namespace ingot::cuda {

struct CompileRequest {
  std::string name;
  std::string text;
};

// The headers that a source includes, directly or not, of those embedded in the library.
std::vector<std::pair<std::string, std::string>> headers_of(const std::string& source);
// Options of every kernel, for an architecture such as "sm_90a".
std::vector<std::string> compile_options(const std::string& architecture);
// Everything that the machine code depends on.
std::string cache_key(const CompileRequest& request, const std::string& architecture);

// Machine code of each request for a compute capability, compiled side by side where absent from
// the cache. Throws Error.
std::vector<std::string> compile_all(const std::vector<CompileRequest>& requests, int sm,
                                     const CubinCache& cache);

}  // namespace ingot::cuda
