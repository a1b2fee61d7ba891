#include "codegen/product_epilogue.h"

#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

constexpr size_t kMaxMoments = 2;  // kernels/product/hopper/args.cuh

// The product's rows are samples m = (batch, row), its columns features n. An element's index
// within its batch entry is e = row · N + n, whatever factoring the sweep sees. Divisions are of 32
// bits: they happen once an element.
class EpilogueWriter {
 public:
  EpilogueWriter(const Plan& plan, int sweep)
      : context_(plan, sweep), features_(plan.graph[context_.sweep().matmul].shape.features) {
    const Sweep& s = context_.sweep();
    rows_ = s.space.static_elements() / features_;
    states_ = shared_states(plan.graph, s, s.statistics);
    result_.kernel = kernel_name(plan, sweep);
    result_.functor = functor_name(result_.kernel);
  }

  // Why not, or empty.
  std::string obstacle() {
    const Sweep& s = context_.sweep();
    const bool batched = s.space.batched || rows_ > 1;
    const DType product = context_.node(s.matmul).dtype;
    for (const SharedState& state : states_) {
      if (state.monoid != MonoidKind::moments && state.monoid != MonoidKind::sum) {
        return "its statistics are neither moments nor sums";
      }
      if (state.axes != sample_axes()) return "its statistics do not run over all samples";
    }
    if (states_.size() > kMaxMoments) return "it has more than two statistics";
    for (const ValueId value : s.stores) {
      if (in_tail(value)) continue;
      if (result_.stored != kNoValue) return "it stores more than one value per element";
      if (context_.seen(value).static_elements() != s.space.static_elements() || !batched ||
          context_.seen(value).batched != s.space.batched) {
        return "it stores a value that is not one per element";
      }
      if (context_.dtype_in_memory(value) != product) {
        return fmt::format("its result is not {}, as the product is", name_of(product));
      }
      result_.stored = value;
    }
    if (product != DType::f32 && product != DType::f16 && product != DType::bf16) {
      return fmt::format("it is a product of {}", name_of(product));
    }
    return "";
  }

  ProductEpilogue write(const Plan& plan, int sweep) {
    result_.moments = static_cast<int>(states_.size());
    for (size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].monoid == MonoidKind::sum) result_.sums |= 1u << i;
    }
    const std::string apply = apply_text();
    std::string feature_fields, sample_fields;
    const std::string feature = level_text("feature", features_used_, &feature_fields);
    const std::string sample = level_text("sample", samples_used_, &sample_fields);
    result_.functor_text = fmt::format(
        "struct {} {{\n{}  using Params = Operands;\n"
        "  struct Feature {{\n{}  }};\n  struct Sample {{\n{}  }};\n"
        "  static constexpr int kMoments = {};\n  static constexpr u32 kSums = {};\n"
        "  static constexpr bool kStore = {};\n"
        "  static constexpr bool kReadsElements = {};\n\n"
        "  INGOT_D static void prefetch(const Params& operands, i64 m, i64 n) {{\n{}  }}\n"
        "  INGOT_D static Feature feature(const Params& operands, i64 n) {{\n"
        "{}    Feature feature;\n{}    return feature;\n  }}\n"
        "  INGOT_D static Sample sample(const Params& operands, i64 m) {{\n{}"
        "    Sample sample;\n{}    return sample;\n  }}\n"
        "  INGOT_D static float apply(const Params& operands, const Feature& feature,\n"
        "                             const Sample& sample, i64 m, i64 n, float product,\n"
        "                             float (&statistic)[{}]) {{\n{}{}  }}\n}};\n",
        result_.functor, context_.operands_struct(), feature_fields, sample_fields, result_.moments,
        result_.sums, result_.stored != kNoValue, !elements_used_.empty(), prefetch_text(),
        position("0", "n"), feature, position("m", "0"), sample, std::max(result_.moments, 1),
        position("m", "n"), apply);
    result_.operands = context_.operands();
    if (!states_.empty()) result_.merge = write_merge(plan, sweep);
    return std::move(result_);
  }

 private:
  // All axes above the features, the batch included.
  AxisMask sample_axes() const {
    AxisMask mask = context_.space().batched ? axis_bit(kBatch) : AxisMask{0};
    int64_t stride = 1;
    for (const Axis axis : {kFeatures, kGroups, kRows}) {
      const int64_t extent = context_.space().extent(axis, 1);
      if (extent > 1 && stride >= features_) mask = static_cast<AxisMask>(mask | axis_bit(axis));
      stride *= extent;
    }
    return mask;
  }

  AxisMask varying_axes(ValueId value) const {
    const Shape& seen = context_.seen(value);
    AxisMask mask = seen.batched ? axis_bit(kBatch) : AxisMask{0};
    for (const Axis axis : {kRows, kGroups, kFeatures}) {
      if (seen.extent(axis, 1) > 1) mask = static_cast<AxisMask>(mask | axis_bit(axis));
    }
    return mask;
  }

  bool in_tail(ValueId value) const {
    return contains(context_.sweep().tail, value) || contains(context_.sweep().statistics, value);
  }

  // Declares b, row and e of the sample `m` and the feature `n`, variables or "0".
  std::string position(const std::string& m, const char* n) const {
    if (rows_ == 1) {
      return fmt::format(
          "    [[maybe_unused]] const i64 b = {};\n"
          "    [[maybe_unused]] const u32 row = 0, e = u32({});\n",
          m, n);
    }
    const bool divides = m != "0";
    return fmt::format(
        "    [[maybe_unused]] const i64 b = {};\n"
        "    [[maybe_unused]] const u32 row = {}, e = row * {}u + u32({});\n",
        divides ? fmt::format("u32({}) / {}u", m, rows_) : m,
        divides ? fmt::format("u32({}) % {}u", m, rows_) : "0", features_, n);
  }

  FunctionWriter element_writer(FunctionWriter::Delegate delegate) {
    FunctionWriter writer(context_, std::move(delegate), FunctionWriter::Lanes::scalar);
    const Shape& space = context_.space();
    if (space.features == features_) {
      writer.give_coordinate(kFeatures, "n");
      if (space.groups == 1) writer.give_coordinate(kRows, "row");
      if (space.rows == 1) writer.give_coordinate(kGroups, "row");
    }
    return writer;
  }

  // Behind a product of one feature these, too, are one per sample, but no level above has them.
  std::vector<ValueId> behind_product() const {
    std::vector<ValueId> behind = {context_.sweep().matmul};
    for (const ValueId value : context_.sweep().body) {
      const std::vector<ValueId>& args = context_.node(value).args;
      const auto follows = [&](ValueId arg) { return contains(behind, arg); };
      if (std::any_of(args.begin(), args.end(), follows)) behind.push_back(value);
    }
    return behind;
  }

  Reference field(std::vector<ValueId>& used, const char* level, ValueId value) {
    if (!contains(used, value)) used.push_back(value);
    return {fmt::format("{}.{}", level, context_.name_of(value)), context_.type_of(value)};
  }

  std::string apply_text() {
    const std::vector<ValueId> behind = behind_product();
    FunctionWriter writer = element_writer([&](ValueId value) -> std::optional<Reference> {
      if (value == context_.sweep().matmul) return Reference{"product", "float"};
      if (context_.is_constant(value) || contains(behind, value)) return std::nullopt;
      const AxisMask varies = varying_axes(value);
      if ((varies & sample_axes()) == 0) return field(features_used_, "feature", value);
      if ((varies & ~sample_axes()) == 0) return field(samples_used_, "sample", value);
      if (!context_.computes(value)) elements_used_.push_back(value);
      return std::nullopt;
    });
    for (size_t i = 0; i < states_.size(); ++i) {
      writer.assign(fmt::format("statistic[{}]", i), states_[i].arg);
    }
    const std::string stored =
        result_.stored == kNoValue ? "0.0f" : writer.value(result_.stored).text;
    writer.statement(fmt::format("return {};", stored));
    return writer.text(4);
  }

  std::string prefetch_text() {
    if (elements_used_.empty()) return "";
    FunctionWriter writer = element_writer(nullptr);
    for (const ValueId value : elements_used_) {
      writer.statement(fmt::format("ptx::prefetch_line({});", writer.address(value)));
    }
    return position("m", "n") + writer.text(4);
  }

  std::string level_text(const std::string& level, const std::vector<ValueId>& used,
                         std::string* fields) {
    FunctionWriter writer = element_writer(nullptr);
    for (const ValueId value : used) {
      *fields += field_declaration(context_, value, false);
      writer.assign(fmt::format("{}.{}", level, context_.name_of(value)), value);
    }
    return writer.text(4);
  }

  SweepContext context_;
  int64_t features_, rows_ = 1;
  std::vector<SharedState> states_;
  std::vector<ValueId> features_used_, samples_used_;
  std::vector<ValueId> elements_used_;  // operands of one per element
  ProductEpilogue result_;
};

}  // namespace

