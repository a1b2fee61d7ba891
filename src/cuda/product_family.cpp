#include "cuda/product_family.h"

#include "product/portable/launch.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

using hopper::ProductPlan;
using hopper::TensorMapSpec;
using hopper::Variant;

Address source_of(const TensorMapSpec& spec, const ProductOperands& operands) {
  switch (spec.source) {
    case TensorMapSpec::Source::w:
      return operands.w;
    case TensorMapSpec::Source::x:
      return operands.x;
    case TensorMapSpec::Source::y:
      return operands.y;
    case TensorMapSpec::Source::x_packed:
      return operands.x_packed;
    case TensorMapSpec::Source::w_packed:
      return operands.w_packed;
  }
  return {};
}

}  // namespace

ProductFamily product_family(int sm, const nlohmann::json& capabilities, std::string* why) {
  const ArchSpec& arch = arch_of(sm);
  if (arch.hopper_kernels && capabilities.value("hopper_product", true)) {
    return ProductFamily::hopper;
  }
  if (sm >= kOldestSm && capabilities.value("portable_product", arch.fast_tensor_cores)) {
    return ProductFamily::portable;
  }
  if (why == nullptr) return ProductFamily::none;
  if (capabilities.contains("portable_product")) {
    *why = "the portable_product capability is off";
  } else {
    *why = fmt::format(
        "Ingot's own product is for GPUs whose tensor cores are many times as fast as their fp32 "
        "units; those of compute capability {}.{} are not",
        sm / 10, sm % 10);
  }
  return ProductFamily::none;
}

const char* name_of(ProductFamily family, hopper::Element element, hopper::Scheme scheme) {
  switch (family) {
    case ProductFamily::hopper:
      if (element == hopper::Element::f16) return "Ingot's product for Hopper (fp16)";
      if (element == hopper::Element::bf16) return "Ingot's product for Hopper (bf16)";
      if (scheme == hopper::Scheme::scaled) return "Ingot's tf32 product for Hopper (scaled fp16)";
      if (scheme == hopper::Scheme::high) {
        return "Ingot's high product for Hopper (fp16, cross terms in FP8)";
      }
      return "Ingot's fp32 product for Hopper (fp16 halves)";
    case ProductFamily::portable:
      return "Ingot's fp32 product for compute capability 8.0 and up (fp16 halves)";
    case ProductFamily::none:
      break;
  }
  return "none";
}

std::string scheme_of(ProductFamily family, hopper::Element element, Precision precision) {
  if (element == hopper::Element::f16) return "f16";
  if (element == hopper::Element::bf16) return "bf16";
  const bool halves = precision == Precision::fp32 ||
                      (precision == Precision::high && family != ProductFamily::hopper);
  return "f32 by " + (halves ? std::string("fp16 halves") : std::string(name_of(precision)));
}

ProductPlan plan_own_product(ProductFamily family, const hopper::ProductShape& shape,
                             const Target& target) {
  if (family == ProductFamily::portable) {
    return portable::plan_product(shape, static_cast<size_t>(target.shared_bytes),
                                  portable::rates_of(arch_of(target.sm), target.units));
  }
  return hopper::plan_product(shape, hopper::limits_of(target.units));
}

std::vector<int64_t> representative_samples(ProductFamily family, const hopper::ProductShape& shape,
                                            const Target& target) {
  if (family == ProductFamily::portable) return {};  // one kernel whatever the samples
  return hopper::representative_samples(shape, hopper::limits_of(target.units));
}

void add_operands(const ProductPlan& plan, const ProductOperands& operands, Arguments& arguments) {
  if (plan.variant == Variant::portable) {
    const size_t start = arguments.add(portable::PackedOperands{});
    arguments.set(start + offsetof(portable::PackedOperands, w), operands.w_packed);
    arguments.set(start + offsetof(portable::PackedOperands, x), operands.x_packed);
    return;
  }
  // The kernel has the addresses of slices' sums from its ProductArgs.
  if (!plan.sliced.kernel.empty()) {
    for (int map = 0; map < 3; ++map) arguments.add_zeros(sizeof(CUtensorMap));
    return;
  }
  arguments.add_map(plan.w_map, source_of(plan.w_map, operands));
  arguments.add_map(plan.x_map, source_of(plan.x_map, operands));
  if (plan.tma_store) {
    arguments.add_map(plan.y_map, operands.y);
  } else {
    arguments.add_zeros(sizeof(CUtensorMap));
  }
}

}  // namespace ingot::cuda
