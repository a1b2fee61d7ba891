// Numbers that are none, for tests of what becomes of them.
#pragma once

#include <limits>

namespace ingot {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace ingot
