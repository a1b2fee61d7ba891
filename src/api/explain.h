// What was done and why (docs/explain-format.md).
#pragma once

#include <nlohmann/json.hpp>

#include "api/program.h"

namespace ingot::abi {

nlohmann::json explain(Program& program, int64_t batch);

}  // namespace ingot::abi
