#include "support/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support/error.h"

namespace ingot {
namespace {

// The deepest nesting of brackets outside of texts. Where the text is not JSON, the parser stops at
// the first mistake, and agrees with this up to there.
int depth_of(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

std::string shortened(std::string text, size_t most) {
  if (text.size() > most) text.replace(most - 3, std::string::npos, "...");
  return text;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view what) {
  if (depth_of(text) > kMostJsonDepth) {
    fail(INGOT_INVALID_ARGUMENT, "{} nests lists and objects more than {} deep", what,
         kMostJsonDepth);
  }
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail(INGOT_INVALID_ARGUMENT, "{} is not valid JSON: {}", what, shortened(error.what(), 200));
  }
}

std::string shown(const nlohmann::json& value) {
  return shortened(value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), 80);
}

}  // namespace ingot
