// Blocks of one producer warpgroup and two that consume, and the rings of shared-memory slots
// between them.
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

// Warpgroup 0 loads. The broadcasts make warpgroup and warp provably uniform in each warp.
struct ThreadRole {
  i32 warpgroup = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) >> 7, 0);
  i32 warp = __shfl_sync(~0u, (static_cast<i32>(threadIdx.x) >> 5) & 3, 0);  // of the warpgroup
  i32 lane = threadIdx.x & 31;
};

// Aligned to the period of TMA's 128-byte swizzle, for which a configuration adds 1024 bytes.
INGOT_D u32 aligned_shared_memory() {
  extern __shared__ unsigned char shared_memory[];
  return (ptx::shared_address(shared_memory) + 1023) & ~1023u;
}

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
