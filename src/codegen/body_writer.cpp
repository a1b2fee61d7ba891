#include "codegen/body_writer.h"

#include <fmt/format.h>

#include <algorithm>

#include "support/error.h"

namespace ingot {
namespace {

// The wider of two compute types.
std::string promoted(const std::string& a, const std::string& b) {
  if (a == "double" || b == "double") return "double";
  if (a == "float" || b == "float") return "float";
  return "i64";
}

// An explicit cast rounds to the dtype even where the value stays in a register.
std::string cast_expression(const Reference& from, DType to) {
  if (to == DType::f16 || to == DType::bf16) {
    return fmt::format("widen(narrow<{}>({}))", storage_type(to), from.text);
  }
  if (to == DType::boolean) return fmt::format("{} != 0 ? 1.0f : 0.0f", from.text);
  return fmt::format("static_cast<{}>({})", compute_type(to), from.text);
}

}  // namespace

FunctionWriter::FunctionWriter(SweepContext& context, Delegate delegate, Lanes lanes, AxisMask mask)
    : context_(context),
      delegate_(std::move(delegate)),
      lanes_kind_(lanes),
      mask_(mask),
      coordinates_(context.coordinates()) {}

bool FunctionWriter::has_lanes(ValueId value) const {
  return lanes_kind_ == Lanes::vector && context_.has_lanes(value);
}

// Each coordinate is declared before its first use; e runs over the axes of the mask, in order.
std::string FunctionWriter::coordinate(Axis axis) {
  if (axis == kBatch) return "b";
  if (const auto given = coordinates_.find(axis); given != coordinates_.end()) return given->second;
  const Shape& space = context_.space();
  int64_t inner = 1, outer = 1;
  for (const Axis other : {kRows, kGroups, kFeatures}) {
    if (!(mask_ & axis_bit(other))) continue;
    if (other > axis) inner *= space.extent(other, 1);
    if (other < axis) outer *= space.extent(other, 1);
  }
  return position(index_, inner, space.extent(axis, 1), outer);
}

std::string FunctionWriter::index_arguments(const Shape& seen) {
  std::vector<std::string> parts;
  parts.push_back(seen.batched && (mask_ & axis_bit(kBatch)) ? "b" : "0");
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    const bool varies = seen.extent(axis, 1) > 1 && (mask_ & axis_bit(axis));
    parts.push_back(varies ? coordinate(axis) : "0");
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string FunctionWriter::flat_index(const Shape& extents) {
  std::string text;
  int64_t stride = 1;
  for (const Axis axis : {kFeatures, kGroups, kRows}) {
    const int64_t extent = extents.extent(axis, 1);
    if (extent == 1 || !(mask_ & axis_bit(axis))) continue;
    const std::string term =
        stride == 1 ? coordinate(axis) : fmt::format("({}) * {}", coordinate(axis), stride);
    text = text.empty() ? term : term + " + " + text;
    stride *= extent;
  }
  return text.empty() ? "0" : text;
}

std::string FunctionWriter::address(ValueId value, bool written) {
  const bool vector = has_lanes(value) && !context_.is_of_rows(value);
  const std::string field = context_.operand(value, written, vector);
  const bool in_vectors = vector && context_.addresses_vectors();
  return fmt::format("operands.{}.{}{}>({})", field, in_vectors ? "vector_at<" : "at<",
                     storage_type(context_.dtype_in_memory(value)) + (in_vectors ? ", V" : ""),
                     index_arguments(context_.seen(value)));
}

std::string FunctionWriter::access(const char* function, ValueId value, bool written) {
  const std::string address = this->address(value, written);
  if (!context_.is_apart(value, written)) return fmt::format("ingot::{}({}, ", function, address);
  return fmt::format("ingot::{}_apart({}, operands.{}.strides[{}], ", function, address,
                     context_.operand(value, written, true), static_cast<int>(kFeatures));
}

// What the row of lane i has.
std::string FunctionWriter::row_value(ValueId value) {
  index_ = "(e + i)";
  const std::string address = this->address(value);
  index_ = "e";
  return fmt::format("widen(*{})", address);
}

Reference FunctionWriter::load(ValueId value) {
  const std::string name = context_.name_of(value);
  const std::string type = context_.type_of(value);
  if (context_.counts(value)) {
    // One conversion a vector: up to 2^24 sums of whole numbers are exact.
    head_.push_back(fmt::format("const float {} = static_cast<float>(static_cast<u32>({}));", name,
                                coordinate(kFeatures)));
    return {has_lanes(value) ? fmt::format("({} + i)", name) : name, type};
  }
  if (context_.is_held_as_read(value)) {
    head_.push_back(fmt::format("held.{} = load_pack<{}, V>({});", name,
                                storage_type(context_.dtype_in_memory(value)), address(value)));
    return {context_.held_as_read(value), type};
  }
  if (has_lanes(value)) {
    head_.push_back(fmt::format("{} {}[V];", type, name));
    if (context_.is_of_rows(value)) {
      lanes_.push_back(fmt::format("{}[i] = {};", name, row_value(value)));
    } else {
      head_.push_back(access("load", value, false) + name + ");");
    }
    return {name + "[i]", type};
  }
  head_.push_back(fmt::format("const {} {} = widen(*{});", type, name, address(value)));
  return {name, type};
}

Reference FunctionWriter::converted(ValueId id, const std::string& type) {
  if (context_.is_constant(context_.resolve(id))) {
    return {literal(context_.node(context_.resolve(id)).constant, type), type};
  }
  const Reference reference = value(id);
  if (reference.type == type) return reference;
  return {fmt::format("static_cast<{}>({})", type, reference.text), type};
}

// A value by a function of what is several operators away, where all between is computed for it.
std::optional<std::string> FunctionWriter::composition(ValueId id) {
  const auto found = context_.functions().composition(id);
  const auto is_given = [&](ValueId skipped) {
    return !context_.computes(skipped) || known_.contains(skipped) ||
           (delegate_ && delegate_(skipped));
  };
  if (!found || std::any_of(found->skipped.begin(), found->skipped.end(), is_given)) {
    return std::nullopt;
  }
  return fmt::format(fmt::runtime(found->text), converted(found->argument, "float").text);
}

Reference FunctionWriter::compute(ValueId id) {
  const Node& node = context_.node(id);
  if (node.kind != NodeKind::pointwise) {
    fail(INGOT_UNSUPPORTED, "{}: the CUDA backend cannot compute {} within sweep {}", node.source,
         context_.name_of(id), context_.sweep().name);
  }
  const std::string own = compute_type(node.dtype);
  std::string expression, type = own;
  if (node.op == PointwiseOp::cast_) {
    expression = cast_expression(value(node.args[0]), node.dtype);
  } else if (auto composed = composition(id)) {
    expression = std::move(*composed);
  } else {
    type = "i64";
    for (const ValueId arg : node.args) {
      const ValueId real = context_.resolve(arg);
      if (!context_.is_constant(real)) type = promoted(type, value(arg).type);
    }
    // All arguments constant, or a constant of a wider type than an integer can hold.
    if (own != "i64") type = promoted(type, own);
    std::vector<std::string> args;
    for (const ValueId arg : node.args) args.push_back(converted(arg, type).text);
    expression = context_.functions().expression(id, type, args);
    if (type != own) expression = fmt::format("static_cast<{}>({})", own, expression);
  }
  const std::string name = context_.name_of(id);
  const std::string where = node.name.empty() ? "" : "  // " + node.name;
  const std::string line = fmt::format("const {} {} = {};{}", own, name, expression, where);
  (has_lanes(id) ? lanes_ : head_).push_back(line);
  return {name, own};
}

Reference FunctionWriter::value(ValueId id) {
  const ValueId real = context_.resolve(id);
  if (const auto found = known_.find(real); found != known_.end()) return found->second;
  const Node& node = context_.node(real);
  Reference reference;
  if (node.kind == NodeKind::constant) {
    reference = {literal(node.constant, compute_type(node.dtype)), compute_type(node.dtype)};
  } else if (auto delegated = delegate_ ? delegate_(real) : std::nullopt) {
    reference = *delegated;
  } else {
    reference = context_.computes(real) ? compute(real) : load(real);
  }
  known_[real] = reference;
  return reference;
}

void FunctionWriter::assign(const std::string& target, ValueId id) {
  const Reference reference = value(id);
  if (has_lanes(id))
    lane_statement(fmt::format("{}[i] = {};", target, reference.text));
  else
    statement(fmt::format("{} = {};", target, reference.text));
}

// What a store may narrow instead of a value that is rounded to the tensor's 16-bit type already.
ValueId FunctionWriter::before_rounding(ValueId id) const {
  const Node& node = context_.node(id);
  const bool rounds = node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_ &&
                      size_of(node.dtype) == 2 && node.dtype == context_.dtype_in_memory(id);
  if (!rounds || !context_.computes(id) || known_.contains(id)) return id;
  const ValueId wide = context_.resolve(node.args[0]);
  return context_.type_of(wide) == "float" && has_lanes(wide) == has_lanes(id) ? wide : id;
}

void FunctionWriter::store(ValueId id) {
  const Shape& seen = context_.seen(id);
  const Reference reference = value(before_rounding(id));
  const bool lanes = has_lanes(id);
  // Where the value does not vary along an axis, its first element writes.
  std::vector<std::string> conditions;
  if (!seen.batched && context_.space().batched && (mask_ & axis_bit(kBatch))) {
    conditions.push_back("b == 0");
  }
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    if ((mask_ & axis_bit(axis)) && seen.extent(axis, 1) == 1 &&
        context_.space().extent(axis, 1) > 1) {
      conditions.push_back(coordinate(axis) + " == 0");
    }
  }
  const std::string when =
      conditions.empty() ? "" : fmt::format("if ({}) ", fmt::join(conditions, " && "));
  if (lanes) {
    const std::string out = context_.name_of(id) + "_stored";
    head_.push_back(fmt::format("{} {}[V];", reference.type, out));
    lanes_.push_back(fmt::format("{}[i] = {};", out, reference.text));
    const bool streams = context_.streams_results() && !context_.is_apart(id, true);
    const char* function = streams ? "store_streamed" : "store";
    end_.push_back(fmt::format("{}{}{});", when, access(function, id, true), out));
  } else {
    end_.push_back(fmt::format("{}*{} = narrow<{}>({});", when, address(id, true),
                               storage_type(context_.dtype_in_memory(id)), reference.text));
  }
}

std::string FunctionWriter::text(int indent) const {
  const std::string pad(static_cast<size_t>(indent), ' ');
  std::string result;
  for (const std::string& line : head_) result += pad + line + "\n";
  if (!lanes_.empty()) {
    result += pad + "INGOT_UNROLL\n" + pad + "for (int i = 0; i < V; ++i) {\n";
    for (const std::string& line : lanes_) result += pad + "  " + line + "\n";
    result += pad + "}\n";
  }
  for (const std::string& line : end_) result += pad + line + "\n";
  return result;
}

}  // namespace ingot
