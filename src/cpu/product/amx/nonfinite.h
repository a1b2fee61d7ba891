// Rows and columns of a product that meet an Inf or a NaN, recomputed in fp32 arithmetic.
#pragma once

#include <vector>

#include "cpu/product/provider.h"

namespace ingot::cpu::amx {

// rows of a and columns of b, in ascending order. False, having done nothing, where they are so
// many that the whole product is better done elsewhere.
bool recompute(const Isa& isa, const ProductCall& call, const std::vector<int64_t>& rows,
               const std::vector<int64_t>& columns);

}  // namespace ingot::cpu::amx
