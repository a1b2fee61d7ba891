// The two families of Ingot's own product kernels (kernels/product/hopper and
// kernels/product/portable), and all that differs between them outside of the kernels.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cuda/driver.h"
#include "product/portable/args.cuh"
#include "program/launch_program.h"

namespace ingot::cuda {

enum class ProductFamily : uint8_t {
  none,
  hopper,   // wgmma and TMA: compute capability 9.0
  portable  // mma.sync and cp.async: 8.0 and up
};

// The family that serves a GPU, as far as `capabilities` (ProgramOptions) leaves it:
// "hopper_product" and "portable_product" turn them off, and `"portable_product": true` asks for
// the second where the library would be chosen. `why`, if not NULL, says why there is none.
ProductFamily product_family(int sm, const nlohmann::json& capabilities,
                             std::string* why = nullptr);

// For explain().
const char* name_of(ProductFamily family, hopper::Element element,
                    hopper::Scheme scheme = hopper::Scheme::split);

// How a product of such operands is made under a precision policy: products that differ here have
// nothing in common that could be measured once.
std::string scheme_of(ProductFamily family, hopper::Element element, Precision precision);

hopper::ProductPlan plan_own_product(ProductFamily family, const hopper::ProductShape& shape,
                                     const Target& target);
// Numbers of samples that between them are served by every kernel that any number is served by.
std::vector<int64_t> representative_samples(ProductFamily family, const hopper::ProductShape& shape,
                                            const Target& target);

// Where the operands of one launch are.
struct ProductOperands {
  Address x, w, y, x_packed, w_packed;
};

// Adds what a product kernel takes before its ProductArgs: tensor maps, or the addresses
// themselves.
void add_operands(const hopper::ProductPlan& plan, const ProductOperands& operands,
                  Arguments& arguments);

}  // namespace ingot::cuda
