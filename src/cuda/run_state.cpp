#include "cuda/run_state.h"

#include <algorithm>

#include "support/error.h"

namespace ingot::cuda {

bool is_dense(const ingot_tensor& tensor) {
  int64_t expected = 1;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    if (tensor.sizes[axis] == 1) continue;
    if (tensor.strides[axis] != expected) return false;
    expected *= tensor.sizes[axis];
  }
  return true;
}

int alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 16u;
  return static_cast<int>(bits & (~bits + 1));
}

const ingot_tensor* RunState::tensor_of(ValueId value) const {
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  const auto index = static_cast<size_t>(placement.index);
  switch (placement.kind) {
    case Placement::Kind::leaf:
      return &tensors[index];
    case Placement::Kind::result:
      return &tensors[leaf_count + index];
    case Placement::Kind::update: {
      const ValueId buffer = plan.graph.updates[index].buffer;
      return &tensors[static_cast<size_t>(plan.placements[static_cast<size_t>(buffer)].index)];
    }
    case Placement::Kind::workspace:
    case Placement::Kind::none:
      break;
  }
  return nullptr;
}

KernelTensor RunState::bind(ValueId value, const Shape& seen) const {
  KernelTensor bound{};
  std::array<int64_t, kAxes> strides{};
  if (const ingot_tensor* tensor = tensor_of(value)) {
    bound.data = tensor->data;
    if (is_dense(*tensor)) {
      strides = dense_strides(seen);
    } else {
      std::array<int64_t, kAxes> own{};
      std::copy(std::begin(tensor->strides), std::end(tensor->strides), own.begin());
      strides = strides_in(plan.graph[value].shape, own, seen);
    }
  } else {
    const Placement& placement = plan.placements[static_cast<size_t>(value)];
    if (placement.kind != Placement::Kind::workspace) {
      throw std::logic_error("a sweep reads a value that is nowhere");
    }
    bound.data = workspace + buffer_offsets[static_cast<size_t>(placement.index)];
    strides = dense_strides(seen);
  }
  std::copy(strides.begin(), strides.end(), bound.strides);
  return bound;
}

void RunState::launch(CUfunction function, int64_t blocks, int threads, void** arguments,
                      size_t shared_bytes, unsigned cluster) const {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) {
    fail(INGOT_UNSUPPORTED, "a kernel of {} blocks: a GPU takes no more than 2^31 - 1", blocks);
  }
  LaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (dependent_launch) {
    attributes[count].id = kProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization_allowed = 1;
  }
  if (cluster > 0) {
    attributes[count].id = kClusterDimension;
    attributes[count++].value.cluster = {cluster, 1, 1};
  }
  const LaunchConfig config = {static_cast<unsigned>(blocks),
                               1,
                               1,
                               static_cast<unsigned>(threads),
                               1,
                               1,
                               static_cast<unsigned>(shared_bytes),
                               stream,
                               attributes,
                               count};
  check(driver().cuLaunchKernelEx(&config, function, arguments, nullptr), "launching a kernel");
}

}  // namespace ingot::cuda
