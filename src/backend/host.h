// What the host process lends to the CPU backend.
#pragma once

#include <string>

#include "ingot/ingot.h"

namespace ingot {

// See ingot_set_host_threads and ingot_set_host_product.
void set_host_threads(void* handle, int threads);
namespace cpu {
void set_host_product(const std::string& name, ingot_product_fn fn, void* context);
}

}  // namespace ingot
