#include "cpu/product/amx/nonfinite.h"

#include <algorithm>

#include "cpu/product/own.h"

namespace ingot::cpu::amx {
namespace {

// Our own fp32 product takes some ten times as long as this one for the same work.
constexpr double kLargestShare = 1.0 / 16;

// Rows of a matrix, or columns where across, one after the other.
std::vector<float> gather(const void* matrix, int64_t ld, bool across,
                          const std::vector<int64_t>& rows, int64_t depth) {
  const auto* from = static_cast<const float*>(matrix);
  std::vector<float> dense;
  dense.reserve(rows.size() * static_cast<size_t>(depth));
  for (const int64_t row : rows) {
    for (int64_t k = 0; k < depth; ++k) dense.push_back(from[across ? k * ld + row : row * ld + k]);
  }
  return dense;
}

void recompute_rows(const ProductProvider& own, const ProductCall& call,
                    const std::vector<int64_t>& rows) {
  const std::vector<float> a = gather(call.a, call.lda, call.transpose_a, rows, call.k);
  std::vector<float> c(rows.size() * static_cast<size_t>(call.n));
  ProductCall some = call;
  some.m = static_cast<int64_t>(rows.size());
  some.a = a.data();
  some.lda = call.k;
  some.transpose_a = false;
  some.c = c.data();
  some.ldc = call.n;
  own.run(some);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(c.data() + i * static_cast<size_t>(call.n), call.n,
                static_cast<float*>(call.c) + rows[i] * call.ldc);
  }
}

void recompute_columns(const ProductProvider& own, const ProductCall& call,
                       const std::vector<int64_t>& columns) {
  const std::vector<float> b = gather(call.b, call.ldb, !call.transpose_b, columns, call.k);
  const auto count = static_cast<int64_t>(columns.size());
  std::vector<float> c(columns.size() * static_cast<size_t>(call.m));
  ProductCall some = call;
  some.n = count;
  some.b = b.data();
  some.ldb = call.k;
  some.transpose_b = true;
  some.c = c.data();
  some.ldc = count;
  own.run(some);
  auto* const out = static_cast<float*>(call.c);
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < count; ++j) {
      out[i * call.ldc + columns[static_cast<size_t>(j)]] = c[static_cast<size_t>(i * count + j)];
    }
  }
}

}  // namespace

bool recompute(const Isa& isa, const ProductCall& call, const std::vector<int64_t>& rows,
               const std::vector<int64_t>& columns) {
  if (rows.empty() && columns.empty()) return true;
  const double share = static_cast<double>(rows.size()) / static_cast<double>(call.m) +
                       static_cast<double>(columns.size()) / static_cast<double>(call.n);
  if (share > kLargestShare && rows.size() + columns.size() > 2) return false;
  const auto own = own_product(isa, true);
  if (!rows.empty()) recompute_rows(*own, call, rows);
  if (!columns.empty()) recompute_columns(*own, call, columns);
  return true;
}

}  // namespace ingot::cpu::amx
