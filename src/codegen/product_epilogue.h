// What rides on a matrix product: the epilogue that Ingot's own kernels run on accumulators, and
// the same work as sweeps of their own behind a library product.
#pragma once

#include <optional>

#include "codegen/kernel_source.h"

namespace ingot {

// The functor of kernels/product/hopper/epilogue.cuh for a product sweep.
struct ProductEpilogue {
  std::string kernel;  // name of the product kernel
  std::string functor, functor_text;
  std::vector<KernelOperand> operands;  // its Params, in order
  ValueId stored = kNoValue;            // the m × n value that is written, or none
  int moments = 0;                      // partial statistics that it emits
  unsigned sums = 0;                    // bit i: the i-th is a plain sum, not moments
  std::optional<KernelSource> merge;    // merges them and runs the sweep's tail
};
// nullopt where the sweep asks for more than the functor can do (reasons in `why`): other monoids
// than moments and sums, several m × n results, results of another type than the product.
std::optional<ProductEpilogue> write_epilogue(const Plan& plan, int sweep, std::string* why);

// A product kernel's template and what a launch of it looks like.
struct ProductTemplate {
  std::string header, function, config;
  int threads = 0;
  bool tensor_maps = false;  // it takes its operands as tensor maps; else as addresses
  int resident = 1;          // blocks that a multiprocessor is to hold
};
// The translation unit of a product kernel.
std::string product_kernel_text(const ProductEpilogue& epilogue, const ProductTemplate& product);

// Body, statistics and tail of a product sweep as a sweep that reads the product; empty where there
// is nothing to do.
std::vector<KernelSource> write_behind_product(const Plan& plan, int sweep);

}  // namespace ingot
