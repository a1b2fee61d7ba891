// A program on CUDA: lowered to what a call launches, then launched on the caller's stream, in the
// caller's memory.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "backend/executable.h"
#include "cuda/launcher.h"
#include "cuda/product_tuning.h"
#include "cuda/replay.h"
#include "cuda/sweep_lowering.h"
#include "plan/hosting.h"
#include "product/arch.h"
#include "program/program_cache.h"
#include "support/align.h"
#include "support/cache_folder.h"
#include "support/checked.h"
#include "support/error.h"

namespace ingot {
namespace {

using namespace cuda;

constexpr int kDependentLaunchDriver = 12040;  // the first that captures such launches in graphs

// Whether calls that repeat are replayed where the capability is not given.
constexpr bool kReplay = true;

// What a batch size settles, whatever the device.
struct BatchLayout {
  int64_t batch = 0;
  std::vector<size_t> offsets;  // of the plan's buffers
  size_t buffers = 0;           // bytes; scratch memory follows
  size_t scratch = 0;           // the most that any sweep takes
  std::vector<int> hosts{};     // hosting_results(), or none
};

// What a launch program follows from beside its tensors: of their addresses, the bits that decide
// how wide accesses may be.
struct CudaCall {
  static constexpr size_t kKept = 128;  // rows of sequences of any length are batches
  int sm;
  int64_t batch;
  bool frozen;
  bool operator==(const CudaCall&) const = default;
  static bool aligned_alike(const ingot_tensor& a, const ingot_tensor& b) {
    const auto bits = reinterpret_cast<uintptr_t>(a.data) ^ reinterpret_cast<uintptr_t>(b.data);
    return (bits & 15) == 0;
  }
};

class CudaExecutable : public Executable {
 public:
  CudaExecutable(Plan plan, const ProgramOptions& options)
      : plan_(std::move(plan)),
        options_(options),
        modules_(CubinCache(cache_folder(options, "/kernels"))),
        tuning_(options_, plan_.target, cache_folder(options, "/tuned-products.json")),
        leaf_count_(plan_.graph.leaves().size()),
        dependent_launch_(options_.capabilities.value("dependent_launch", true)),
        replay_(options_.capabilities.value("replay", kReplay)) {
    for (size_t i = 0; i < plan_.sweeps.size(); ++i) {
      const int sweep = static_cast<int>(i);
      lowerings_.push_back(plan_.sweeps[i].kind == SweepKind::product
                               ? make_product_lowering(plan_, sweep, modules_, options_, tuning_)
                               : make_kernels_lowering(plan_, sweep, modules_));
      frozen_bytes_.push_back(align_up(lowerings_.back()->frozen_bytes(), kWorkspaceAlignment));
    }
    const bool hands_halves = options_.capabilities.value("handed_halves", true);
    for (size_t i = 1; i < plan_.sweeps.size(); ++i) {
      if (plan_.sweeps[i].kind != SweepKind::product) continue;
      const size_t readers = lone_readers(plan_, i - 1);
      if (plan_.sweeps[i - 1].kind == SweepKind::product) {
        if (hands_halves && readers == 1) hand_on(*lowerings_[i - 1], *lowerings_[i]);
        continue;
      }
      std::vector<SweepLowering*> products;
      for (size_t j = i; j < i + std::max<size_t>(1, readers); ++j) {
        products.push_back(lowerings_[j].get());
      }
      lowerings_[i - 1] = with_packing(plan_, static_cast<int>(i) - 1, std::move(lowerings_[i - 1]),
                                       std::move(products), readers > 0, modules_);
    }
  }

  void compile(int64_t batch, std::span<const ingot_tensor> tensors) override {
    const std::vector<ingot_tensor> dense =
        tensors.empty() ? dense_tensors(plan_.graph, batch) : std::vector<ingot_tensor>();
    if (tensors.empty()) tensors = dense;
    modules_.compile(plan_.target.sm,
                     units_of(lower(layout(batch), {plan_.target.sm, batch, false}, tensors)));
  }

