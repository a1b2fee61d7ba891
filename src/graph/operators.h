// High-level operators, each defined once by the IR's few nodes, in numerically stable form. The
// graph format's names resolve here (after the pointwise table), so do the builder APIs.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "graph/builder.h"

namespace ingot {

// Arguments by position or name (kNoValue where absent) and attributes as in the graph format.
using Attribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;
struct OperatorCall {
  std::vector<ValueId> args;
  std::map<std::string, Attribute> attributes;
};
using OperatorDefinition = ValueId (*)(GraphBuilder&, const OperatorCall&);

// One row an operator: its name, how many arguments it takes, the attributes it knows, and what it
// means. Each family's file ends with its rows.
struct Operator {
  std::string_view name;
  size_t min_args, max_args;
  std::vector<std::string_view> attributes;
  OperatorDefinition define;
};

// The symbolic batch extent within the attribute `shape`.
inline constexpr int64_t kSymbolicBatch = -1;

// nullptr where there is no operator of that name.
const Operator* find_operator(std::string_view name);
std::vector<std::string_view> operator_names();
// Appends the nodes that the named operator (of the pointwise table, or of the rows above) stands
// for. Throws Error on unknown names and attributes, missing arguments and shapes that do not fit.
ValueId apply_operator(GraphBuilder& builder, std::string_view name, const OperatorCall& call);

}  // namespace ingot
