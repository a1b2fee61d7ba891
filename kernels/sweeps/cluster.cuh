// Several blocks that own one row: a cluster, whose states meet through shared memory (cc 9.0+). On
// older devices the first block of each row does the work of all.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"
#include "sweeps/tensor.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define INGOT_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define INGOT_CLUSTER(blocks)
#endif

namespace ingot {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

// Merges the states of `Blocks` blocks, lower ranks first, so that all get equal bits. Every thread
// of a block calls it, with its block's state; each call has slots of its own. Each block writes
// into the others', which must have begun: behind a cluster_arrive() of all, and a cluster_wait().
// Nothing is read of a block that may have ended.
template <class M, int Blocks>
INGOT_D typename M::State merge_cluster(const typename M::State& state, int rank,
                                        typename M::State (&slots)[Blocks]) {
  using State = typename M::State;
  constexpr int kWords = (sizeof(State) + 3) / 4;
  union Words {
    State state;
    u32 word[kWords];
    INGOT_D Words() {}
  };
  if (threadIdx.x < Blocks) {
    Words own;
    own.state = state;
    const u32 address = ptx::shared_address(&slots[rank]);
    INGOT_UNROLL
    for (int i = 0; i < kWords; ++i) {
      ptx::store_shared_remote(address + 4 * i, threadIdx.x, own.word[i]);
    }
  }
  ptx::cluster_sync();
  State all = slots[0];
  INGOT_UNROLL
  for (int block = 1; block < Blocks; ++block) all = M::merge(all, slots[block]);
  return all;
}

}  // namespace ingot
