// The product that the host process registered; see provider.h for set_host_product.
#pragma once

#include "cpu/product/provider.h"

namespace ingot::cpu {

// nullptr where none is registered.
std::shared_ptr<const ProductProvider> host_product();

}  // namespace ingot::cpu
