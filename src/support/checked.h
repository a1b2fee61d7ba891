// Sizes of memory that do not wrap around.
#pragma once

#include <cstddef>

#include "support/error.h"

namespace ingot {

[[noreturn]] inline void refuse_size() {
  fail(INGOT_INVALID_ARGUMENT, "this batch size takes more memory than 64-bit sizes can name");
}

inline size_t checked_product(size_t a, size_t b) {
  size_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) refuse_size();
  return result;
}

inline size_t checked_sum(size_t a, size_t b) {
  size_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) refuse_size();
  return result;
}

}  // namespace ingot
