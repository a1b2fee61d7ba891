// Launch programs of the calls seen last, by what they follow from.
#pragma once

#include <functional>
#include <memory>
#include <shared_mutex>
#include <span>
#include <vector>

#include "ingot/ingot.h"
#include "program/launch_program.h"

namespace ingot::cuda {

// All that a launch program follows from: of the tensors' addresses, how they are aligned.
struct CallLayout {
  int sm;
  int64_t batch;
  bool frozen;
  std::span<const ingot_tensor> tensors;
};

class ProgramCache {
 public:
  using Make = std::function<LaunchProgram()>;

  std::shared_ptr<const LaunchProgram> get(const CallLayout& call, const Make& make);

 private:
  static constexpr size_t kKept = 32;
  struct Kept {
    CallLayout call;
    std::vector<ingot_tensor> tensors;
    std::shared_ptr<const LaunchProgram> program;
  };
  std::shared_ptr<const LaunchProgram> find(const CallLayout& call) const;

  mutable std::shared_mutex mutex_;
  std::vector<Kept> kept_;
  size_t next_ = 0;  // that gives way
};

}  // namespace ingot::cuda
