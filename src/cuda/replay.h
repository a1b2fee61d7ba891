// Calls that come again exactly as before: same tensors at the same addresses, same workspace.
// Their launches are captured once in a CUDA graph; one launch of that costs the host a tenth of
// them.
//
// PyTorch's allocator hands the same blocks out again and again, so that a loop over batches of one
// size makes few different calls: as many as there are places of a network that share a program
// (the backward passes of its layers, its products). A graph holds nothing but addresses and
// numbers: whatever lies at those addresses is read and written as the launches themselves would.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/context.h"
#include "ingot/ingot.h"

namespace ingot::cuda {

// All that a call's launches follow from, beside the stream.
struct CallSignature {
  const Context* context;
  int64_t batch;
  const void *workspace, *frozen;
  size_t workspace_bytes;
  std::span<const ingot_tensor> tensors;
};

class Replays {
 public:
  using Launch = std::function<void(CUstream)>;

  ~Replays();
  // Launches the call's kernels: as a graph where the call was seen often enough, by `launch` on
  // `stream` elsewhere (also inside somebody else's capture).
  void run(const CallSignature& call, CUstream stream, const Launch& launch);
  // After which the launches of a call may differ from those before.
  void forget();

 private:
  // Layers that share a program.
  static constexpr size_t kMost = 128;
  struct Seen {
    uint64_t hash = 0;  // of the call
    std::vector<ingot_tensor> tensors;
    CallSignature call{};
    int64_t last_use = 0;
    int times = 0;  // negative: cannot be captured
    CUgraphExec graph = nullptr;
  };
  Seen& find(const CallSignature& call);
  static void release(Seen& seen);

  std::mutex mutex_;
  int64_t uses_ = 0;
  std::vector<Seen> seen_;
};

}  // namespace ingot::cuda
