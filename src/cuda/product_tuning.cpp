#include "cuda/product_tuning.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <bit>
#include <optional>

#include "codegen/embedded_kernels.h"
#include "plan/cost.h"
#include "product/hopper/candidates.h"
#include "support/error.h"
#include "support/json.h"
#include "support/log.h"
#include "support/private_files.h"

namespace ingot::cuda {
namespace {

using hopper::ProductPlan;
using hopper::ProductShape;

// Of all kernel text that a product is made of.
uint64_t kernel_hash() {
  static const uint64_t hash = [] {
    uint64_t h = 0;
    for (const EmbeddedKernel& header : embedded_kernels()) {
      if (header.path.starts_with("sweeps/")) continue;
      h = XXH3_64bits_withSeed(header.text.data(), header.text.size(), h);
    }
    return h;
  }();
  return hash;
}

constexpr uint64_t kMostBytes = uint64_t{64} << 20;

// null where it is damaged.
nlohmann::json parsed(const std::string& text) {
  try {
    return parse_json(text, "the file");
  } catch (const Error&) {
    return nullptr;
  }
}

std::map<std::string, std::string> read_file(const std::string& path) {
  std::map<std::string, std::string> choices;
  std::string why;
  const std::optional<std::string> text = read_private_file(path, kMostBytes, &why);
  if (!why.empty()) warn_once(fmt::format("{} is not used: {}", path, why));
  const nlohmann::json content = text ? parsed(*text) : nlohmann::json();
  if (!content.is_object() || content.value("ingot_tuned_products", nlohmann::json()) != 1) {
    return choices;
  }
  const auto products = content.find("products");
  if (products == content.end() || !products->is_object()) return choices;
  for (const auto& [key, entry] : products->items()) {
    if (!entry.is_object()) continue;
    const auto choice = entry.find("choice");
    if (choice != entry.end() && choice->is_string()) choices[key] = choice->get<std::string>();
  }
  return choices;
}

ProductPlan library_plan(const ProductShape& shape, const char* reason) {
  ProductPlan plan;
  plan.reason = reason;
  plan.library_us = hopper::estimate_library(shape);
  plan.library_faster = true;
  return plan;
}

double elements_of(const ProductShape& shape) {
  return static_cast<double>(shape.batches) * static_cast<double>(shape.m) *
         static_cast<double>(shape.n);
}

// Of sweeps.
constexpr double kBytesPerMicrosecond = 3.85e6;

// Microseconds of the kernels that do what an epilogue would have done: launches, and reading and
// writing the result once more.
double behind_library_us(const ProductShape& shape, size_t kernels) {
  // A low guess beside TF32, where ours is to be faster for certain.
  const double launch = shape.scheme == hopper::Scheme::scaled ? 2 : 3;
  const double bytes = 2.0 * size_of(shape.element) * elements_of(shape);
  return static_cast<double>(kernels) * (launch + bytes / kBytesPerMicrosecond);
}

// By how much longer reading matrices takes an epilogue than a sweep: each thread reads what lies
// beside its accumulators, in pieces of 16 bytes, while nothing multiplies. (H100, bf16, ten
// shapes: 1.3 to 1.5 MB a microsecond.)
double reading_us(const ProductShape& shape, double bytes) {
  constexpr double kByEpilogue = 1.4e6;
  return bytes * elements_of(shape) * (1 / kByEpilogue - 1 / kBytesPerMicrosecond);
}

// Whether an epilogue may take longer to read matrices than a kernel behind a library's product,
// which finds the product's result in the L2 cache if that is small.
bool reads_longer(const ProductShape& shape, const ProductTuning::EpilogueCost& epilogue) {
  constexpr double kKeptBytes = 32e6;
  const bool halves = shape.element != hopper::Element::f32;
  return halves && epilogue.bytes_read > 0 &&
         elements_of(shape) * static_cast<double>(size_of(shape.element)) <= kKeptBytes;
}

// What arithmetic adds to a kernel in whose epilogue nothing multiplies: eight warps a
// multiprocessor reach this part of its rate. (GELU's derivative behind 6272×768→3072, with a
// column's sum: 96 µs more than the product; H200.)
double epilogue_us(const ProductShape& shape, double flops, const Target& target) {
  constexpr double kOfFullRate = 0.4;
  return 1e6 * elements_of(shape) * flops / (kOfFullRate * scalar_rate(target));
}

std::string layout_of(const hopper::OperandShape& operand, int64_t k) {
  if (operand.k_stride != 1) return "by rows";
  return operand.vector_rows(k) ? "by k" : "by k, unaligned";
}

}  // namespace

ProductTuning::ProductTuning(const ProgramOptions& options, const Target& target, std::string file)
    : target_(target), precision_(options.precision), file_(std::move(file)) {
  for (const auto& [key, name] : options.product_choices.items()) {
    asked_[key] = name.get<std::string>();
  }
  if (!file_.empty()) measured_ = read_file(file_);
}

int64_t ProductTuning::bucket(int64_t samples) {
  if (samples <= 8) return 8;
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(samples - 1)));
  const int64_t step = int64_t{1} << (bits - 3);
  return (samples + step - 1) / step * step;
}

