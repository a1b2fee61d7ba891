// A bias that a library adds to its product before it rounds and writes it: y = x · op(w) + b.
#pragma once

#include <optional>

#include "plan/plan.h"

namespace ingot {

struct ProductBias {
  ValueId sum = kNoValue;   // of the sweep's body: the product, and for each feature a number more
  ValueId bias = kNoValue;  // a load of the sweep: these numbers, perhaps in another dtype
};

// nullopt where something else reads the product itself, or the sum is none of a product and a row.
std::optional<ProductBias> product_bias(const Plan& plan, const Sweep& sweep);

// The plan, in which that sweep finds the sum where it would have found the product.
Plan with_sum_as_product(const Plan& plan, int sweep, const ProductBias& bias);

}  // namespace ingot
