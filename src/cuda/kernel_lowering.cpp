#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/sweep_lowering.h"
#include "support/align.h"
#include "support/checked.h"
#include "support/error.h"
#include "sweeps/waves.cuh"

namespace ingot::cuda {
namespace {

// Kernel parameters may take 4 KB on every GPU that is served.
constexpr size_t kMaxOperands = 96;

Unit unit_of(const KernelSource& source) {
  Unit unit;
  unit.source = {source.name, source.text};
  for (const KernelEntry& entry : source.entries) {
    unit.functions.push_back(entry.name);
    unit.shared_bytes = std::max(unit.shared_bytes, static_cast<size_t>(entry.shared_bytes));
  }
  return unit;
}

bool is_columns(const KernelEntry& entry) {
  return entry.role == KernelRole::columns || entry.role == KernelRole::columns_inner;
}

class KernelsLowering : public SweepLowering {
 public:
  KernelsLowering(const Plan& plan, int sweep, Modules& modules) : plan_(plan), modules_(modules) {
    for (KernelSource& source : generate_sweep(plan, sweep)) {
      kernels_.emplace_back(std::move(source), modules);
    }
  }
  size_t scratch_bytes(int64_t batch) const override {
    size_t bytes = 0;
    for (const KernelLowering& kernel : kernels_)
      bytes = std::max(bytes, kernel.scratch_bytes(batch));
    return bytes;
  }
  std::vector<int> units(int64_t) override {
    std::vector<int> result;
    for (const KernelLowering& kernel : kernels_) result.push_back(kernel.unit());
    return result;
  }
  void prepare(Context&, int64_t) override {}
  void lower(const Lowering& to) override {
    if (const KernelLowering* turned = turned_for(to)) return turned->lower(to);
    for (const KernelLowering& kernel : kernels_) kernel.lower(to);
  }
  nlohmann::json describe(int64_t) override {
    nlohmann::json kernels = nlohmann::json::array();
    for (const KernelLowering& kernel : kernels_) kernels.push_back(kernel.describe());
    return {{"provider", "generated kernels"}, {"kernels", kernels}};
  }

 private:
  // The kernel for operands that lie turned, where these do; written when the first such call
  // comes.
  const KernelLowering* turned_for(const Lowering& to) {
    const KernelSource& source = kernels_.front().source();
    if (source.row_axes == 0) return nullptr;
    const auto turned = turned_operands(plan_, source, kernels_.front().layouts(to), to.batch);
    if (!turned) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto [found, inserted] = turned_.try_emplace(*turned);
    if (inserted) {
      if (auto written = generate_turned(plan_, source, *turned)) {
        found->second = std::make_unique<KernelLowering>(*std::move(written), modules_);
      }
    }
    return found->second.get();
  }

  const Plan& plan_;
  Modules& modules_;
  std::vector<KernelLowering> kernels_;
  std::mutex mutex_;
  std::map<TurnedOperands, std::unique_ptr<KernelLowering>> turned_;
};

}  // namespace

KernelLowering::KernelLowering(KernelSource source, Modules& modules)
    : source_(std::move(source)), unit_(modules.add(unit_of(source_))) {
  if (source_.operands.size() > kMaxOperands) {
    fail(INGOT_UNSUPPORTED, "kernel {} would take {} tensors; {} fit into a launch", source_.name,
         source_.operands.size(), kMaxOperands);
  }
}

size_t KernelLowering::scratch_bytes(int64_t batch) const {
  size_t bytes = 0;
  for (const KernelEntry& entry : source_.entries) {
    if (entry.role == KernelRole::waves_begin) {
      const int64_t needed =
          wave_bytes(rows_of(source_, batch), entry.tiles, source_.phases, source_.state_bytes);
      bytes = std::max(bytes, align_up(static_cast<size_t>(needed), kWorkspaceAlignment));
    }
    if (!is_columns(entry)) continue;
    const size_t states =
        checked_product(static_cast<size_t>(splits_of(source_, entry, batch).splits),
                        static_cast<size_t>(source_.columns * source_.state_bytes));
    bytes =
        std::max(bytes, align_up(states + 16 * source_.operands.size() + 256, kWorkspaceAlignment));
  }
  return bytes;
}

// A vector access wants consecutive features and an address that is a multiple of its width.
bool KernelLowering::admits(const KernelEntry& entry, const Lowering& to,
                            std::span<const BoundTensor> tensors) const {
  if (entry.width == 1) return true;
  for (size_t i = 0; i < source_.operands.size(); ++i) {
    const KernelOperand& operand = source_.operands[i];
    const OperandLayout layout = {tensors[i].strides, to.low_bits(tensors[i].address)};
    if (operand.vector && !moves_vectors(operand, entry, layout, to.batch)) return false;
  }
  return true;
}

std::vector<OperandLayout> KernelLowering::layouts(const Lowering& to) const {
  std::vector<OperandLayout> result;
  for (const KernelOperand& operand : source_.operands) {
    const BoundTensor tensor = to.bind(operand.value, operand.seen);
    result.push_back({tensor.strides, to.low_bits(tensor.address)});
  }
  return result;
}

bool KernelLowering::lower_packing(const Lowering& to, const PackRequest& request) const {
  std::vector<BoundTensor> tensors;
  for (const KernelOperand& operand : source_.operands) {
    tensors.push_back(to.bind(operand.value, operand.seen));
  }
  const KernelEntry& entry = source_.entries.front();
  const int64_t rows = to.batch * source_.rows_per_sample;
  if (request.step.rows != rows || !admits(entry, to, tensors)) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const KernelOperand& operand = source_.operands[i];
    if (request.alone && operand.written && operand.value == request.value) tensors[i].address = {};
  }
  Arguments arguments;
  arguments.add_tensors(tensors);
  arguments.add(rows);
  arguments.add_address(request.memory + request.step.packed_offset);
  arguments.add_address(request.memory + request.step.exponent_offset);
  arguments.add(!request.alone);
  to.keep_packed(request.value, request.step, request.memory);
  if (request.alone) to.lowered.packed_alone = request.value;
  to.launch(StepKind::sweep, unit_, 0, blocks_of(source_, entry, to.batch), entry.threads,
            std::move(arguments), 0, 0, Turn::waits);
  return true;
}

