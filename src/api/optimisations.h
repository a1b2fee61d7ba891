// What was done, as sentences for people: only what the plan and the rewrites really did.
#pragma once

#include <nlohmann/json.hpp>

#include "api/program.h"

namespace ingot::abi {

// List of {what, identity_or_reason, where}.
nlohmann::json optimisations(const Program& program, int64_t batch);

}  // namespace ingot::abi