std::string ProductTuning::key(ProductFamily family, const ProductShape& shape,
                               int statistics) const {
  const bool stores_rows = shape.y_aligned && shape.y_stride % 4 == 0;
  const std::string batch = shape.batches == 1 ? "" : fmt::format("{} of ", bucket(shape.batches));
  return fmt::format("{} sm_{} {} | kernels {:016x} | {} | {}m {} k {} n {} | x {}, w {}, {}{}",
                     target_.name, target_.sm,
                     family == ProductFamily::hopper ? "hopper" : "portable", kernel_hash(),
                     scheme_of(family, shape.element, precision_), batch, bucket(shape.m), shape.k,
                     shape.n, layout_of(shape.x, shape.k), layout_of(shape.w, shape.k),
                     !shape.stores_result ? "not stored"
                     : stores_rows        ? "stored"
                                          : "stored unaligned",
                     statistics == 0 ? "" : fmt::format(", {} statistics", statistics));
}

std::vector<std::string> ProductTuning::candidates(ProductFamily family,
                                                   const ProductShape& shape) const {
  std::vector<std::string> names;
  if (family == ProductFamily::hopper) {
    for (const hopper::TileChoice& c :
         hopper::candidate_choices(shape, hopper::limits_of(target_.units))) {
      names.push_back(hopper::name_of(c));
    }
  } else {
    names.push_back(plan_own_product(family, shape, target_).config);
  }
  names.emplace_back(kLibrary);
  return names;
}

ProductTuning::Choice ProductTuning::choose(ProductFamily family, const ProductShape& shape,
                                            const EpilogueCost& epilogue) const {
  const std::string found_key = key(family, shape, epilogue.statistics);
  Choice choice;
  for (const auto& [choices, by] : {std::pair{&asked_, "given"}, std::pair{&measured_, "tuned"}}) {
    const auto found = choices->find(found_key);
    if (found == choices->end()) continue;
    if (found->second == kEstimated) break;
    choice.name = found->second;
    choice.by = by;
    if (choice.name == kLibrary) {
      choice.plan = library_plan(shape, "measured: the library is faster here");
      return choice;
    }
    if (family != ProductFamily::hopper) break;
    choice.plan = hopper::plan_named(shape, choice.name, hopper::limits_of(target_.units));
    // A neighbour in the bucket may not have it.
    if (choice.plan.variant != hopper::Variant::unsupported) return choice;
  }
  choice.plan = plan_own_product(family, shape, target_);
  choice.by = "estimated";
  const double library = choice.plan.library_us + behind_library_us(shape, epilogue.kernels_behind);
  // The library's TF32 and its 16 bits are as fast as ours but for the epilogue; its fp32 is not.
  const bool scaled = choice.plan.scheme == hopper::Scheme::scaled;
  const bool reads = reads_longer(shape, epilogue);
  double own = choice.plan.estimated_us;
  if (scaled) own += epilogue_us(shape, epilogue.flops, target_);
  if (reads) own += reading_us(shape, epilogue.bytes_read);
  const bool is_near = (scaled || reads) && choice.plan.library_us > 0;
  if ((choice.plan.library_faster || is_near) && library < own) {
    choice.name = kLibrary;
    choice.plan = library_plan(shape, "estimated: the library is faster at this size");
    return choice;
  }
  choice.name = choice.plan.config;
  if (family == ProductFamily::hopper) {
    if (!choice.plan.sliced.kernel.empty()) {
      choice.name += fmt::format(" slices {}", choice.plan.slices);
    }
    choice.name += fmt::format(" raster {}", choice.plan.raster_group);
  }
  return choice;
}

std::vector<int64_t> ProductTuning::samples_with_choice(ProductFamily family, ProductShape shape,
                                                        int statistics) const {
  std::vector<int64_t> samples;
  if (asked_.empty() && measured_.empty()) return samples;
  constexpr int64_t kMost = int64_t{1} << 24;
  for (shape.m = 8; shape.m <= kMost; shape.m = bucket(shape.m + 1)) {
    const std::string at = key(family, shape, statistics);
    if (asked_.contains(at) || measured_.contains(at)) samples.push_back(shape.m);
  }
  return samples;
}

}  // namespace ingot::cuda
