// fp16 and bf16, one element at a time.
#pragma once

#include <stdint.h>

namespace ingot::cpu {

#include "cpu/half.inc"

}  // namespace ingot::cpu
