// Our own portable product.
#pragma once

#include "cpu/product/provider.h"

namespace ingot::cpu {

// Takes every dtype and shape where `last_resort`; else only calls at which it was measured faster
// than the libraries.
std::shared_ptr<const ProductProvider> own_product(const Isa& isa, bool last_resort);

}  // namespace ingot::cpu
