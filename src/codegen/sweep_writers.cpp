#include "codegen/sweep_writers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace ingot {

namespace {

// False where identifier() of the two cannot be equal, seen at their ends: without making one.
bool may_end_alike(std::string_view a, std::string_view b) {
  const auto is_kept = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t i = 1; i <= std::min(a.size(), b.size()); ++i) {
    const char from_a = a[a.size() - i], from_b = b[b.size() - i];
    if (is_kept(from_a) != is_kept(from_b)) return false;
    if (!is_kept(from_a)) return true;
    if (from_a != from_b) return false;
  }
  return true;
}

}  // namespace

std::string kernel_name(const Plan& plan, int sweep) {
  const auto base = [&](int index) {
    const std::string name = identifier(plan.sweeps[static_cast<size_t>(index)].name);
    return name.starts_with("fused") ? name : "fused_" + name;
  };
  const std::string own = base(sweep);
  int earlier = 0;  // sweeps of the same name
  for (int i = 0; i < sweep; ++i) {
    const std::string& name = plan.sweeps[static_cast<size_t>(i)].name;
    if (may_end_alike(name, own) && base(i) == own) ++earlier;
  }
  return earlier == 0 ? own : fmt::format("{}_{}", own, earlier + 1);
}

std::string functor_name(const std::string& kernel) {
  std::string result;
  bool upper = true;
  for (const char c : kernel) {
    if (c == '_') {
      upper = true;
      continue;
    }
    result.push_back(upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c);
    upper = false;
  }
  return result;
}

std::string field_declaration(const SweepContext& context, ValueId value, bool lanes) {
  return fmt::format("    {} {}{};\n", context.type_of(value), context.name_of(value),
                     lanes ? "[V]" : "");
}

std::string reduction_type(const SweepContext& context, const std::vector<ValueId>& reductions) {
  for (const ValueId reduction : reductions) {
    if (context.type_of(context.node(reduction).args[0]) != "float") return "double";
  }
  return "float";
}

Reference SampleBody::shared(ValueId value) {
  if (std::find(shared_.begin(), shared_.end(), value) == shared_.end()) shared_.push_back(value);
  const bool lanes = context_.has_lanes(value);
  return {fmt::format("shared.{}{}", context_.name_of(value), lanes ? "[i]" : ""),
          context_.type_of(value)};
}

Reference SampleBody::held(ValueId value) {
  if (std::find(held_.begin(), held_.end(), value) == held_.end()) held_.push_back(value);
  const bool lanes = context_.has_lanes(value);
  return {fmt::format("held.{}{}", context_.name_of(value), lanes ? "[i]" : ""),
          context_.type_of(value)};
}

size_t SampleBody::lanes_of(const std::vector<ValueId>& values) const {
  const auto has_lanes = [this](ValueId value) { return context_.has_lanes(value); };
  return static_cast<size_t>(std::count_if(values.begin(), values.end(), has_lanes));
}

FunctionWriter SampleBody::writer() {
  return FunctionWriter(context_, [this](ValueId value) -> std::optional<Reference> {
    if (context_.counts(value)) return std::nullopt;
    if (context_.space().batched && !context_.seen(value).batched) return shared(value);
    if (!context_.computes(value)) return held(value);
    return std::nullopt;
  });
}

std::string SampleBody::declarations() {
  std::string text =
      "  // What depends on the element alone, computed once for all samples.\n"
      "  template <int V>\n  struct Feature {\n";
  FunctionWriter feature(context_, nullptr), load(context_, nullptr);
  for (const ValueId value : shared_) {
    text += field_declaration(context_, value, feature.has_lanes(value));
    feature.assign("shared." + context_.name_of(value), value);
  }
  text += "  };\n  template <int V>\n  struct Element {\n";
  for (const ValueId value : held_) {
    text += field_declaration(context_, value, load.has_lanes(value));
    load.assign("held." + context_.name_of(value), value);
  }
  text += "  };\n\n";
  text += fmt::format(
      "  template <int V>\n"
      "  INGOT_D static void feature(const Operands& operands, {} e, Feature<V>& shared) {{\n",
      context_.index_type());
  text += feature.text(4) + "  }\n";
  text += fmt::format(
      "  template <int V>\n"
      "  INGOT_D static void load(const Operands& operands, i64 b, {} e, Element<V>& held) {{\n",
      context_.index_type());
  return text + load.text(4) + "  }\n";
}

std::string translation_unit(const UnitParts& parts) {
  std::string text = parts.comment;
  for (const std::string& include : parts.includes)
    text += fmt::format("#include \"{}\"\n", include);
  text += fmt::format("\nnamespace ingot {{\n\nstruct {} {{\n{}}};\n\n}}  // namespace ingot\n",
                      parts.functor, parts.members);
  for (const std::string& kernel : parts.kernels) text += "\n" + kernel;
  return text;
}

std::string kernel_text(const std::string& name, const std::string& functor, int threads,
                        const std::string& parameters, const std::string& call, int64_t cluster,
                        int at_once) {
  return fmt::format(
      "extern \"C\" __global__ void __launch_bounds__({}{}){} {}(\n"
      "    const __grid_constant__ ingot::{}::Operands operands, {}) {{\n"
      "  ingot::{};\n}}\n",
      threads, at_once > 0 ? fmt::format(", {}", at_once) : "",
      cluster > 1 ? fmt::format(" INGOT_CLUSTER({})", cluster) : "", name, functor, parameters,
      call);
}

std::string sweep_comment(const SweepContext& context, const std::string& kernel) {
  const Sweep& sweep = context.sweep();
  std::string text =
      fmt::format("// {}: the {} sweep \"{}\" of {}, over {}.\n", kernel, name_of(sweep.kind),
                  sweep.name, context.graph().name, to_string(sweep.space));
  for (const std::string& reason : sweep.reasons) text += "//   " + reason + "\n";
  return text;
}

}  // namespace ingot
