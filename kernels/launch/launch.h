// What a launch asks of CUDA beside a kernel and its arguments. One text for the library, which
// calls the driver, and for standalone files and bench/hopper, which call the CUDA runtime. Plain
// C++: layouts and numbers are those of cuda.h.
#pragma once

#include <cstddef>

#include "common/types.cuh"

namespace ingot {

struct Grid {
  i64 blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
  unsigned cluster = 0;  // blocks of a cluster; 0: none
};

// CUlaunchAttribute, cudaLaunchAttribute.
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int dependent;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

// Fills in those of a launch, two at most, and gives their number. dependent: the kernel may start
// while its predecessors end, for which it waits by itself.
inline unsigned fill_attributes(const Grid& grid, bool dependent, LaunchAttribute* attributes) {
  constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
  unsigned count = 0;
  if (dependent) {
    attributes[count].id = kProgrammaticStreamSerialization;
    attributes[count++].value.dependent = 1;
  }
  if (grid.cluster > 0) {
    attributes[count].id = kClusterDimension;
    attributes[count++].value.cluster = {grid.cluster, 1, 1};
  }
  return count;
}

// Clusters of `blocks` that are under way at once. A cluster lies in one GPC, and which GPCs lack
// multiprocessors differs from chip to chip: 32 clusters of four, or 16 of eight, were seen not to
// fit into 132.
inline i64 cluster_slots(int blocks, int multiprocessors) {
  constexpr int kSpread = 18;  // multiprocessors that may lie beyond the last whole cluster
  const int within = blocks <= 2 ? multiprocessors : multiprocessors - kSpread;
  return within < blocks ? 1 : within / blocks;
}

// Blocks for `tiles` in clusters of `cluster`, of which `slices` share a tile. They are persistent,
// but those of a shared tile, whose rings become exchange buffers.
inline i64 persistent_blocks(i64 tiles, int cluster, int slices, int multiprocessors) {
  const i64 slots = cluster_slots(cluster, multiprocessors);
  return (slices > 1 || tiles < slots ? tiles : slots) * cluster;
}

}  // namespace ingot
