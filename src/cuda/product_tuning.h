// Which configuration computes a product: one that the program's options ask for, one that was
// measured on this GPU before (`ingot tune`), or the cost model's choice.
//
// What was measured is a JSON file that the user's programs share:
//   {"ingot_tuned_products": 1, "products": {KEY: {"choice": NAME, ...}, ...}}
// KEY is all that a measurement holds for: the GPU, the text of the kernels, how the product is
// made (its operands' type, and its scheme), its extents (samples by bucket), layouts and epilogue.
// The file is read when a program is made, so that its choices stay as they are while it lives; a
// damaged one, or one that others may have written (support/private_files.h), counts as absent.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backend/executable.h"
#include "cuda/product_family.h"

namespace ingot::cuda {

class ProductTuning {
 public:
  // Names in the place of a configuration.
  static constexpr const char* kLibrary = "library";
  static constexpr const char* kEstimated = "estimated";

  // `file`: where measurements are kept; empty for none.
  ProductTuning(const ProgramOptions& options, const Target& target, std::string file);

  struct Choice {
    hopper::ProductPlan plan;
    std::string name;              // of the configuration, or kLibrary
    const char* by = "estimated";  // or "tuned", "given" (by the options)
  };
  struct EpilogueCost {
    int statistics = 0;         // partial ones that it emits
    size_t kernels_behind = 0;  // that the library's product would need to do the same
    double flops = 0;           // of an element of the result (plan/cost.h)
    double bytes_read = 0;      // of matrices, for an element of the result
  };
  Choice choose(ProductFamily family, const hopper::ProductShape& shape,
                const EpilogueCost& epilogue) const;

  std::string key(ProductFamily family, const hopper::ProductShape& shape, int statistics) const;
  // Names of all that can be measured for it.
  std::vector<std::string> candidates(ProductFamily family,
                                      const hopper::ProductShape& shape) const;
  // Numbers of samples at which a product like `shape` has a choice of its own.
  std::vector<int64_t> samples_with_choice(ProductFamily family, hopper::ProductShape shape,
                                           int statistics) const;

  const std::string& file() const { return file_; }

  // The largest number of samples that shares its measurements with `samples`: a step is at most a
  // quarter of what it leads to.
  static int64_t bucket(int64_t samples);

 private:
  const Target target_;
  const Precision precision_;
  const std::string file_;
  std::map<std::string, std::string> asked_, measured_;
};

}  // namespace ingot::cuda
