// Checked reading of an operator's arguments and attributes.
#pragma once

#include <optional>
#include <string_view>

#include "graph/expression.h"
#include "graph/operators.h"

namespace ingot {

class OperatorArguments {
 public:
  OperatorArguments(GraphBuilder& builder, const OperatorCall& call)
      : builder_(&builder), call_(&call) {}

  // The value of argument i, which must be present.
  Expression operator[](size_t i) const;
  std::optional<Expression> optional(size_t i) const;

  std::optional<double> number(std::string_view attribute) const;
  double number(std::string_view attribute, double fallback) const;
  // Throws Error where absent.
  int64_t integer(std::string_view attribute) const;
  bool boolean(std::string_view attribute, bool fallback) const;
  std::string text(std::string_view attribute, std::string fallback) const;
  AxisMask axes(AxisMask fallback) const;
  Shape shape() const;

 private:
  const Attribute* find(std::string_view attribute) const;

  GraphBuilder* builder_;
  const OperatorCall* call_;
};

// Rows of each family (one file each).
const std::vector<Operator>& primitive_operators();
const std::vector<Operator>& activation_operators();
const std::vector<Operator>& reduction_operators();
const std::vector<Operator>& normalisation_operators();
const std::vector<Operator>& pooling_operators();

}  // namespace ingot
