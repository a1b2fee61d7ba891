// What the host passes to the portable product beside ProductArgs. Shared by host and device.
#pragma once

#include "common/types.cuh"

namespace ingot::portable {

struct PackedOperands {
  const void *w, *x;  // the packed operands of product/split.cuh
};

// Whether two blocks share a multiprocessor, which has 1 KiB more than a block may take, `most`,
// and keeps 1 KiB for each.
INGOT_HD bool two_fit(u64 shared_bytes, u64 most) {
  return 2 * (shared_bytes + 1024) <= most + 1024;
}

}  // namespace ingot::portable
