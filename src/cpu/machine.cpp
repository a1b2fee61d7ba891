// What the host offers: the target that plans are made for, and the CPU's part of doctor().
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "backend/executable.h"
#include "cpu/product/amx/support.h"
#include "cpu/product/provider.h"
#include "support/threads.h"

namespace ingot {
namespace {

// Orders of magnitude for the plan's predictions; what a run takes is measured, not assumed.
constexpr double kClock = 3e9;
constexpr double kBandwidthPerCore = 1.2e10;

double flops_per_cycle(cpu::Level level) {
  switch (level) {
    case cpu::Level::avx512:
      return 64;
    case cpu::Level::avx2:
      return 32;
    default:
      return 8;
  }
}

}  // namespace

Target cpu_target(const ProgramOptions& options) {
  const cpu::Isa isa = cpu::detect_isa(options.capabilities);
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  Target target;
  target.device = Target::Device::cpu;
  target.units = thread_count();
  target.product_flops = 0.7 * kClock * flops_per_cycle(isa.level) * target.units;
  target.bandwidth = kBandwidthPerCore * std::min(target.units, 16);
  target.cache_bytes = cache > 0 ? static_cast<double>(cache) : 8e6;
  target.launch_seconds = 5e-6;
  target.name = cpu::processor_name();
  return target;
}

nlohmann::json describe_cpu_machine() {
  const cpu::Isa isa = cpu::detect_isa(nlohmann::json::object());
  const cpu::amx::Support tiles = cpu::amx::support(isa);
  nlohmann::json products = nlohmann::json::array();
  for (const auto& provider : cpu::product_providers(isa)) {
    // One product may stand in the list twice, for unlike shapes.
    const std::string name(provider->name());
    if (std::find(products.begin(), products.end(), name) == products.end()) {
      products.push_back(name);
    }
  }
  return {{"name", cpu::processor_name()},
          {"instructions", name_of(isa.level)},
          {"amx",
           {{"tile", isa.amx_tile},
            {"bf16", isa.amx_bf16},
            {"fp16", isa.amx_fp16},
            {"state", tiles.state},
            {"used", cpu::use_of_amx(isa)}}},
          {"threads", thread_count()},
          {"thread_runtime", thread_runtime_name()},
          {"products", products}};
}

}  // namespace ingot
