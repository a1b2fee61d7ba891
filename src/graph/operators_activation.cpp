#include "graph/operator_arguments.h"

namespace ingot {

const std::vector<Operator>& activation_operators() {
  static const std::vector<Operator> rows = {};
  return rows;
}

}  // namespace ingot
