// Elements of any dtype in the caller's memory, read and written as doubles.
#pragma once

#include <cstdint>

#include "ingot/ingot.h"

namespace ingot {

// Bytes of an element; 0 where `dtype` is no ingot_dtype.
int64_t element_size(int32_t dtype);

// data: first element; index: in elements. dtype must be an ingot_dtype.
double load_element(const void* data, int32_t dtype, int64_t index);
// Rounds to nearest even; to i64 and bool as C converts (NaN and what does not fit give INT64_MIN).
void store_element(void* data, int32_t dtype, int64_t index, double value);

}  // namespace ingot
