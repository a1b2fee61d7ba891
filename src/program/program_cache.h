// Programs of the calls seen last, by what they follow from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "ingot/ingot.h"

namespace ingot {

// Call: all that a program follows from beside the tensors' layouts, with ==; Call::kKept, how many
// are kept; and Call::aligned_alike(a, b), of two tensors, whether what counts of their addresses
// is the same.
template <class Program, class Call>
class ProgramCache {
 public:
  template <class Make>
  std::shared_ptr<const Program> get(const Call& call, std::span<const ingot_tensor> tensors,
                                     Make&& make) {
    if (auto found = find(call, tensors)) return found;
    auto program = std::make_shared<const Program>(make());
    Kept made{call, {tensors.begin(), tensors.end()}, program};
    const std::unique_lock lock(mutex_);
    if (kept_.size() < Call::kKept) {
      kept_.push_back(std::move(made));
    } else {
      kept_[next_] = std::move(made);
      next_ = (next_ + 1) % Call::kKept;
    }
    return program;
  }

 private:
  struct Kept {
    Call call;
    std::vector<ingot_tensor> tensors;
    std::shared_ptr<const Program> program;
  };

  static bool same(const ingot_tensor& a, const ingot_tensor& b) {
    static_assert(offsetof(ingot_tensor, data) == 0);
    constexpr size_t kBehind = sizeof(a.data);
    return Call::aligned_alike(a, b) &&
           std::memcmp(reinterpret_cast<const std::byte*>(&a) + kBehind,
                       reinterpret_cast<const std::byte*>(&b) + kBehind, sizeof(a) - kBehind) == 0;
  }

  std::shared_ptr<const Program> find(const Call& call,
                                      std::span<const ingot_tensor> tensors) const {
    const std::shared_lock lock(mutex_);
    for (const Kept& kept : kept_) {
      if (kept.call == call && std::equal(kept.tensors.begin(), kept.tensors.end(), tensors.begin(),
                                          tensors.end(), same)) {
        return kept.program;
      }
    }
    return nullptr;
  }

  mutable std::shared_mutex mutex_;
  std::vector<Kept> kept_;
  size_t next_ = 0;  // that gives way
};

}  // namespace ingot
