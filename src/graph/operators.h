// High-level operators, each defined once by the IR's few nodes, in numerically stable form. The
// graph format's names resolve here (after the pointwise table), so do the builder APIs.
#pragma once

#include <map>
#include <string>
#include <variant>

#include "graph/builder.h"

namespace ingot {

// Arguments by position or name (kNoValue where absent) and attributes as in the graph format.
using Attribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;
struct OperatorCall {
  std::vector<ValueId> args;
  std::map<std::string, Attribute> attributes;
};
using OperatorDefinition = ValueId (*)(GraphBuilder&, const OperatorCall&);

// nullptr where there is no operator of that name.
OperatorDefinition find_operator(std::string_view name);
std::vector<std::string_view> operator_names();

}  // namespace ingot
