// Memory that calls reuse: page faults on fresh buffers would cost several per cent of a product.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "support/error.h"

namespace ingot::cpu {

class Buffer {
 public:
  // At least so many bytes, 64-byte aligned; what was in it is lost where it grows.
  std::byte* reserve(size_t bytes) {
    if (bytes <= size_) return data_.get();
    data_.reset();
    size_ = 0;
    const size_t unit = bytes >= kHugePage / 2 ? kHugePage : 4096;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(unit, rounded)));
    if (data_ == nullptr) {
      fail(INGOT_FAILED, "matrix product: no memory for {} bytes of packing buffers", rounded);
    }
#if defined(__linux__)
    if (unit == kHugePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
    size_ = rounded;
    return data_.get();
  }
  const std::byte* data() const {
    return data_.get();
  }
  size_t size() const {
    return size_;
  }
  void release_above(size_t bytes) {
    if (size_ <= bytes) return;
    data_.reset();
    size_ = 0;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

}  // namespace ingot::cpu
