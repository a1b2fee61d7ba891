// What a backend makes of a plan: something that can be prepared and run. The C ABI (src/api) holds
// one of these per program; src/cpu and src/cuda each provide one.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "ingot/ingot.h"
#include "plan/plan.h"
#include "support/error.h"

namespace ingot {

struct ProgramOptions {
  Target::Device device = Target::Device::cpu;
  Precision precision = Precision::fp32;
  bool real_rewrites = false;
  int sm = 90;                                             // planned for where no GPU is present
  std::string cache_dir;                                   // empty: the default of this user
  nlohmann::json capabilities = nlohmann::json::object();  // features masked for tests
  // Products may be streamed (kernels/product/hopper/streamed.cuh), and each number of samples
  // compiles what it needs when it comes.
  bool streamed = false;
  // Results overlap with no other tensor of a call: until they are written, buffers may lie there.
  bool scratch_results = false;
  // Configurations of products by the key that describe() gives, in the place of the choice.
  nlohmann::json product_choices = nlohmann::json::object();
};

class Executable {
 public:
  virtual ~Executable() = default;

  // Compiles what a run with tensors laid out like these needs (none: dense ones), and touches no
  // device: for another thread, ahead of the run.
  virtual void compile(int64_t batch, std::span<const ingot_tensor> tensors) = 0;
  // Compiles one more kernel, which a run with another batch size may need; false where all are
  // there.
  virtual bool compile_another(int64_t batch) = 0;
  // Makes every run with this batch size on this device free of compilation and allocation.
  virtual void prepare(int64_t batch, int device) = 0;
  virtual size_t workspace_size(int64_t batch) = 0;
  // For tensors laid out like these, which may take other kernels and another workspace: its bytes.
  virtual size_t prepare_call(int64_t batch, std::span<const ingot_tensor> tensors) = 0;
  // tensors: leaves in order, then results in order. The buffers of updates are written in place.
  virtual void run(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                   size_t workspace_bytes, void* stream) = 0;
  // Weights kept for inference (see ingot.h): by sweep, the bytes that its product's weight takes,
  // multiples of 256; 0 where it is not kept.
  virtual const std::vector<size_t>& frozen_bytes() = 0;
  size_t frozen_size();
  virtual void freeze(int64_t batch, std::span<const ingot_tensor> tensors, void* frozen,
                      void* stream) = 0;
  virtual void run_frozen(int64_t batch, std::span<const ingot_tensor> tensors, void* workspace,
                          size_t workspace_bytes, const void* frozen, void* stream) = 0;
  // What products of f32 operands are computed in, which may be more accurate than was asked for:
  // that of the least accurate; ieee where there are none.
  virtual Precision precision() = 0;
  // Whether a run with tensors laid out like these launches a GPU library's product.
  virtual bool uses_library(int64_t batch, std::span<const ingot_tensor> tensors) = 0;
  // Whether a product's weight and stored result must be matrices in the caller's memory; else any
  // strides will do.
  virtual bool wants_matrices() const = 0;
  // Backend's part of explain(): per sweep what runs it (provider, kernels, tiles, source text).
  virtual nlohmann::json describe(int64_t batch) = 0;
};

// What a run asks of the memory that it is given.
inline void check_workspace(size_t needed, const void* workspace, size_t bytes) {
  if (bytes < needed || (needed != 0 && workspace == nullptr)) {
    fail(INGOT_INVALID_ARGUMENT,
         "this call needs a workspace of {} bytes, got {}: ingot_program_workspace_size says how "
         "many "
         "a batch size takes, ingot_program_prepare_call how many these tensors take",
         needed, workspace == nullptr ? 0 : bytes);
  }
  if (needed != 0 && reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    fail(INGOT_INVALID_ARGUMENT, "the workspace must be aligned to 256 bytes");
  }
}

inline size_t Executable::frozen_size() {
  size_t total = 0;
  for (const size_t bytes : frozen_bytes()) total += bytes;
  return total;
}

// The target that a backend plans for, given the options and what this machine offers.
Target cpu_target(const ProgramOptions& options);
Target cuda_target(const ProgramOptions& options);
std::unique_ptr<Executable> make_cpu_executable(Plan plan, const ProgramOptions& options);
std::unique_ptr<Executable> make_cuda_executable(Plan plan, const ProgramOptions& options);

// Each backend's part of doctor().
nlohmann::json describe_cpu_machine();
nlohmann::json describe_cuda_machine();

}  // namespace ingot
