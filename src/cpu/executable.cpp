// The CPU backend: a plan lowered to what a call does, and that done on the host's threads, in the
// caller's memory.
#include "backend/executable.h"

#include <algorithm>
#include <mutex>

#include "cpu/lowering.h"
#include "cpu/product/packed.h"
#include "program/program_cache.h"
#include "support/threads.h"

namespace ingot {
namespace cpu {
namespace {

// What a host program follows from beside its tensors, of whose addresses it only counts whether
// they are those of whole elements.
struct HostCall {
  // Batch sizes that take turns: a small call takes less time than its lowering.
  static constexpr size_t kKept = 256;
  int64_t batch;
  bool frozen;
  int threads = thread_count();
  bool forked = in_forked_child();
  uint64_t products = registered_products();

  bool operator==(const HostCall&) const = default;
  static bool aligned_alike(const ingot_tensor& a, const ingot_tensor& b) {
    const uintptr_t rest = size_of(static_cast<DType>(a.dtype)) - 1;
    return ((reinterpret_cast<uintptr_t>(a.data) ^ reinterpret_cast<uintptr_t>(b.data)) & rest) ==
           0;
  }
};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(Plan plan, const ProgramOptions& options)
      : host_(std::move(plan), detect_isa(options.capabilities)) {}

  void compile(int64_t, std::span<const ingot_tensor>) override {}
  bool compile_another(int64_t) override { return false; }
  void prepare(int64_t batch, int) override { workspace_size(batch); }

  size_t workspace_size(int64_t batch) override {
    return prepare_call(batch, dense_tensors(host_.plan.graph, batch));
  }

  size_t prepare_call(int64_t batch, std::span<const ingot_tensor> tensors) override {
    return program_of({batch, false}, tensors)->workspace_bytes;
  }

  void run(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
           size_t workspace_bytes, void* stream) override {
    run_frozen(batch, tensors, workspace, workspace_bytes, nullptr, stream);
  }

  // What they were when first asked for, whatever products are registered later.
  const std::vector<size_t>& frozen_bytes() override {
    std::call_once(frozen_once_, [&] { frozen_bytes_ = cpu::frozen_bytes(host_); });
    return frozen_bytes_;
  }

  Precision precision() override {
    const Plan& plan = host_.plan;
    const auto in_f32 = [&](const Sweep& sweep) {
      return sweep.matmul != kNoValue && plan.graph[sweep.matmul].dtype == DType::f32;
    };
    const auto providers = product_providers(host_.isa);
    const bool split =
        std::any_of(plan.sweeps.begin(), plan.sweeps.end(), in_f32) &&
        std::any_of(providers.begin(), providers.end(), [](const auto& p) { return p->splits(); });
    return split ? Precision::fp32 : Precision::ieee;
  }

  bool uses_library(int64_t, std::span<const ingot_tensor>) override { return false; }

  bool wants_matrices() const override { return false; }

  void freeze(int64_t batch, std::span<const ingot_tensor> tensors, void* frozen, void*) override {
    auto* const memory = static_cast<std::byte*>(frozen);
    std::byte* at = memory;
    for (const size_t bytes : frozen_bytes()) {
      if (bytes != 0) new (at) PackedHeader();  // nobody's
      at += bytes;
    }
    cpu::run(lower_packing(host_, batch, tensors, frozen_bytes()), {tensors, nullptr, memory});
  }

  void run_frozen(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                  size_t workspace_bytes, const void* frozen, void*) override {
    const auto program = program_of({batch, frozen != nullptr}, tensors);
    check_workspace(program->workspace_bytes, workspace, workspace_bytes);
    // It is only read.
    auto* const packed = static_cast<std::byte*>(const_cast<void*>(frozen));
    cpu::run(*program, {tensors, static_cast<std::byte*>(workspace), packed});
  }

  nlohmann::json describe(int64_t batch) override {
    const auto program = program_of({batch, false}, dense_tensors(host_.plan.graph, batch));
    return {{"backend", "cpu"},
            {"instructions", name_of(host_.isa.level)},
            {"threads", thread_count()},
            {"thread_runtime", thread_runtime_name()},
            {"sweeps", describe_sweeps(*program)},
            {"program", cpu::describe(*program, host_.plan)}};
  }

 private:
  std::shared_ptr<const HostProgram> program_of(const HostCall& call,
                                                std::span<const ingot_tensor> tensors) {
    return programs_.get(call, tensors, [&] {
      const auto frozen = call.frozen ? std::span(frozen_bytes()) : std::span<const size_t>();
      return lower(host_, call.batch, tensors, frozen);
    });
  }

  nlohmann::json describe_sweeps(const HostProgram& program) const {
    nlohmann::json sweeps = nlohmann::json::array();
    for (const HostSweep& host : host_.sweeps) {
      nlohmann::json told = {{"name", host.sweep.name}, {"kind", name_of(host.sweep.kind)}};
      if (host.has_body) {
        told["operations"] = host.body.steps.size();
        told["registers"] = host.body.buffers.size();
      }
      if (host.has_tail) told["tail_operations"] = host.tail.steps.size();
      sweeps.push_back(std::move(told));
    }
    const auto tell_body = [&](nlohmann::json& sweep, const PhaseStep& step) {
      sweep["tile"] = step.tiles.tile;
      sweep["tasks"] = step.tiles.tasks();
    };
    for (const HostStep& step : program.steps) {
      if (step.sweep < 0) continue;
      nlohmann::json& sweep = sweeps[static_cast<size_t>(step.sweep)];
      if (const auto* phase = std::get_if<PhaseStep>(&step.what); phase && !phase->tail) {
        tell_body(sweep, *phase);
      }
      const auto* product = std::get_if<ProductStep>(&step.what);
      if (product == nullptr) continue;
      if (!product->providers.empty()) sweep["product"] = product->providers[0]->name();
      if (!product->behind) continue;
      nlohmann::json& behind = sweeps[static_cast<size_t>(product->follower)];
      behind["on_blocks_of"] = sweep["name"];
      tell_body(behind, *product->behind);
    }
    return sweeps;
  }

  const HostPlan host_;
  ProgramCache<HostProgram, HostCall> programs_;
  std::once_flag frozen_once_;
  std::vector<size_t> frozen_bytes_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Executable> make_cpu_executable(Plan plan, const ProgramOptions& options) {
  return std::make_unique<cpu::CpuExecutable>(std::move(plan), options);
}

}  // namespace ingot