std::optional<ProductEpilogue> write_epilogue(const Plan& plan, int sweep, std::string* why) {
  EpilogueWriter writer(plan, sweep);
  *why = writer.obstacle();
  if (!why->empty()) return std::nullopt;
  return writer.write(plan, sweep);
}

std::string product_kernel_text(const ProductEpilogue& epilogue, const ProductTemplate& product) {
  const std::string space = product.tensor_maps ? "hopper" : "portable";
  const std::string parameters =
      product.tensor_maps
          ? "    const __grid_constant__ ingot::TensorMap w,\n"
            "    const __grid_constant__ ingot::TensorMap x,\n"
            "    const __grid_constant__ ingot::TensorMap y,\n"
          : "    const __grid_constant__ ingot::portable::PackedOperands operands,\n";
  return fmt::format(
      "// {0}: a matrix product with everything behind it that needs no wait.\n"
      "#include \"common/pointwise.cuh\"\n#include \"{1}\"\n#include \"sweeps/tensor.cuh\"\n\n"
      "namespace ingot {{\n\n{2}\n}}  // namespace ingot\n\n"
      "extern \"C\" __global__ void __launch_bounds__({3}, {9}) {0}(\n{4}"
      "    const __grid_constant__ ingot::hopper::ProductArgs args,\n"
      "    const __grid_constant__ ingot::{5}::Params params) {{\n"
      "  using namespace ingot::{6};\n"
      "  {7}<{8}, ingot::{5}>({10}, args, params);\n}}\n",
      epilogue.kernel, product.header, epilogue.functor_text, product.threads, parameters,
      epilogue.functor, space, product.function, product.config, product.resident,
      product.tensor_maps ? "w, x, y" : "operands");
}

std::vector<KernelSource> write_behind_product(const Plan& plan, int sweep) {
  const Sweep& s = plan.sweeps[static_cast<size_t>(sweep)];
  if (!s.statistics.empty()) return {write_columns(plan, sweep)};
  const bool only_product =
      std::all_of(s.stores.begin(), s.stores.end(), [&](ValueId v) { return v == s.matmul; });
  if (only_product) return {};
  return {write_map(plan, sweep)};
}

}  // namespace ingot
