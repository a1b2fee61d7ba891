// JSON from outside.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace ingot {

// Lists and objects within one another. Values are copied, compared and written by recursion: what
// nests deeper could take more stack than there is.
inline constexpr int kMostJsonDepth = 64;

// `what` names the text in messages ("the graph"). Throws Error where it is not JSON, or nests
// deeper than kMostJsonDepth.
nlohmann::json parse_json(std::string_view text, std::string_view what);

// A value for a message: its first characters, whatever bytes they are.
std::string shown(const nlohmann::json& value);

}  // namespace ingot
