// The rules, one file each.
#pragma once

#include "rewrite/rewrite.h"

namespace ingot {

const Rule& common_subexpressions();

}  // namespace ingot
