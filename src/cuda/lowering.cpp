#include "cuda/lowering.h"

#include <algorithm>

#include "product/split.cuh"
#include "support/error.h"

namespace ingot::cuda {
namespace {

size_t end_of(const hopper::SplitStep& step) {
  return step.exponent_offset + static_cast<size_t>(step.rows) * sizeof(i32);
}

// Bytes of one memory.
struct Range {
  size_t begin, end;
  bool holds(size_t at) const { return begin <= at && at < end; }
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// Of a packed operand.
Range range_of(const hopper::SplitStep& step, const Address& memory) {
  return {memory.offset + step.packed_offset, memory.offset + end_of(step)};
}

}  // namespace

bool same_packing(const hopper::SplitStep& a, const hopper::SplitStep& b) {
  return a.kernel == b.kernel && a.rows == b.rows && a.k == b.k && a.row_stride == b.row_stride &&
         a.k_stride == b.k_stride && a.entry_rows == b.entry_rows && a.entry_skip == b.entry_skip &&
         a.packed_offset == b.packed_offset && a.exponent_offset == b.exponent_offset;
}

void Lowering::launch(StepKind kind, int unit, int function, int64_t blocks, int threads,
                      Arguments arguments, size_t shared_bytes, unsigned cluster, Turn turn) const {
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
  step.turn = turn;
  step.arguments = std::move(arguments);
  lowered.program.steps.push_back(std::move(step));
}

void Lowering::launch(const LibraryProduct& product, const Address& x, const Address& w,
                      const Address& y, const Address& workspace, const Address& bias) const {
  Step step;
  step.kind = StepKind::library_product;
  step.sweep = sweep;
  step.product = product;
  for (const Address& address : {x, w, y, workspace}) step.arguments.add_address(address);
  if (product.bias) step.arguments.add_address(bias);
  lowered.program.steps.push_back(std::move(step));
}

Lowering Lowering::behind(int sweeps) const {
  Lowering next = *this;
  next.sweep += sweeps;
  next.frozen = frozen_of_sweeps[static_cast<size_t>(next.sweep)];
  return next;
}

void Lowering::pack(ValueId value, const Address& source, const hopper::SplitStep& step, int unit,
                    const Address& memory) const {
  const auto is_there = [&](const PackedOperand& packed) {
    return packed.value == value && packed.memory == memory && same_packing(packed.split, step);
  };
  const std::vector<PackedOperand>& packed = lowered.packed;
  if (std::any_of(packed.begin(), packed.end(), is_there)) return;
  if (value == lowered.packed_alone) {
    throw std::logic_error("what was stored in its packed form alone is not there");
  }
  const bool beside = packs_beside(source, step, memory);
  keep_packed(value, step, memory);
  Arguments arguments;
  SplitArgs args = hopper::args_of(step);
  args.beside = beside ? 1 : 0;
  const size_t start = arguments.add(args);
  arguments.set(start + offsetof(SplitArgs, source), source);
  arguments.set(start + offsetof(SplitArgs, packed), memory + step.packed_offset);
  arguments.set(start + offsetof(SplitArgs, exponent), memory + step.exponent_offset);
  launch(StepKind::pack, unit, 0, step.grid, static_cast<int>(step.threads), std::move(arguments),
         step.shared_bytes, step.cluster, beside ? Turn::beside : Turn::ordinary);
}

// Of what a kernel is told of in scratch memory, only packed operands have known ends.
bool Lowering::packs_beside(const Address& source, const hopper::SplitStep& step,
                            const Address& memory) const {
  const std::vector<Step>& steps = lowered.program.steps;
  if (steps.empty() || steps.back().turn != Turn::waits) return false;
  if (source.base != Address::Base::tensor || memory.base != Address::Base::workspace) return false;
  if (static_cast<size_t>(source.tensor) >= leaf_count) return false;
  const Range own = range_of(step, memory);
  const auto is_updated = [&](int tensor) {  // and may be seen by another tensor, too
    return std::any_of(plan.graph.updates.begin(), plan.graph.updates.end(),
                       [&](const Update& update) { return tensor_of(update.buffer) == tensor; });
  };
  const auto is_apart = [&](const Address& touched) {
    if (touched.base == Address::Base::tensor) {
      return touched.tensor != source.tensor && !is_updated(touched.tensor);
    }
    if (touched.base != Address::Base::workspace || touched.offset < scratch.offset) return true;
    return std::any_of(lowered.packed.begin(), lowered.packed.end(), [&](const PackedOperand& p) {
      const Range packed = range_of(p.split, p.memory);
      return p.memory.base == touched.base && packed.holds(touched.offset) && !packed.meets(own);
    });
  };
  const std::vector<Address> touched = addresses_of(steps.back());
  return std::all_of(touched.begin(), touched.end(), is_apart);
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
  if (begin.base != Address::Base::workspace || bytes == 0) return;
  size_t& used = lowered.program.workspace_bytes;
  used = std::max(used, begin.offset + bytes);
  lend(begin, bytes);
}

void Lowering::lend(const Address& begin, size_t bytes) const {
  const Range written = {begin.offset, begin.offset + bytes};
  std::erase_if(lowered.packed, [&](const PackedOperand& packed) {
    return packed.memory.base == begin.base && range_of(packed.split, packed.memory).meets(written);
  });
}

void Lowering::name(const std::string& what, const Address& address, size_t bytes) const {
  lowered.program.buffers.push_back({what, address, bytes, lowered.program.steps.size()});
}

}  // namespace ingot::cuda
