// Stands in at link time for a backend that this build lacks: each definition gives way to the
// backend's own.
#include "backend/executable.h"
#include "support/error.h"

#define INGOT_UNLESS_DEFINED __attribute__((weak))

namespace ingot {

INGOT_UNLESS_DEFINED Target cuda_target(const ProgramOptions& options) {
  Target target;
  target.device = Target::Device::cuda;
  target.sm = options.sm;
  target.product_flops = 2.5e14;
  target.bandwidth = 4e12;
  target.launch_seconds = 3e-6;
  target.units = 132;
  target.name = fmt::format("CUDA sm_{}", options.sm);
  return target;
}

INGOT_UNLESS_DEFINED std::unique_ptr<Executable> make_cuda_executable(Plan, const ProgramOptions&) {
  fail(INGOT_UNAVAILABLE, "this build of Ingot has no CUDA backend");
}

INGOT_UNLESS_DEFINED nlohmann::json describe_cuda_machine() {
  return nullptr;
}

}  // namespace ingot
