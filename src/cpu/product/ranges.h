// Ranges of rows or columns, and their cuts.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ingot::cpu {

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int64_t round_up(int64_t value, int64_t to) {
  return ceil_div(value, to) * to;
}

// Part `index` of `parts` nearly equal ones, cut at multiples of `unit` from its beginning.
inline Range part_of(Range whole, int64_t parts, int64_t index, int64_t unit = 1) {
  const int64_t units = ceil_div(whole.size(), unit);
  const auto cut = [&](int64_t i) {
    return std::min(whole.end, whole.begin + units * i / parts * unit);
  };
  return {cut(index), cut(index + 1)};
}

}  // namespace ingot::cpu
