// How far a candidate is from fp64 truth.
#pragma once

#include <cstdint>

#include "ingot/ingot.h"

namespace ingot {

struct ErrorMeasures {
  double frobenius = 0;            // ‖candidate − truth‖ / ‖truth‖
  double worst_row = 0;            // the largest such quotient of a row
  double largest = 0;              // max |candidate − truth| / max |truth|
  int64_t mismatches = 0;          // |candidate − truth| > 1e-4 + 1e-4·|truth|
  int64_t non_finite_differs = 0;  // NaN, Inf or −Inf in one and not alike in the other
};

// truth, candidate: rows × columns, contiguous, on the host; dtype: the candidate's ingot_dtype.
// Positions that are not finite in both alike are left out. Where they differ, they count as
// mismatches and the relative errors (of their row, and of the whole) are infinite: no average may
// hide them. An error against a truth of zero norm is infinite, no error is 0.
// Throws Error (INGOT_INVALID_ARGUMENT) on negative extents, absent data or an unknown dtype.
ErrorMeasures measure_error(const double* truth, const void* candidate, int32_t dtype, int64_t rows,
                            int64_t columns);

}  // namespace ingot
