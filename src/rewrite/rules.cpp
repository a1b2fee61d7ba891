#include "rewrite/rules.h"

namespace ingot {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = {
      common_subexpressions(),
  };
  return all;
}

}  // namespace ingot
