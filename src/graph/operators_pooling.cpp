#include "graph/operator_arguments.h"

namespace ingot {

const std::vector<Operator>& pooling_operators() {
  static const std::vector<Operator> rows = {};
  return rows;
}

}  // namespace ingot
