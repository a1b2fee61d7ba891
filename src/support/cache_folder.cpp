#include "support/cache_folder.h"

#include <cstdlib>

namespace ingot {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

std::string default_cache_folder() {
  if (const std::string given = variable("INGOT_CACHE_DIR"); !given.empty()) return given;
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/ingot";
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/ingot";
  return "";
}

}  // namespace ingot
