// What a call of a program binds (docs/signature-format.md).
#pragma once

#include <nlohmann/json.hpp>

#include "api/program.h"

namespace ingot::abi {

nlohmann::json signature(const Program& program);

}  // namespace ingot::abi
