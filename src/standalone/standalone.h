// Programs as one CUDA source that needs neither Ingot nor its library: the headers of kernels/
// that they use, each once, the generated kernels, and host functions that launch them as src/cuda
// does.
//
// For a program NAME the source exports, in namespace ingot::standalone,
//   void run_NAME(void* const* tensors, long long batch,
//                 const std::function<void*(size_t)>& allocate, void* stream)
// on the current device; it throws std::runtime_error. tensors: the graph's leaves, then its
// results, dense and aligned to 16 bytes. allocate gives the workspace, aligned to 256 bytes, which
// the launches on the stream need. It is compiled with -DINGOT_HOPPER where compute_90a is
// among the architectures.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace ingot::standalone {

struct Request {
  const Plan* plan = nullptr;
  std::string name;  // "training"
  // Of each leaf, over the graph's axes; those of a dense tensor in the axes' order where empty.
  std::vector<std::array<int64_t, kAxes>> leaf_strides;
  std::optional<int64_t> batch = {};  // the only size that it will be called with
  // Of a product of leaves whose batch is the only one: what a call gives for `batch` is then how
  // much it contracts, whatever the graph says: a multiple of eight, up to this.
  std::optional<int64_t> contracted = {};
};

// {"common": headers and what all programs use, "programs": [{"name", "kernels": their names in
// launch order, "source": to be compiled behind "common", alone or with other programs'}]}.
// Throws Error (INGOT_UNSUPPORTED) naming the sweep that needs the library.
nlohmann::json write_source(std::span<const Request> requests);

}  // namespace ingot::standalone
