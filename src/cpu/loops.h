// Nested loops over a box for several operands at once, with as few and as long loops as their
// strides allow.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/tiling.h"

namespace ingot::cpu {

template <size_t operands>
struct Loops {
  using Offsets = std::array<int64_t, operands>;
  // Innermost first; loops that are not needed have size 1 and stride 0.
  std::array<int64_t, kAxes> size;
  std::array<Offsets, kAxes> stride;

  void build(const Extents& sizes, const std::array<Extents, operands>& strides,
             const AxisOrder& order = kNaturalOrder) {
    size.fill(1);
    stride.fill(Offsets{});
    size_t depth = 0;
    for (size_t i = kAxes; i-- > 0;) {
      const size_t a = order[i];
      if (sizes[a] == 1) continue;
      bool merges = depth > 0;
      for (size_t o = 0; o < operands && merges; ++o) {
        merges = strides[o][a] == stride[depth - 1][o] * size[depth - 1];
      }
      if (merges) {
        size[depth - 1] *= sizes[a];
        continue;
      }
      size[depth] = sizes[a];
      for (size_t o = 0; o < operands; ++o) stride[depth][o] = strides[o][a];
      ++depth;
    }
  }

  // Where row number `index` begins, a row being the innermost loop.
  Offsets row(int64_t index) const {
    Offsets offset{};
    for (size_t depth = 1; depth < kAxes; ++depth) {
      const int64_t at = index % size[depth];
      index /= size[depth];
      for (size_t o = 0; o < operands; ++o) offset[o] += at * stride[depth][o];
    }
    return offset;
  }

  // Calls body(offsets) for each index of the loops outside of the inner two.
  template <class Body>
  void for_each_outer(Body&& body) const {
    for (int64_t i = 0; i < size[3]; ++i) {
      for (int64_t j = 0; j < size[2]; ++j) {
        Offsets offset;
        for (size_t o = 0; o < operands; ++o) offset[o] = i * stride[3][o] + j * stride[2][o];
        body(offset);
      }
    }
  }

  // The same outside of the innermost one.
  template <class Body>
  void for_each_row(Body&& body) const {
    for_each_outer([&](const Offsets& outer) {
      for (int64_t i = 0; i < size[1]; ++i) {
        Offsets offset;
        for (size_t o = 0; o < operands; ++o) offset[o] = outer[o] + i * stride[1][o];
        body(offset);
      }
    });
  }
};

}  // namespace ingot::cpu
