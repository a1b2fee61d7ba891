// The product sweeps of a standalone file.
#pragma once

#include <map>

#include "codegen/product_epilogue.h"
#include "standalone/amalgamate.h"
#include "standalone/binding.h"

namespace ingot::standalone {

struct ProductText {
  ProductEpilogue epilogue;
  std::string kernels;   // the epilogue's functor, the kernels, and the function `describe`
  std::string describe;  // name of a function Product(i64 batch)
  std::map<std::string, std::string> splits;  // packing functions and their launch bounds
};

// Throws Error (INGOT_UNSUPPORTED) where only the library has a kernel for the sweep.
ProductText write_product(const Binding& binding, int sweep, Amalgamation& headers);

// Kernels of packing functions, given with their launch bounds, and their table.
std::string write_splits(const std::map<std::string, std::string>& functions);

}  // namespace ingot::standalone
