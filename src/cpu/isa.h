// Instruction sets that the host primitives are compiled for, and which of them this machine runs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace ingot::cpu {

enum class Level : int { baseline = 0, avx2 = 1, avx512 = 2 };
std::string_view name_of(Level level);

struct Isa {
  Level level = Level::baseline;  // the widest of the three that runs here
  bool intel = false;             // vendor: which library's product is fast depends on it
  bool amx_tile = false, amx_bf16 = false, amx_fp16 = false;  // by CPUID; see product/ for use
};

// What this machine offers, less the features that `masks` sets to false ({"avx512": false}).
Isa detect_isa(const nlohmann::json& masks);

std::string processor_name();

}  // namespace ingot::cpu
