#include "cuda/product_family.h"

#include <array>

#include "product/portable/launch.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

using hopper::ProductPlan;
using hopper::TensorMapSpec;
using hopper::Variant;

// cuda.h's numbers.
constexpr int kMapSwizzle128 = 3, kMapPromote256 = 3;

// Three fp16 products take the time of one in fp32 where tensor cores are three times as fast. By
// the datasheets they are 8 to 16 times as fast in these; in the others (8.6, 8.9, 12.x) 4 times at
// best, and only 2 in cards for games.
bool has_fast_tensor_cores(int sm) {
  return sm == 80 || sm == 87 || sm == 90 || sm == 100 || sm == 103;
}

CUtensorMap encode_map(const TensorMapSpec& spec, void* base) {
  CUtensorMap map{};
  const uint64_t extents[2] = {spec.columns, spec.rows}, strides[1] = {spec.row_bytes};
  const uint32_t box[2] = {spec.box_columns, spec.box_rows}, steps[2] = {1, 1};
  check(
      driver().cuTensorMapEncodeTiled(&map, hopper::tensor_map_type(spec.element), 2, base, extents,
                                      strides, box, steps, 0, kMapSwizzle128, kMapPromote256, 0),
      "describing a matrix to the copy engine");
  return map;
}

bool same_matrix(const TensorMapSpec& a, const TensorMapSpec& b) {
  return a.element == b.element && a.columns == b.columns && a.rows == b.rows &&
         a.row_bytes == b.row_bytes && a.box_columns == b.box_columns && a.box_rows == b.box_rows;
}

// A map follows from its arguments alone, and calls in a row mostly describe the same matrices:
// each thread keeps those that it encoded last.
const CUtensorMap& map_of(const TensorMapSpec& spec, void* base) {
  struct Encoded {
    TensorMapSpec spec;
    void* base = nullptr;
    CUtensorMap map;
  };
  constexpr size_t kKept = 16;
  static thread_local std::array<Encoded, kKept> kept;
  const uint64_t mixed = (reinterpret_cast<uintptr_t>(base) >> 8) * 0x9e3779b97f4a7c15u;
  Encoded& encoded = kept[mixed >> 60];
  if (encoded.base != base || !same_matrix(encoded.spec, spec)) {
    encoded.base = nullptr;
    encoded.map = encode_map(spec, base);
    encoded.spec = spec;
    encoded.base = base;
  }
  return encoded.map;
}

void* source_of(const TensorMapSpec& spec, const ProductOperands& operands) {
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
  return nullptr;
}

}  // namespace

ProductFamily product_family(int sm, const nlohmann::json& capabilities, std::string* why) {
  if (sm == 90 && capabilities.value("hopper_product", true)) return ProductFamily::hopper;
  if (sm >= 80 && capabilities.value("portable_product", has_fast_tensor_cores(sm))) {
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

const char* name_of(ProductFamily family, hopper::Element element) {
  switch (family) {
    case ProductFamily::hopper:
      if (element == hopper::Element::f16) return "Ingot's product for Hopper (fp16)";
      if (element == hopper::Element::bf16) return "Ingot's product for Hopper (bf16)";
      return "Ingot's fp32 product for Hopper (fp16 halves)";
    case ProductFamily::portable:
      return "Ingot's fp32 product for compute capability 8.0 and up (fp16 halves)";
    case ProductFamily::none:
      break;
  }
  return "none";
}

hopper::DeviceLimits limits_of(const Target& target) {
  return {target.units, target.units / 2};
}

ProductPlan plan_own_product(ProductFamily family, const hopper::ProductShape& shape,
                             const Target& target) {
  if (family == ProductFamily::portable) {
    return portable::plan_product(shape, static_cast<size_t>(target.shared_bytes),
                                  portable::rates_of(target.sm, target.units));
  }
  return hopper::plan_product(shape, limits_of(target));
}

std::vector<int64_t> representative_samples(ProductFamily family, const hopper::ProductShape& shape,
                                            const Target& target) {
  if (family == ProductFamily::portable) return {};  // one kernel whatever the samples
  return hopper::representative_samples(shape, limits_of(target));
}

OperandArguments::OperandArguments(const ProductPlan& plan, const ProductOperands& operands)
    : maps_(plan.variant != Variant::portable), packed_{operands.w_packed, operands.x_packed} {
  if (!maps_) return;
  w_ = map_of(plan.w_map, source_of(plan.w_map, operands));
  x_ = map_of(plan.x_map, source_of(plan.x_map, operands));
  if (plan.tma_store) y_ = map_of(plan.y_map, operands.y);
}

int OperandArguments::write_to(void** arguments) {
  if (!maps_) {
    arguments[0] = &packed_;
    return 1;
  }
  arguments[0] = &w_;
  arguments[1] = &x_;
  arguments[2] = &y_;
  return 3;
}

}  // namespace ingot::cuda