  bool compile_another(int64_t batch) override {
    return modules_.compile_one(plan_.target.sm, units_of_all(&SweepLowering::units, batch));
  }

  void prepare(int64_t batch, int device) override {
    const CurrentContext context(device);
    const std::vector<ingot_tensor> dense = dense_tensors(plan_.graph, batch);
    modules_.load(*context, units_of(lower(layout(batch), {context->sm(), batch, false}, dense)));
    for (const auto& lowering : lowerings_) lowering->prepare(*context, batch);
    layout(batch);
  }

  size_t workspace_size(int64_t batch) override {
    const BatchLayout& l = layout(batch);
    return checked_sum(l.buffers, l.scratch);
  }

  size_t prepare_call(int64_t batch, std::span<const ingot_tensor> tensors) override {
    if (tensors.empty()) return 0;
    const CurrentContext context(tensors[0].device);
    const auto program = program_of({context->sm(), batch, false}, tensors);
    modules_.load(*context, units_of(*program));
    return needed_workspace(*program, *context);
  }

  void run(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
           size_t workspace_bytes, void* stream) override {
    run_frozen(batch, tensors, workspace, workspace_bytes, nullptr, stream);
  }

  const std::vector<size_t>& frozen_bytes() override { return frozen_bytes_; }

  Precision precision() override {
    Precision found = Precision::ieee;
    for (const auto& lowering : lowerings_) found = least_accurate(found, lowering->precision());
    return found;
  }

  // The program is kept: a run that follows finds it.
  bool uses_library(int64_t batch, std::span<const ingot_tensor> tensors) override {
    const auto program = program_of({plan_.target.sm, batch, false}, tensors);
    return std::any_of(program->steps.begin(), program->steps.end(),
                       [](const Step& step) { return step.kind == StepKind::library_product; });
  }

  bool wants_matrices() const override { return true; }

  void freeze(int64_t batch, std::span<const ingot_tensor> tensors, void* frozen,
              void* stream) override {
    const CurrentContext context(tensors[0].device);
    modules_.load(*context, units_of_all(&SweepLowering::frozen_units, batch));
    const LaunchProgram prologue = lower(layout(batch), {context->sm(), batch, true}, tensors,
                                         [](SweepLowering& lowering, const Lowering& to) {
                                           if (to.frozen.base != Address::Base::none)
                                             lowering.lower_frozen(to);
                                         });
    cuda::launch(prologue, *context, modules_, {tensors, nullptr, static_cast<std::byte*>(frozen)},
                 static_cast<CUstream>(stream), dependent_launch(*context));
    const std::unique_lock lock(packed_mutex_);
    packed_from_[frozen] = weights_of(tensors);
    replays_.forget();  // of this memory, what was packed before
  }

  void run_frozen(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                  size_t workspace_bytes, const void* frozen, void* stream) override {
    if (tensors.empty()) return;
    const CurrentContext context(tensors[0].device);
    const auto launch_on = [&](CUstream on) {
      const auto program = program_of({context->sm(), batch, is_packed(frozen, tensors)}, tensors);
      check_workspace(needed_workspace(*program, *context), workspace, workspace_bytes);
      const CallMemory memory = {tensors, static_cast<std::byte*>(workspace),
                                 static_cast<std::byte*>(const_cast<void*>(frozen))};
      cuda::launch(*program, *context, modules_, memory, on, dependent_launch(*context));
    };
    const auto on = static_cast<CUstream>(stream);
    if (!replay_) return launch_on(on);
    replays_.run({&*context, batch, workspace, frozen, workspace_bytes, tensors}, on,
                 std::cref(launch_on));
  }

  nlohmann::json describe(int64_t batch) override {
    nlohmann::json sweeps = nlohmann::json::array();
    for (const auto& lowering : lowerings_) sweeps.push_back(lowering->describe(batch));
    const LaunchProgram program =
        lower_smallest({plan_.target.sm, batch, false}, dense_tensors(plan_.graph, batch));
    const bool arguments = options_.capabilities.value("describe_arguments", false);
    return {{"backend", "cuda"},
            {"sweeps", sweeps},
            {"workspace_bytes", workspace_size(batch)},
            {"program", ingot::describe(program, plan_, arguments)}};
  }

