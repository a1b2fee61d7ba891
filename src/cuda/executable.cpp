// A program on CUDA: its sweeps in order, on the caller's stream, in the caller's memory.
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "backend/executable.h"
#include "cuda/product_tuning.h"
#include "cuda/replay.h"
#include "cuda/sweep_runner.h"
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
      runners_.push_back(plan_.sweeps[i].kind == SweepKind::product
                             ? make_product_runner(plan_, sweep, modules_, options_, tuning_)
                             : make_kernels_runner(plan_, sweep, modules_));
    }
  }

  void prepare(int64_t batch, int device) override {
    const CurrentContext context(device);
    std::vector<int> units;
    for (const auto& runner : runners_) {
      const std::vector<int> own = runner->units(batch);
      units.insert(units.end(), own.begin(), own.end());
    }
    modules_.load(*context, units);
    for (const auto& runner : runners_) runner->prepare(*context, batch);
    layout(batch);
  }

  size_t workspace_size(int64_t batch) override {
    const BatchLayout& l = layout(batch);
    return l.buffers + l.scratch;
  }

  void run(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
           size_t workspace_bytes, void* stream) override {
    run_frozen(batch, tensors, workspace, workspace_bytes, nullptr, stream);
  }

  size_t frozen_size() override {
    size_t bytes = 0;
    for (const auto& runner : runners_) bytes += align_to_256(runner->frozen_bytes());
    return bytes;
  }

  void freeze(int64_t batch, std::span<const ingot_tensor> tensors, void* frozen,
              void* stream) override {
    const CurrentContext context(tensors[0].device);
    std::vector<int> units;
    for (const auto& runner : runners_) {
      const std::vector<int> own = runner->frozen_units(batch);
      units.insert(units.end(), own.begin(), own.end());
    }
    modules_.load(*context, units);
    const BatchLayout& l = layout(batch);
    RunState state = state_of(*context, l, batch, tensors, nullptr, 0, stream);
    visit_frozen(state, frozen, [&](SweepRunner& runner) {
      if (state.frozen != nullptr) runner.freeze(state);
    });
  }

  void run_frozen(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                  size_t workspace_bytes, const void* frozen, void* stream) override {
    if (tensors.empty()) return;
    const BatchLayout& l = layout(batch);
    if (workspace_bytes < l.buffers + l.scratch) {
      fail(INGOT_INVALID_ARGUMENT, "the workspace has {} bytes, batch {} needs {}", workspace_bytes,
           batch, l.buffers + l.scratch);
    }
    const CurrentContext context(tensors[0].device);
    const auto launch = [&](CUstream on) {
      RunState state = state_of(*context, l, batch, tensors, static_cast<std::byte*>(workspace),
                                workspace_bytes, on);
      SplitOperand found, left;
      state.found = &found;
      state.left = &left;
      visit_frozen(state, const_cast<void*>(frozen), [&](SweepRunner& runner) {
        found = std::exchange(left, {});
        runner.run(state);
      });
    };
    const auto on = static_cast<CUstream>(stream);
    if (!replay_) return launch(on);
    replays_.run({&*context, batch, workspace, frozen, workspace_bytes, tensors}, on,
                 std::cref(launch));
  }

  nlohmann::json describe(int64_t batch) override {
    nlohmann::json sweeps = nlohmann::json::array();
    for (const auto& runner : runners_) sweeps.push_back(runner->describe(batch));
    return {{"backend", "cuda"}, {"sweeps", sweeps}, {"workspace_bytes", workspace_size(batch)}};
  }

 private:
  RunState state_of(Context& context, const BatchLayout& l, int64_t batch,
                    std::span<const ingot_tensor> tensors, std::byte* memory, size_t bytes,
                    void* stream) {
    const bool dependent =
        dependent_launch_ && context.sm() >= 90 && driver().version >= kDependentLaunchDriver;
    return {plan_,
            context,
            modules_,
            batch,
            tensors,
            leaf_count_,
            memory,
            l.offsets,
            memory == nullptr ? nullptr : memory + l.buffers,
            memory == nullptr ? 0 : bytes - l.buffers,
            static_cast<CUstream>(stream),
            dependent,
            nullptr};
  }

  // Calls `act` for every sweep, with its part of the frozen weights (if there are any) in `state`.
  template <class Act>
  void visit_frozen(RunState& state, void* frozen, Act act) {
    auto* next = static_cast<std::byte*>(frozen);
    for (const auto& runner : runners_) {
      const size_t bytes = next == nullptr ? 0 : align_to_256(runner->frozen_bytes());
      state.frozen = bytes == 0 ? nullptr : next;
      next += bytes;
      act(*runner);
    }
  }

  static std::string cache_folder(const ProgramOptions& options, const char* inside) {
    const std::string root =
        options.cache_dir.empty() ? CubinCache::default_folder() : options.cache_dir;
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
    l->buffers = align_to_256(l->buffers);
    for (const auto& runner : runners_) {
      l->scratch = std::max(l->scratch, runner->scratch_bytes(batch));
    }
    return *layouts_.emplace(batch, std::move(l)).first->second;
  }

  const Plan plan_;
  const ProgramOptions options_;
  Modules modules_;
  const ProductTuning tuning_;
  const size_t leaf_count_;
  const bool dependent_launch_, replay_;
  Replays replays_;
  std::vector<std::unique_ptr<SweepRunner>> runners_;
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<BatchLayout>> layouts_;  // none is ever removed
  std::atomic<const BatchLayout*> last_{nullptr};
};

}  // namespace

std::unique_ptr<Executable> make_cuda_executable(Plan plan, const ProgramOptions& options) {
  return std::make_unique<CudaExecutable>(std::move(plan), options);
}

}  // namespace ingot
