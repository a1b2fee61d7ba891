// oneDNN's fp32 product behind the product interface.
#pragma once

#include "cpu/product/provider.h"

namespace ingot::cpu {

// nullptr where the system has no oneDNN.
std::shared_ptr<const ProductProvider> onednn_product();

}  // namespace ingot::cpu
