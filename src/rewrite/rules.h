// The rules, one file each.
#pragma once

#include "rewrite/rewrite.h"

namespace ingot {

const Rule& common_subexpressions();
const Rule& constant_folding();
const Rule& neutral_operands();
const Rule& merge_constants();
const Rule& monotone_reductions();
const Rule& shift_invariance();
const Rule& fold_scale_into_affine();
const Rule& sum_of_linear();
const Rule& within_samples_first();

}  // namespace ingot
