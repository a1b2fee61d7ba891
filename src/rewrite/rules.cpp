#include "rewrite/rules.h"

namespace ingot {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = {
      common_subexpressions(),  constant_folding(),    neutral_operands(),
      merge_constants(),        monotone_reductions(), shift_invariance(),
      fold_scale_into_affine(), sum_of_linear(),       within_samples_first(),
  };
  return all;
}

}  // namespace ingot
