#include "cuda/product_units.h"

#include <fmt/format.h>

#include "codegen/type_names.h"

namespace ingot::cuda {

Unit split_unit(const hopper::SplitStep& step) {
  const std::string name = "product_" + identifier(step.kernel);
  const std::string resident = step.resident > 1 ? fmt::format(", {}", step.resident) : "";
  const std::string text = fmt::format(
      "// The packing of an operand into the fp16 values that a product kernel reads.\n"
      "#include \"{}\"\n\n"
      "extern \"C\" __global__ void __launch_bounds__({}{}) {}(\n"
      "    const __grid_constant__ ingot::SplitArgs args) {{\n  ingot::{}(args);\n}}\n",
      step.header, step.threads, resident, name, step.kernel);
  return {{name, text}, {name}, step.shared_bytes};
}

Unit sliced_unit(const hopper::ProductPlan& plan) {
  const hopper::SlicedStep& step = plan.sliced;
  const std::string name = "product_slices_" + identifier(plan.config);
  const std::string text = fmt::format(
      "// The products of slices of K, which the product kernel adds.\n"
      "#include \"{}\"\n\n"
      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}(\n"
      "    const __grid_constant__ ingot::TensorMap w,\n"
      "    const __grid_constant__ ingot::TensorMap x,\n"
      "    const __grid_constant__ ingot::hopper::ProductArgs args) {{\n"
      "  using namespace ingot::hopper;\n"
      "  {}<{}>(w, x, args);\n}}\n",
      plan.header, step.threads, step.resident, name, step.kernel, plan.config);
  return {{name, text}, {name}, step.shared_bytes};
}

}  // namespace ingot::cuda
