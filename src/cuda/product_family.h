// The two families of Ingot's own product kernels (kernels/product/hopper and
// kernels/product/portable), and all that differs between them outside of the kernels.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cuda/driver.h"
#include "plan/plan.h"
#include "product/hopper/launch.h"
#include "product/portable/args.cuh"

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
const char* name_of(ProductFamily family, hopper::Element element);

hopper::DeviceLimits limits_of(const Target& target);
hopper::ProductPlan plan_own_product(ProductFamily family, const hopper::ProductShape& shape,
                                     const Target& target);
// Numbers of samples that between them are served by every kernel that any number is served by.
std::vector<int64_t> representative_samples(ProductFamily family, const hopper::ProductShape& shape,
                                            const Target& target);

// Where the operands of one launch are.
struct ProductOperands {
  void *x = nullptr, *w = nullptr, *y = nullptr;
  void *x_packed = nullptr, *w_packed = nullptr;
};

// What a product kernel takes before its ProductArgs: tensor maps, or the addresses themselves.
class OperandArguments {
 public:
  OperandArguments(const hopper::ProductPlan& plan, const ProductOperands& operands);
  OperandArguments(const OperandArguments&) = delete;
  // Writes pointers to them, for a launch while this object lives; returns how many.
  static constexpr int kMost = 3;
  int write_to(void** arguments);

 private:
  bool maps_;
  CUtensorMap w_{}, x_{}, y_{};
  portable::PackedOperands packed_;
};

}  // namespace ingot::cuda
