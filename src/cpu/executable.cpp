// The CPU backend: a plan's sweeps one after another on the host's threads.
#include "backend/executable.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "cpu/loops.h"
#include "cpu/product/provider.h"
#include "cpu/sweep.h"
#include "support/align.h"
#include "support/checked.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot {
namespace cpu {
namespace {

bool contains(const std::vector<ValueId>& values, ValueId value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Copies whole tensors that no sweep writes: a result that is a leaf or a second name, and updates,
// which reach their buffers only when everything has been read.
void copy_tensor(const Memory& from, const Memory& to, const Extents& sizes, Level level) {
  const auto load = static_cast<size_t>(from.dtype), store = static_cast<size_t>(to.dtype);
  const auto width = [](DType dtype) {
    return dtype == DType::f64 || dtype == DType::i64 ? 8
           : dtype == DType::f32                      ? 4
           : dtype == DType::boolean                  ? 1
                                                      : 2;
  };
  if (product_of(sizes) == 0) return;
  Loops<2> loops;
  loops.build(sizes, {to.strides, from.strides});
  constexpr int64_t kBlock = 512;
  double block[kBlock];
  loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
    for (int64_t j = 0; j < loops.size[0]; j += kBlock) {
      const int64_t n = std::min(kBlock, loops.size[0] - j);
      primitives<double>(level).load[load](
          block, from.data + (offset[1] + j * loops.stride[0][1]) * width(from.dtype),
          loops.stride[0][1], n);
      primitives<double>(level).store[store](
          to.data + (offset[0] + j * loops.stride[0][0]) * width(to.dtype), loops.stride[0][0],
          block, n);
    }
  });
}

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(Plan plan, const ProgramOptions& options)
      : plan_(std::move(plan)), isa_(detect_isa(options.capabilities)) {
    for (const Sweep& sweep : plan_.sweeps) sweeps_.emplace_back(plan_, sweep, isa_);
    make_steps();
  }

  void compile(int64_t, std::span<const ingot_tensor>) override {}
  bool compile_another(int64_t) override { return false; }
  void prepare(int64_t, int) override {}

  size_t workspace_size(int64_t batch) override { return layout(batch).total; }

  size_t prepare_call(int64_t batch, std::span<const ingot_tensor>) override {
    return workspace_size(batch);
  }

  void run(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
           size_t workspace_bytes, void* stream) override {
    run_frozen(batch, tensors, workspace, workspace_bytes, nullptr, stream);
  }

  // What they were when first asked for, whatever products are registered later.
  const std::vector<size_t>& frozen_bytes() override {
    std::call_once(frozen_once_, [&] {
      for (const SweepRunner& sweep : sweeps_)
        frozen_bytes_.push_back(align_up(sweep.frozen_bytes(), kWorkspaceAlignment));
    });
    return frozen_bytes_;
  }

  Precision precision() override {
    const auto in_f32 = [&](const Sweep& sweep) {
      return sweep.matmul != kNoValue && plan_.graph[sweep.matmul].dtype == DType::f32;
    };
    const auto providers = product_providers(isa_);
    const bool split =
        std::any_of(plan_.sweeps.begin(), plan_.sweeps.end(), in_f32) &&
        std::any_of(providers.begin(), providers.end(), [](const auto& p) { return p->splits(); });
    return split ? Precision::fp32 : Precision::ieee;
  }

  bool uses_library(int64_t, std::span<const ingot_tensor>) override { return false; }

  bool wants_matrices() const override { return false; }

  void freeze(int64_t batch, std::span<const ingot_tensor> tensors, void* frozen, void*) override {
    const Layout l = layout(batch);
    const Addresses addresses(plan_, batch, tensors, nullptr, l.buffers, l.updates);
    auto* at = static_cast<std::byte*>(frozen);
    const std::vector<size_t>& kept = frozen_bytes();
    for (size_t i = 0; i < sweeps_.size(); ++i) {
      if (kept[i] != 0) sweeps_[i].freeze(addresses, at, kept[i]);
      at += kept[i];
    }
  }

  void run_frozen(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                  size_t workspace_bytes, const void* frozen, void*) override {
    const Layout l = layout(batch);
    check_workspace(l.total, workspace, workspace_bytes);
    auto* base = static_cast<std::byte*>(workspace);
    const Addresses addresses(plan_, batch, tensors, base, l.buffers, l.updates);
    for (const Step& step : steps_) {
      const std::byte* packed = frozen != nullptr ? packed_of(step.sweep, frozen) : nullptr;
      run_step(step, addresses, base + l.sweeps, packed);
    }
    copy_remaining(addresses);
  }

  nlohmann::json describe(int64_t batch) override {
    nlohmann::json sweeps = nlohmann::json::array();
    for (const SweepRunner& sweep : sweeps_) sweeps.push_back(sweep.describe(batch));
    for (const Step& step : steps_) {
      if (step.next < 0 || !runner(step.sweep).runs_with(runner(step.next), step.kept, batch)) {
        continue;
      }
      sweeps[static_cast<size_t>(step.next)]["on_blocks_of"] =
          sweeps[static_cast<size_t>(step.sweep)]["name"];
    }
    return {{"backend", "cpu"},
            {"instructions", name_of(isa_.level)},
            {"threads", thread_count()},
            {"thread_runtime", thread_runtime_name()},
            {"sweeps", sweeps}};
  }

 private:
  struct Layout {
    std::vector<size_t> buffers, updates;
    size_t sweeps = 0, total = 0;
  };

  // A sweep, or a product's and the next one that can run on its blocks.
  struct Step {
    int sweep = 0, next = -1;
    bool kept = true;  // something else reads the product too
  };

