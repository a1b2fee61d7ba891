// Rings of shared-memory slots between TMA producers and consumers.
#pragma once

#include "common/ptx.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot::hopper {

// Addresses: slots, one "full" and one "empty" mbarrier each.
struct Ring {
  u32 slots, slot_bytes, full, empty;
  INGOT_D u32 slot(u32 i) const { return slots + i * slot_bytes; }
  INGOT_D u32 full_barrier(u32 i) const { return full + 8 * i; }
  INGOT_D u32 empty_barrier(u32 i) const { return empty + 8 * i; }
};

// A place in a ring and the parity its barriers are waited on with: consumers begin with parity 0
// on "full", producers with 1 on "empty" (all slots begin free).
template <int kStages>
struct RingCursor {
  u32 slot = 0, parity = 0;
  INGOT_D void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ingot::hopper

#endif
