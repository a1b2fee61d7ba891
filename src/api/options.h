// Options of a program, as the JSON object that ingot_program_create() takes.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "backend/executable.h"

namespace ingot::abi {

// Empty text stands for {}. Throws Error (INGOT_INVALID_ARGUMENT) naming the key.
ProgramOptions parse_options(std::string_view json);
nlohmann::json to_json(const ProgramOptions& options);

}  // namespace ingot::abi
