// One call of a program: its tensors and workspace, and how a sweep's operands are found in them.
#pragma once

#include <optional>
#include <span>

#include "cuda/context.h"
#include "cuda/modules.h"
#include "ingot/ingot.h"
#include "plan/plan.h"

namespace ingot::cuda {

// As kernels/sweeps/tensor.cuh has it.
struct KernelTensor {
  void* data;
  int64_t strides[kAxes];
};

// An operand as fp16 halves, which a product leaves in the scratch memory: one that follows at once
// and reads the same matrix need not split it again.
struct SplitOperand {
  ValueId value = kNoValue;
  std::string kernel;  // of the split
  int64_t rows = 0, k = 0, row_stride = 0, k_stride = 0;
  size_t packed_offset = 0, exponent_offset = 0;

  friend bool operator==(const SplitOperand&, const SplitOperand&) = default;
};

struct RunState {
  const Plan& plan;
  Context& context;
  Modules& modules;
  int64_t batch;
  std::span<const ingot_tensor> tensors;  // leaves, then results
  size_t leaf_count;
  std::byte* workspace;
  const std::vector<size_t>& buffer_offsets;
  std::byte* scratch;  // of the sweep that runs, behind the plan's buffers
  size_t scratch_bytes;
  CUstream stream;
  bool dependent_launch;
  std::byte* frozen = nullptr;  // of the sweep that runs: weights kept for inference, or none
  const SplitOperand* found = nullptr;  // what the sweep before left in the scratch memory
  SplitOperand* left = nullptr;         // what the sweep that runs leaves there

  // The caller's tensor that holds a leaf, result or update; nullptr for workspace buffers.
  const ingot_tensor* tensor_of(ValueId value) const;
  // Where a value is and how a sweep that sees it as `seen` walks it.
  KernelTensor bind(ValueId value, const Shape& seen) const;

  void launch(CUfunction function, int64_t blocks, int threads, void** arguments,
              size_t shared_bytes = 0, unsigned cluster = 0) const;
};

// Whether elements lie without gaps in the order of the axes.
bool is_dense(const ingot_tensor& tensor);
// A power of two ≤ 16 that divides the address.
int alignment_of(const void* address);

}  // namespace ingot::cuda
