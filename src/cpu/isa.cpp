#include "cpu/isa.h"

#include <fstream>
#include <nlohmann/json.hpp>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ingot::cpu {
namespace {

std::string read_processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown processor";
}

}  // namespace

std::string processor_name() {
  static const std::string name = read_processor_name();
  return name;
}

std::string_view name_of(Level level) {
  switch (level) {
    case Level::avx512:
      return "avx512";
    case Level::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

Isa detect_isa(const nlohmann::json& masks) {
  const auto allowed = [&](const char* feature) {
    return !masks.is_object() || masks.value(feature, true);
  };
  Isa isa;
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks whether the system saves the wider registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && allowed("avx2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && allowed("avx512");
  isa.level = avx512 ? Level::avx512 : avx2 ? Level::avx2 : Level::baseline;
  isa.intel = __builtin_cpu_is("intel");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    isa.amx_tile = (d & (1u << 24)) != 0 && allowed("amx");
    isa.amx_bf16 = isa.amx_tile && (d & (1u << 22)) != 0;
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    isa.amx_fp16 = isa.amx_tile && (a & (1u << 21)) != 0 && allowed("amx_fp16");
  }
#else
  (void)allowed;
#endif
  return isa;
}

}  // namespace ingot::cpu
