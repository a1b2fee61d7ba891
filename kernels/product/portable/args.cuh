// What the host passes to the portable product beside ProductArgs. Shared by host and device.
#pragma once

namespace ingot::portable {

struct PackedOperands {
  const void *w, *x;  // the packed operands of product/split.cuh
};

}  // namespace ingot::portable
