// One call on its way to a launch program: its tensors' layouts, and how a sweep's operands are
// found in them. Of the tensors' addresses, only how they are aligned is looked at.
#pragma once

#include <optional>

#include "cuda/modules.h"
#include "program/launch_program.h"

namespace ingot::cuda {

// An operand that a step left in the form that product kernels read, in memory that nothing has
// overwritten since.
struct PackedOperand {
  ValueId value = kNoValue;
  hopper::SplitStep split;
  Address memory;
};

// A result in the plan's buffer of it, not as fp32 but as halves, for the product that follows.
struct HandedHalves {
  ValueId value = kNoValue;
  Address factors;
};

// Whether packings leave the same bytes in the same place of their memory.
bool same_packing(const hopper::SplitStep& a, const hopper::SplitStep& b);

// What grows while sweeps are lowered.
struct Lowered {
  LaunchProgram program;
  std::vector<PackedOperand> packed;
  ValueId packed_alone = kNoValue;  // the last of them, where it was not stored as it is
  HandedHalves halves;
};

struct Lowering : Places {
  const Modules& modules;
  int sm;  // of the GPU
  Lowered& lowered;
  int sweep = 0;      // that is lowered
  Address scratch{};  // of the sweep, behind the plan's buffers
  size_t scratch_bytes = 0;
  Address frozen{};  // of the sweep: weights kept for inference, or none
  std::span<const Address> frozen_of_sweeps{};

  // As a sweep behind this one is lowered, with the same scratch memory.
  Lowering behind(int sweeps = 1) const;
  // Adds a kernel; no blocks: nothing.
  void launch(StepKind kind, int unit, int function, int64_t blocks, int threads,
              Arguments arguments, size_t shared_bytes = 0, unsigned cluster = 0,
              Turn turn = Turn::ordinary) const;
  // bias: none where the product has none.
  void launch(const LibraryProduct& product, const Address& x, const Address& w, const Address& y,
              const Address& workspace, const Address& bias) const;
  // Packs an operand into memory + the step's offsets, by a kernel of `unit`, unless it is there.
  void pack(ValueId value, const Address& source, const hopper::SplitStep& step, int unit,
            const Address& memory) const;
  // Whether it may do so beside the kernel before: it reads what the caller gives, and touches
  // nothing that is touched there.
  bool packs_beside(const Address& source, const hopper::SplitStep& step,
                    const Address& memory) const;
  // Says that a step leaves an operand packed there.
  void keep_packed(ValueId value, const hopper::SplitStep& step, const Address& memory) const;
  // Says that steps write these bytes of the workspace.
  void overwrite(const Address& begin, size_t bytes) const;
  // Says that a library's product may: how many of them, its GPU tells (needed_workspace()).
  void lend(const Address& begin, size_t bytes) const;
  void name(const std::string& what, const Address& address, size_t bytes) const;
};

}  // namespace ingot::cuda
