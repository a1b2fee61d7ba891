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
// of a block calls it, with its block's state; each call has a `mine` of its own. Before a block
// ends, all must have met once more.
template <class M, int Blocks>
INGOT_D typename M::State merge_cluster(const typename M::State& state, typename M::State& mine) {
  using State = typename M::State;
  constexpr int kWords = (sizeof(State) + 3) / 4;
  union Words {
    State state;
    u32 word[kWords];
    INGOT_D Words() {}
  };
  if (threadIdx.x == 0) mine = state;
  ptx::cluster_sync();
  const u32 address = ptx::shared_address(&mine);
  State all = M::identity();
  INGOT_UNROLL
  for (u32 rank = 0; rank < Blocks; ++rank) {
    Words from;
    INGOT_UNROLL
    for (int i = 0; i < kWords; ++i) from.word[i] = ptx::load_shared_remote(address + 4 * i, rank);
    all = rank == 0 ? from.state : M::merge(all, from.state);
  }
  return all;
}

}  // namespace ingot
