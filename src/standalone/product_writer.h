// The product sweeps of a standalone file.
#pragma once

#include <vector>

#include "codegen/product_epilogue.h"
#include "product/hopper/launch.h"
#include "standalone/amalgamate.h"
#include "standalone/binding.h"

namespace ingot::standalone {

// What the products of a file share.
struct ProductTables {
  std::vector<hopper::SplitStep> packings;
  std::vector<std::string> shapes;  // texts without their names: tiles, and which is for what size

  // What the file calls them.
  std::string name_of(const hopper::SplitStep& step);
  std::string name_of(const std::string& shape);
  std::string text() const;
};

struct ProductText {
  ProductEpilogue epilogue;
  std::string kernels;  // the epilogue's functor and the kernels
  std::string by_tile;  // the kernels, as elements of an array
  std::string plan;     // an expression over `batch` and that array, by the name `{}`
};

// Throws Error (INGOT_UNSUPPORTED) where only the library has a kernel for the sweep.
ProductText write_product(const Binding& binding, int sweep, Amalgamation& headers,
                          ProductTables& tables);

}  // namespace ingot::standalone
