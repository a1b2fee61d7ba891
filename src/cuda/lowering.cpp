#include "cuda/lowering.h"

#include <algorithm>

#include "product/split.cuh"
#include "support/error.h"

namespace ingot::cuda {
namespace {

constexpr uintptr_t kLowBits = 15;

bool same(const hopper::SplitStep& a, const hopper::SplitStep& b) {
  return a.kernel == b.kernel && a.rows == b.rows && a.k == b.k && a.row_stride == b.row_stride &&
         a.k_stride == b.k_stride && a.entry_rows == b.entry_rows && a.entry_skip == b.entry_skip &&
         a.packed_offset == b.packed_offset && a.exponent_offset == b.exponent_offset;
}

size_t end_of(const hopper::SplitStep& step) {
  return step.exponent_offset + static_cast<size_t>(step.rows) * sizeof(i32);
}

}  // namespace

bool is_dense(const ingot_tensor& tensor) {
  int64_t expected = 1;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    if (tensor.sizes[axis] == 1) continue;
    if (tensor.strides[axis] != expected) return false;
    expected *= tensor.sizes[axis];
  }
  return true;
}

int Lowering::tensor_of(ValueId value) const {
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  switch (placement.kind) {
    case Placement::Kind::leaf:
      return placement.index;
    case Placement::Kind::result:
      return static_cast<int>(leaf_count) + placement.index;
    case Placement::Kind::update: {
      const ValueId buffer = plan.graph.updates[static_cast<size_t>(placement.index)].buffer;
      return plan.placements[static_cast<size_t>(buffer)].index;
    }
    case Placement::Kind::workspace:
    case Placement::Kind::none:
      break;
  }
  return -1;
}

BoundTensor Lowering::bind(ValueId value, const Shape& seen) const {
  BoundTensor bound;
  if (const int index = tensor_of(value); index >= 0) {
    const ingot_tensor& tensor = tensors[static_cast<size_t>(index)];
    bound.address = {Address::Base::tensor, index, 0};
    if (is_dense(tensor)) {
      bound.strides = dense_strides(seen);
    } else {
      std::array<int64_t, kAxes> own{};
      std::copy(std::begin(tensor.strides), std::end(tensor.strides), own.begin());
      bound.strides = strides_in(plan.graph[value].shape, own, seen);
    }
    return bound;
  }
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  if (placement.kind != Placement::Kind::workspace) {
    throw std::logic_error("a sweep reads a value that is nowhere");
  }
  bound.address = {Address::Base::workspace, 0,
                   buffer_offsets[static_cast<size_t>(placement.index)]};
  bound.strides = dense_strides(seen);
  return bound;
}

unsigned Lowering::low_bits(const Address& address) const {
  uintptr_t bits = address.offset;
  if (address.base == Address::Base::tensor) {
    bits += reinterpret_cast<uintptr_t>(tensors[static_cast<size_t>(address.tensor)].data);
  }
  return static_cast<unsigned>(bits & kLowBits);
}

int Lowering::alignment_of(const Address& address) const {
  const unsigned bits = low_bits(address) | (kLowBits + 1);
  return static_cast<int>(bits & (~bits + 1));
}

void Lowering::launch(StepKind kind, int unit, int function, int64_t blocks, int threads,
                      Arguments arguments, size_t shared_bytes, unsigned cluster) const {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) {
    fail(INGOT_UNSUPPORTED, "a kernel of {} blocks: a GPU takes no more than 2^31 - 1", blocks);
  }
  Step step;
  step.kind = kind;
  step.sweep = sweep;
  const Modules::Source source = modules.source(unit, function);
  step.kernel = source.function;
  step.text = source.text_hash;
  step.unit = unit;
  step.function = function;
  step.blocks = blocks;
  step.threads = threads;
  step.shared_bytes = shared_bytes;
  step.cluster = cluster;
  step.arguments = std::move(arguments);
  lowered.program.steps.push_back(std::move(step));
}

void Lowering::launch(const LibraryProduct& product, const Address& x, const Address& w,
                      const Address& y, const Address& workspace) const {
  Step step;
  step.kind = StepKind::library_product;
  step.sweep = sweep;
  step.product = product;
  for (const Address& address : {x, w, y, workspace}) step.arguments.add_address(address);
  lowered.program.steps.push_back(std::move(step));
}

void Lowering::pack(ValueId value, const Address& source, const hopper::SplitStep& step, int unit,
                    const Address& memory) const {
  const auto is_there = [&](const PackedOperand& packed) {
    return packed.value == value && packed.memory == memory && same(packed.split, step);
  };
  const std::vector<PackedOperand>& packed = lowered.packed;
  if (std::any_of(packed.begin(), packed.end(), is_there)) return;
  keep_packed(value, step, memory);
  Arguments arguments;
  const size_t start = arguments.add(hopper::args_of(step));
  arguments.set(start + offsetof(SplitArgs, source), source);
  arguments.set(start + offsetof(SplitArgs, packed), memory + step.packed_offset);
  arguments.set(start + offsetof(SplitArgs, exponent), memory + step.exponent_offset);
  launch(StepKind::pack, unit, 0, step.grid, static_cast<int>(step.threads), std::move(arguments),
         step.shared_bytes, step.cluster);
}

void Lowering::keep_packed(ValueId value, const hopper::SplitStep& step,
                           const Address& memory) const {
  overwrite(memory + step.packed_offset, end_of(step) - step.packed_offset);
  lowered.packed.push_back({value, step, memory});
  const Node& node = plan.graph[value];
  const std::string called = node.name.empty() ? fmt::format("%{}", value) : node.name;
  name(called + " packed", memory + step.packed_offset, step.exponent_offset - step.packed_offset);
  name(called + "'s exponents", memory + step.exponent_offset,
       static_cast<size_t>(step.rows) * sizeof(i32));
}

void Lowering::overwrite(const Address& begin, size_t bytes) const {
  if (begin.base != Address::Base::workspace) return;
  size_t& used = lowered.program.workspace_bytes;
  used = std::max(used, begin.offset + bytes);
  std::erase_if(lowered.packed, [&](const PackedOperand& packed) {
    const size_t from = packed.memory.offset + packed.split.packed_offset;
    const size_t to = packed.memory.offset + end_of(packed.split);
    return packed.memory.base == begin.base && from < begin.offset + bytes && begin.offset < to;
  });
}

void Lowering::name(const std::string& what, const Address& address, size_t bytes) const {
  lowered.program.buffers.push_back({what, address, bytes});
}

}  // namespace ingot::cuda
