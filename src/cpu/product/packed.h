// A right operand that a provider packed for many calls, in memory of the caller's. It begins with
// this header, by which the provider knows its own work, and serves that operand alone: valid while
// b is neither changed nor freed, which the caller answers for. Calls of other providers ignore it.
#pragma once

#include <cstdint>

#include "cpu/product/provider.h"

namespace ingot::cpu {

struct alignas(64) PackedHeader {
  const void* by = nullptr;  // what reads it: a provider's table of kernels
  int64_t variant = 0;
  const void* b = nullptr;
  int64_t ldb = 0, n = 0, k = 0;
  int64_t transpose_b = 0;

  friend bool operator==(const PackedHeader&, const PackedHeader&) = default;
};

inline PackedHeader header_of(const ProductCall& call, const void* by, int64_t variant = 0) {
  return {by, variant, call.b, call.ldb, call.n, call.k, call.transpose_b ? 1 : 0};
}

// What follows the header in the call's packed operand; nullptr where it is another's.
inline const std::byte* packed_by(const ProductCall& call, const PackedHeader& wanted) {
  const auto* header = reinterpret_cast<const PackedHeader*>(call.packed_b);
  return header != nullptr && *header == wanted ? call.packed_b + sizeof(PackedHeader) : nullptr;
}

}  // namespace ingot::cpu
