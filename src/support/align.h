// Sizes rounded up to multiples of an alignment.
#pragma once

#include <cstddef>

namespace ingot {

// Buffers of a workspace start at multiples of it.
inline constexpr size_t kWorkspaceAlignment = 256;

constexpr size_t align_up(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace ingot
