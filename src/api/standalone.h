// ingot_standalone_source(): programs and options to the source that src/standalone writes.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "api/program.h"

namespace ingot::abi {

nlohmann::json standalone_source(std::span<const Program* const> programs,
                                 std::string_view options_json);

}  // namespace ingot::abi