 private:
  std::vector<int> units_of_all(std::vector<int> (SweepLowering::*units)(int64_t), int64_t batch) {
    std::vector<int> all;
    for (const auto& lowering : lowerings_) {
      const std::vector<int> own = (*lowering.*units)(batch);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }

  bool dependent_launch(const Context& context) const {
    return dependent_launch_ && arch_of(context.sm()).dependent_launch &&
           driver().version >= kDependentLaunchDriver;
  }

  // The tensors of the leaves that are kept in another form.
  std::vector<ingot_tensor> weights_of(std::span<const ingot_tensor> tensors) const {
    std::vector<ingot_tensor> weights;
    for (size_t i = 0; i < frozen_bytes_.size(); ++i) {
      if (frozen_bytes_[i] == 0) continue;
      const ValueId leaf = product_operand(plan_.graph, plan_.sweeps[i], 1);
      const int index = plan_.placements[static_cast<size_t>(leaf)].index;
      weights.push_back(tensors[static_cast<size_t>(index)]);
    }
    return weights;
  }

  // Whether all of them are what the memory was filled from. A parameter that is elsewhere, or laid
  // out otherwise, is another one, whatever its values.
  bool is_packed(const void* frozen, std::span<const ingot_tensor> tensors) const {
    if (frozen == nullptr) return false;
    const std::shared_lock lock(packed_mutex_);
    const auto found = packed_from_.find(frozen);
    if (found == packed_from_.end()) return false;
    const std::vector<ingot_tensor> now = weights_of(tensors);
    return std::memcmp(now.data(), found->second.data(), now.size() * sizeof(ingot_tensor)) == 0;
  }

  std::shared_ptr<const LaunchProgram> program_of(const CudaCall& call,
                                                  std::span<const ingot_tensor> tensors) {
    return programs_.get(call, tensors, [&] { return lower_smallest(call, tensors); });
  }

  // Without the plan's buffers that no step is told of (those of values that are stored in their
  // packed form alone, which is known when all readers of them are lowered), and with others in
  // results.
  LaunchProgram lower_smallest(const CudaCall& call, std::span<const ingot_tensor> tensors) {
    const BatchLayout& whole = layout(call.batch);
    LaunchProgram program = lower(whole, call, tensors);
    const auto unused_by = [&](const LaunchProgram& lowered) {
      return unused_buffers(lowered, plan_, call.batch, whole.offsets);
    };
    std::vector<bool> unused = unused_by(program);
    const auto any = [&] { return std::find(unused.begin(), unused.end(), true) != unused.end(); };
    if (has_frozen_weights() && any()) {  // a call with these has the workspace of one without
      const std::vector<bool> other =
          unused_by(lower(whole, {call.sm, call.batch, !call.frozen}, tensors));
      for (size_t i = 0; i < unused.size(); ++i) unused[i] = unused[i] && other[i];
    }
    BatchLayout trimmed = whole;
    trimmed.hosts = hosting_results(plan_, may_host(tensors), unused);
    for (size_t i = 0; i < unused.size(); ++i) unused[i] = unused[i] || trimmed.hosts[i] >= 0;
    if (!any()) return program;
    trimmed.offsets = plan_.workspace_layout(call.batch, &trimmed.buffers, unused);
    trimmed.buffers = align_up(trimmed.buffers, kWorkspaceAlignment);
    LaunchProgram smaller = lower(trimmed, call, tensors);
    return reaches_nowhere(smaller) ? std::move(program) : std::move(smaller);
  }

  // By result, whether the plan's buffers may lie in its memory.
  std::vector<bool> may_host(std::span<const ingot_tensor> tensors) const {
    constexpr uintptr_t kVector = 16;
    std::vector<bool> may;
    for (const ingot_tensor& tensor : tensors.subspan(leaf_count_)) {
      const bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % kVector == 0;
      may.push_back(options_.scratch_results && aligned && is_dense(tensor));
    }
    return may;
  }

  static bool reaches_nowhere(const LaunchProgram& program) {
    return std::any_of(program.steps.begin(), program.steps.end(), [](const Step& step) {
      const std::vector<Address> told = addresses_of(step);
      return std::any_of(told.begin(), told.end(), [](const Address& address) {
        return address.base == Address::Base::workspace && address.offset >= Plan::kNowhere;
      });
    });
  }

  bool has_frozen_weights() const {
    return std::any_of(frozen_bytes_.begin(), frozen_bytes_.end(), [](size_t n) { return n > 0; });
  }

  static void lower_run(SweepLowering& lowering, const Lowering& to) { lowering.lower(to); }

  // What `act` makes of the sweeps, one after another.
  LaunchProgram lower(const BatchLayout& l, const CudaCall& call,
                      std::span<const ingot_tensor> tensors,
                      void (*act)(SweepLowering&, const Lowering&) = lower_run) {
    Lowered lowered;
    lowered.program.workspace_bytes = l.buffers;
    const Places places = {plan_, call.batch, tensors, leaf_count_, l.offsets, l.hosts};
    Lowering to{places, modules_, call.sm, lowered};
    to.scratch = {Address::Base::workspace, 0, l.buffers};
    to.scratch_bytes = l.scratch;
    std::vector<Address> frozen;
    Address kept = {Address::Base::frozen, 0, 0};
    for (const size_t bytes : frozen_bytes_) {
      frozen.push_back(call.frozen && bytes != 0 ? kept : Address{});
      kept.offset += bytes;
    }
    to.frozen_of_sweeps = frozen;
    for (size_t i = 0; i < lowerings_.size(); ++i) {
      to.sweep = static_cast<int>(i);
      to.frozen = frozen[i];
      add_plan_buffers(to, to.sweep, lowered.program.steps.size(), lowered.program.buffers);
      act(*lowerings_[i], to);
    }
    return std::move(lowered.program);
  }

  static std::string cache_folder(const ProgramOptions& options, const char* inside) {
    const std::string root = options.cache_dir.empty() ? default_cache_folder() : options.cache_dir;
    return root.empty() ? root : root + inside;
  }

  const BatchLayout& layout(int64_t batch) {
    const BatchLayout* last = last_.load(std::memory_order_acquire);
    if (last == nullptr || last->batch != batch) {
      last = &make_layout(batch);
      last_.store(last, std::memory_order_release);
    }
    return *last;
  }

  const BatchLayout& make_layout(int64_t batch) {
    const std::lock_guard lock(mutex_);
    if (const auto found = layouts_.find(batch); found != layouts_.end()) return *found->second;
    auto l = std::make_unique<BatchLayout>();
    l->batch = batch;
    l->offsets = plan_.workspace_layout(batch, &l->buffers);
    l->buffers = align_up(l->buffers, kWorkspaceAlignment);
    for (const auto& lowering : lowerings_) {
      l->scratch = std::max(l->scratch, lowering->scratch_bytes(batch));
    }
    return *layouts_.emplace(batch, std::move(l)).first->second;
  }

  const Plan plan_;
  const ProgramOptions options_;
  Modules modules_;
  const ProductTuning tuning_;
  const size_t leaf_count_;
  const bool dependent_launch_, replay_;
  ProgramCache<LaunchProgram, CudaCall> programs_;
  mutable std::shared_mutex packed_mutex_;
  std::map<const void*, std::vector<ingot_tensor>> packed_from_;  // by the frozen memory
  Replays replays_;
  std::vector<std::unique_ptr<SweepLowering>> lowerings_;
  std::vector<size_t> frozen_bytes_;
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<BatchLayout>> layouts_;  // none is ever removed
  std::atomic<const BatchLayout*> last_{nullptr};
};

}  // namespace

std::unique_ptr<Executable> make_cuda_executable(Plan plan, const ProgramOptions& options) {
  return std::make_unique<CudaExecutable>(std::move(plan), options);
}

}  // namespace ingot