  const std::byte* packed_of(int sweep, const void* frozen) {
    const auto* at = static_cast<const std::byte*>(frozen);
    const std::vector<size_t>& kept = frozen_bytes();
    const auto index = static_cast<size_t>(sweep);
    if (kept[index] == 0) return nullptr;
    return std::accumulate(kept.begin(), kept.begin() + sweep, at,
                           [](const std::byte* p, size_t bytes) { return p + bytes; });
  }

  const SweepRunner& runner(int sweep) const { return sweeps_[static_cast<size_t>(sweep)]; }

  void run_step(const Step& step, const Addresses& addresses, std::byte* workspace,
                const std::byte* packed) const {
    if (step.next >= 0 &&
        runner(step.sweep).run_with(runner(step.next), step.kept, addresses, workspace, packed)) {
      return;
    }
    runner(step.sweep).run(addresses, workspace, packed);
    if (step.next >= 0) runner(step.next).run(addresses, workspace);
  }

  // The first sweep that reads a product, if it can run on its blocks; -1 where there is none.
  int follower_of(int product) const {
    const ValueId value = plan_.sweeps[static_cast<size_t>(product)].matmul;
    const int count = static_cast<int>(plan_.sweeps.size());
    for (int i = product + 1; value != kNoValue && i < count; ++i) {
      const Sweep& sweep = plan_.sweeps[static_cast<size_t>(i)];
      if (contains(sweep.loads, value)) {
        return runner(i).can_follow(plan_.sweeps[static_cast<size_t>(product)]) ? i : -1;
      }
      if (sweep.matmul != kNoValue) return -1;
    }
    return -1;
  }

  bool is_read_beside(ValueId value, int reader) const {
    for (size_t i = 0; i < plan_.sweeps.size(); ++i) {
      if (static_cast<int>(i) != reader && contains(plan_.sweeps[i].loads, value)) return true;
    }
    const auto is = [&](ValueId other) {
      return other == value || behind_views(plan_.graph, other) == value;
    };
    for (const auto& result : plan_.graph.results) {
      if (is(result.value)) return true;
    }
    for (const Update& update : plan_.graph.updates) {
      if (is(update.value)) return true;
    }
    return false;
  }

  // Sweeps between a product and its follower do not read it: they run before. All of them are then
  // at work at one time, as far as the lifetimes of buffers go.
  void make_steps() {
    const int count = static_cast<int>(plan_.sweeps.size());
    for (int i = 0; i < count; ++i) {
      const int next = follower_of(i);
      if (next < 0) {
        steps_.push_back({i});
        continue;
      }
      for (int between = i + 1; between < next; ++between) steps_.push_back({between});
      const bool kept = is_read_beside(plan_.sweeps[static_cast<size_t>(i)].matmul, next);
      steps_.push_back({i, next, kept});
      for (WorkspaceBuffer& buffer : plan_.buffers) {
        if (buffer.first_sweep > i && buffer.first_sweep <= next) buffer.first_sweep = i;
        if (buffer.last_sweep >= i && buffer.last_sweep < next) buffer.last_sweep = next;
      }
      i = next;
    }
  }

  // The plan's buffers, then values on their way to buffers, then one sweep's own memory.
  Layout layout(int64_t batch) const {
    Layout l;
    l.buffers = plan_.workspace_layout(batch, &l.total);
    l.total = align_up(l.total, kWorkspaceAlignment);
    for (const Update& update : plan_.graph.updates) {
      l.updates.push_back(l.total);
      const auto elements = plan_.graph[update.value].shape.elements(batch);
      const size_t bytes = checked_product(static_cast<size_t>(elements), sizeof(double));
      l.total = checked_sum(l.total, align_up(bytes, kWorkspaceAlignment));
    }
    l.sweeps = l.total;
    size_t largest = 0;
    for (const SweepRunner& sweep : sweeps_) {
      largest = std::max(largest, sweep.workspace_size(batch));
    }
    l.total = checked_sum(l.total, largest);
    return l;
  }

  void copy_remaining(const Addresses& addresses) const {
    const Graph& graph = plan_.graph;
    const auto source = [&](ValueId value) -> Memory {
      const Shape& shape = graph[value].shape;
      if (addresses.is_placed(value)) return addresses.locate(value, shape);
      const ValueId real = behind_views(graph, value);
      if (graph[real].kind == NodeKind::constant) {
        return {reinterpret_cast<std::byte*>(const_cast<double*>(&graph[real].constant)),
                {},
                DType::f64};
      }
      return addresses.locate(real, shape);
    };
    for (size_t i = 0; i < graph.results.size(); ++i) {
      const ValueId value = graph.results[i].value;
      const Placement& placement = plan_.placements[static_cast<size_t>(value)];
      if (placement.kind == Placement::Kind::result && placement.index == static_cast<int>(i)) {
        continue;
      }
      const Shape& shape = graph[value].shape;
      copy_tensor(source(value), addresses.result(i, shape), extents_of(shape, addresses.batch()),
                  isa_.level);
    }
    for (const Update& update : graph.updates) {
      const Shape& shape = graph[update.value].shape;
      copy_tensor(source(update.value), addresses.leaf(update.buffer, shape),
                  extents_of(shape, addresses.batch()), isa_.level);
    }
  }

  Plan plan_;
  Isa isa_;
  std::deque<SweepRunner> sweeps_;
  std::vector<Step> steps_;
  std::once_flag frozen_once_;
  std::vector<size_t> frozen_bytes_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Executable> make_cpu_executable(Plan plan, const ProgramOptions& options) {
  return std::make_unique<cpu::CpuExecutable>(std::move(plan), options);
}

}  // namespace ingot
