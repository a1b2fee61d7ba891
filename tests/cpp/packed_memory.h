// A right operand packed for tests of products.
#pragma once

#include <gtest/gtest.h>

#include "cpu/product/buffers.h"
#include "cpu/product/provider.h"

namespace ingot::cpu {

class PackedMemory {
 public:
  PackedMemory(const ProductProvider& provider, const ProductCall& call) {
    const size_t bytes = provider.packed_bytes(call);
    EXPECT_GT(bytes, 0u);
    provider.pack(call, memory_.reserve(bytes));
  }
  const std::byte* data() const { return memory_.data(); }

 private:
  Buffer memory_;
};

}  // namespace ingot::cpu