void KernelLowering::lower(const Lowering& to, const Override& instead, int64_t splits) const {
  std::vector<BoundTensor> tensors;
  for (const KernelOperand& operand : source_.operands) {
    const bool replaced = operand.value == instead.value && !operand.written;
    tensors.push_back(replaced ? BoundTensor{instead.address, dense_strides(operand.seen)}
                               : to.bind(operand.value, operand.seen));
  }
  const int64_t samples = source_.batched ? to.batch : 1;
  const KernelEntry* launched = nullptr;
  for (size_t i = 0; i < source_.entries.size(); ++i) {
    const KernelEntry& entry = source_.entries[i];
    if (launched != nullptr && launched->role == entry.role) continue;  // the narrower variant
    if (!admits(entry, to, tensors)) continue;
    launched = &entry;
    Arguments arguments;
    arguments.add_tensors(tensors);
    switch (entry.role) {
      case KernelRole::map:
      case KernelRole::groups:
        arguments.add(samples);
        break;
      case KernelRole::rows:
      case KernelRole::rows_packed:
        arguments.add(rows_of(source_, to.batch));
        break;
      case KernelRole::waves_begin:
        arguments.add_address(to.scratch);
        arguments.add(wave_bytes(rows_of(source_, to.batch), entry.tiles, source_.phases,
                                 source_.state_bytes));
        to.overwrite(to.scratch, scratch_bytes(to.batch));
        to.name("states of rows and their pieces", to.scratch, scratch_bytes(to.batch));
        break;
      case KernelRole::waves:
        arguments.add(rows_of(source_, to.batch));
        arguments.add_address(to.scratch);
        break;
      case KernelRole::columns:
      case KernelRole::columns_inner: {
        const SampleSplits cut = splits_of(source_, entry, to.batch);
        arguments.add(cut.samples);
        arguments.add(cut.per_split);
        arguments.add_address(to.scratch);
        splits = cut.splits;
        const int64_t bytes = splits * source_.columns * source_.state_bytes;
        to.overwrite(to.scratch, scratch_bytes(to.batch));
        to.name("partial states", to.scratch, static_cast<size_t>(bytes));
        break;
      }
      case KernelRole::columns_whole:
        arguments.add(samples * source_.leading);
        break;
      case KernelRole::merge:
        arguments.add_address(to.scratch);
        arguments.add(splits);
        break;
    }
    to.launch(entry.role == KernelRole::merge ? StepKind::merge : StepKind::sweep, unit_,
              static_cast<int>(i), blocks_of(source_, entry, to.batch), entry.threads,
              std::move(arguments), static_cast<size_t>(entry.shared_bytes));
  }
}

nlohmann::json KernelLowering::describe() const {
  nlohmann::json names = nlohmann::json::array();
  for (const KernelEntry& entry : source_.entries) names.push_back(entry.name);
  return {{"name", source_.name}, {"entries", names}, {"text", source_.text}};
}

std::unique_ptr<SweepLowering> make_kernels_lowering(const Plan& plan, int sweep,
                                                     Modules& modules) {
  return std::make_unique<KernelsLowering>(plan, sweep, modules);
}

}  // namespace ingot::cuda
