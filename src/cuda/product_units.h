// The kernels that run before a product: the packing of its operands, the products of slices of K.
#pragma once

#include "cuda/modules.h"
#include "product/portable/args.cuh"

namespace ingot::cuda {

Unit split_unit(const hopper::SplitStep& step);

// Of a plan that slices K.
Unit sliced_unit(const hopper::ProductPlan& plan);

}  // namespace ingot::cuda
