#include "graph/operators.h"

#include <algorithm>

#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

using Registry = std::map<std::string_view, const Operator*>;

const Registry& registry() {
  static const Registry all = [] {
    Registry map;
    for (const auto* family :
         {&primitive_operators(), &activation_operators(), &reduction_operators(),
          &normalisation_operators(), &pooling_operators()}) {
      for (const Operator& row : *family) map.emplace(row.name, &row);
    }
    return map;
  }();
  return all;
}

void check_call(const Operator& row, const OperatorCall& call) {
  if (call.args.size() < row.min_args || call.args.size() > row.max_args) {
    const std::string expected = row.min_args == row.max_args
                                     ? fmt::format("{}", row.min_args)
                                     : fmt::format("{} to {}", row.min_args, row.max_args);
    fail(INGOT_INVALID_ARGUMENT, "takes {} arguments, got {}", expected, call.args.size());
  }
  for (const auto& [name, value] : call.attributes) {
    if (std::find(row.attributes.begin(), row.attributes.end(), name) == row.attributes.end()) {
      fail(INGOT_INVALID_ARGUMENT, "has no attribute '{}'; it knows [{}]", name,
           fmt::join(row.attributes, ", "));
    }
  }
}

}  // namespace

const Operator* find_operator(std::string_view name) {
  const auto found = registry().find(name);
  return found == registry().end() ? nullptr : found->second;
}

std::vector<std::string_view> operator_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, row] : registry()) names.push_back(name);
  return names;
}

ValueId apply_operator(GraphBuilder& builder, std::string_view name, const OperatorCall& call) {
  PointwiseOp op;
  if (find_pointwise(name, &op)) {
    if (!call.attributes.empty()) {
      fail(INGOT_INVALID_ARGUMENT, "has no attribute '{}'", call.attributes.begin()->first);
    }
    return builder.pointwise(op, call.args);
  }
  const Operator* row = find_operator(name);
  if (row == nullptr) fail(INGOT_UNSUPPORTED, "there is no operator '{}'", name);
  check_call(*row, call);
  return row->define(builder, call);
}

const Attribute* OperatorArguments::find(std::string_view attribute) const {
  const auto found = call_->attributes.find(std::string(attribute));
  return found == call_->attributes.end() ? nullptr : &found->second;
}

Expression OperatorArguments::operator[](size_t i) const {
  const std::optional<Expression> value = optional(i);
  if (!value) fail(INGOT_INVALID_ARGUMENT, "argument {} is absent", i);
  return *value;
}

std::optional<Expression> OperatorArguments::optional(size_t i) const {
  if (i >= call_->args.size() || call_->args[i] == kNoValue) return std::nullopt;
  const ValueId id = call_->args[i];
  if (id < 0 || static_cast<size_t>(id) >= builder_->graph().nodes.size()) {
    fail(INGOT_INVALID_ARGUMENT, "argument {} is not an earlier value", id);
  }
  return Expression(*builder_, id);
}

std::optional<double> OperatorArguments::number(std::string_view attribute) const {
  const Attribute* value = find(attribute);
  if (value == nullptr) return std::nullopt;
  if (const auto* real = std::get_if<double>(value)) return *real;
  if (const auto* integer = std::get_if<int64_t>(value)) return static_cast<double>(*integer);
  fail(INGOT_INVALID_ARGUMENT, "attribute '{}' must be a number", attribute);
}

double OperatorArguments::number(std::string_view attribute, double fallback) const {
  return number(attribute).value_or(fallback);
}

int64_t OperatorArguments::integer(std::string_view attribute) const {
  const Attribute* value = find(attribute);
  const auto* integer = value == nullptr ? nullptr : std::get_if<int64_t>(value);
  if (integer == nullptr) {
    fail(INGOT_INVALID_ARGUMENT, "needs the attribute '{}', an integer", attribute);
  }
  return *integer;
}

bool OperatorArguments::boolean(std::string_view attribute, bool fallback) const {
  const Attribute* value = find(attribute);
  if (value == nullptr) return fallback;
  const auto* flag = std::get_if<bool>(value);
  if (flag == nullptr) {
    fail(INGOT_INVALID_ARGUMENT, "attribute '{}' must be true or false", attribute);
  }
  return *flag;
}

std::string OperatorArguments::text(std::string_view attribute, std::string fallback) const {
  const Attribute* value = find(attribute);
  if (value == nullptr) return fallback;
  const auto* text = std::get_if<std::string>(value);
  if (text == nullptr) fail(INGOT_INVALID_ARGUMENT, "attribute '{}' must be a text", attribute);
  return *text;
}

AxisMask OperatorArguments::axes(AxisMask fallback) const {
  const Attribute* value = find("axes");
  if (value == nullptr) return fallback;
  const auto* list = std::get_if<std::vector<int64_t>>(value);
  if (list == nullptr || list->empty()) {
    fail(INGOT_INVALID_ARGUMENT, "attribute 'axes' must list axes by name");
  }
  AxisMask mask = 0;
  for (const int64_t axis : *list) {
    if (axis < 0 || axis >= kAxes) fail(INGOT_INVALID_ARGUMENT, "there is no axis {}", axis);
    mask = static_cast<AxisMask>(mask | axis_bit(static_cast<Axis>(axis)));
  }
  return mask;
}

Shape OperatorArguments::shape() const {
  const Attribute* value = find("shape");
  const auto* list = value == nullptr ? nullptr : std::get_if<std::vector<int64_t>>(value);
  if (list == nullptr || list->size() != kAxes) {
    fail(INGOT_INVALID_ARGUMENT, "needs the attribute 'shape': [batch, rows, groups, features]");
  }
  if ((*list)[0] != kSymbolicBatch && (*list)[0] != 1) {
    fail(INGOT_INVALID_ARGUMENT, "the batch extent of a shape is \"B\" or 1, not {}", (*list)[0]);
  }
  return {(*list)[0] == kSymbolicBatch, (*list)[1], (*list)[2], (*list)[3]};
}

}  // namespace ingot
