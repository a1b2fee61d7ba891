// The instruction sets that this processor has of those that the CPU's code is compiled for.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "cpu/isa.h"

namespace ingot::cpu {

inline std::vector<Level> levels() {
  const Level widest = detect_isa(nlohmann::json::object()).level;
  std::vector<Level> found;
  for (const Level level : {Level::baseline, Level::avx2, Level::avx512}) {
    if (level <= widest) found.push_back(level);
  }
  return found;
}

}  // namespace ingot::cpu
