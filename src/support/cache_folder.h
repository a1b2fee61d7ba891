// Where this user's processes keep what they found out or compiled.
#pragma once

#include <string>

namespace ingot {

// $INGOT_CACHE_DIR, else $XDG_CACHE_HOME/ingot, else ~/.cache/ingot; empty where none is known.
std::string default_cache_folder();

}  // namespace ingot
