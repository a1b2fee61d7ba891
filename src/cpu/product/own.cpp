// Our own portable product: panels packed for a register tile, blocked for three levels of cache
// (Goto and van de Geijn, 2008). Threads take rectangles of c; every element of c is summed in the
// same order whatever the rectangle, so bits do not depend on the number of threads.
#include "cpu/product/own.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "cpu/half.h"
#include "cpu/product/kernels.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

// A panel of b, kBlockK × tile columns, stays in L1; a block of a, kBlockRows × kBlockK, in L2; a
// block of b, kBlockK × kBlockColumns, in L3.
constexpr int64_t kBlockK = 256;
constexpr int64_t kBlockRows = 448;
constexpr int64_t kBlockColumns = 2048;
// Below this a second thread costs more than it brings.
constexpr double kFlopsPerThread = 1e6;
// Up to so many rows, packing b costs more than the products that it serves.
constexpr int64_t kDotRows = 4;

// Where it was measured faster than MKL on a processor that is not Intel's (bench/cpp/cpu_sweeps).
constexpr int64_t kPreferredRows = 32;
constexpr double kPreferredProducts = 4e6;
constexpr double kDotElements = 1e6;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> allocate(int64_t elements) {
  const size_t bytes =
      (static_cast<size_t>(std::max<int64_t>(elements, 1)) * sizeof(T) + 63) & ~size_t{63};
  void* p = std::aligned_alloc(64, bytes);
  if (p == nullptr) {
    fail(INGOT_FAILED, "matrix product: no memory for {} bytes of packing buffers", bytes);
  }
  return Buffer<T>(static_cast<T*>(p));
}

constexpr int64_t round_up(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

template <class T>
struct Operands {
  int64_t m, n, k;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  bool transpose_b;
  T* c;
  int64_t ldc;
  bool transpose_a = false;
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `index` of `parts` nearly equal ones, cut at multiples of `unit`.
Range part_of(int64_t extent, int64_t parts, int64_t index, int64_t unit) {
  const int64_t units = (extent + unit - 1) / unit;
  const auto cut = [&](int64_t i) { return std::min(extent, units * i / parts * unit); };
  return {cut(index), cut(index + 1)};
}

template <class T>
void pack_b(const ProductKernels<T>& kernels, const Operands<T>& o, Range columns, Range depth,
            T* packed) {
  const int64_t width = kernels.tile_columns;
  for (int64_t j = columns.begin; j < columns.end; j += width, packed += width * depth.size()) {
    const int64_t count = std::min(width, columns.end - j);
    if (o.transpose_b) {
      kernels.pack_rows(o.b + j * o.ldb + depth.begin, o.ldb, count, depth.size(), width, packed);
    } else {
      kernels.pack_columns(o.b + depth.begin * o.ldb + j, o.ldb, count, depth.size(), width,
                           packed);
    }
  }
}

template <class T>
void pack_a(const ProductKernels<T>& kernels, const Operands<T>& o, Range rows, Range depth,
            T* packed) {
  const int64_t width = kernels.tile_rows;
  for (int64_t i = rows.begin; i < rows.end; i += width, packed += width * depth.size()) {
    const int64_t count = std::min(width, rows.end - i);
    if (o.transpose_a) {
      kernels.pack_columns(o.a + depth.begin * o.lda + i, o.lda, count, depth.size(), width,
                           packed);
    } else {
      kernels.pack_rows(o.a + i * o.lda + depth.begin, o.lda, count, depth.size(), width, packed);
    }
  }
}

// Panel of b by panel of b, each against all panels of a.
template <class T>
void multiply_block(const ProductKernels<T>& kernels, const Operands<T>& o, Range rows,
                    Range columns, Range depth, const T* packed_a, const T* packed_b) {
  for (int64_t j = columns.begin; j < columns.end; j += kernels.tile_columns) {
    const T* b_panel = packed_b + (j - columns.begin) * depth.size();
    for (int64_t i = rows.begin; i < rows.end; i += kernels.tile_rows) {
      kernels.tile(depth.size(), packed_a + (i - rows.begin) * depth.size(), b_panel,
                   o.c + i * o.ldc + j, o.ldc, std::min<int64_t>(kernels.tile_rows, rows.end - i),
                   std::min<int64_t>(kernels.tile_columns, columns.end - j), depth.begin > 0);
    }
  }
}

template <class T>
void multiply_rectangle(const ProductKernels<T>& kernels, const Operands<T>& o, Range rows,
                        Range columns) {
  if (rows.size() <= 0 || columns.size() <= 0) return;
  const int64_t depth = std::min(o.k, kBlockK);
  const int64_t high = round_up(std::min(rows.size(), kBlockRows), int64_t{kernels.tile_rows});
  const int64_t wide = round_up(std::min(columns.size(), kBlockColumns), kernels.tile_columns);
  const Buffer<T> packed_a = allocate<T>(high * depth), packed_b = allocate<T>(wide * depth);
  for (int64_t j = columns.begin; j < columns.end; j += kBlockColumns) {
    const Range some_columns{j, std::min(columns.end, j + kBlockColumns)};
    for (int64_t p = 0; p < o.k; p += kBlockK) {
      const Range some_depth{p, std::min(o.k, p + kBlockK)};
      pack_b(kernels, o, some_columns, some_depth, packed_b.get());
      for (int64_t i = rows.begin; i < rows.end; i += high) {
        const Range some_rows{i, std::min(rows.end, i + high)};
        pack_a(kernels, o, some_rows, some_depth, packed_a.get());
        multiply_block(kernels, o, some_rows, some_columns, some_depth, packed_a.get(),
                       packed_b.get());
      }
    }
  }
}

// threads = first × second, cutting m and n so that the least is packed twice.
std::array<int64_t, 2> grid_of(int64_t m, int64_t n, int64_t threads) {
  std::array<int64_t, 2> best{1, threads};
  double best_perimeter = 1e300;
  for (int64_t over_m = 1; over_m <= threads; ++over_m) {
    if (threads % over_m != 0) continue;
    const int64_t over_n = threads / over_m;
    const double perimeter = static_cast<double>(m) / static_cast<double>(over_m) +
                             static_cast<double>(n) / static_cast<double>(over_n);
    if (perimeter < best_perimeter) {
      best_perimeter = perimeter;
      best = {over_m, over_n};
    }
  }
  return best;
}

int64_t threads_for(double flops) {
  const double useful = std::max(1.0, flops / kFlopsPerThread);
  return static_cast<int64_t>(std::min(static_cast<double>(thread_count()), useful));
}

template <class T>
void multiply_few_rows(const ProductKernels<T>& kernels, const Operands<T>& o) {
  const int64_t threads = threads_for(4.0 * static_cast<double>(o.n) * static_cast<double>(o.k));
  parallel_for(threads, [&](int64_t task, int) {
    const Range columns = part_of(o.n, threads, task, 16);
    for (int64_t j = columns.begin; j < columns.end; ++j) {
      kernels.dot_rows(o.k, o.a, o.lda, o.m, o.b + j * o.ldb, o.c + j, o.ldc);
    }
  });
}

template <class T>
void multiply(const ProductKernels<T>& kernels, const Operands<T>& o) {
  if (o.k == 0) {
    for (int64_t i = 0; i < o.m; ++i) std::fill_n(o.c + i * o.ldc, o.n, T(0));
    return;
  }
  if (o.transpose_b && !o.transpose_a && o.m <= kDotRows) return multiply_few_rows(kernels, o);
  const double flops =
      2.0 * static_cast<double>(o.m) * static_cast<double>(o.n) * static_cast<double>(o.k);
  const auto [over_m, over_n] = grid_of(o.m, o.n, threads_for(flops));
  parallel_for(over_m * over_n, [&, over_m = over_m, over_n = over_n](int64_t task, int) {
    multiply_rectangle(kernels, o, part_of(o.m, over_m, task % over_m, kernels.tile_rows),
                       part_of(o.n, over_n, task / over_m, kernels.tile_columns));
  });
}

// Half-precision operands, widened whole: correct everywhere, fast nowhere. A machine where it
// matters has a library that takes them.
void multiply_half(const ProductKernels<float>& kernels, const ProductCall& call) {
  const bool bf16 = call.dtype == INGOT_BF16;
  const auto widen = [&](const void* source, int64_t ld, int64_t rows, int64_t columns) {
    Buffer<float> wide = allocate<float>(rows * columns);
    const auto* bits = static_cast<const uint16_t*>(source);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        wide[static_cast<size_t>(i * columns + j)] = half_to_float(bits[i * ld + j], bf16);
      }
    }
    return wide;
  };
  const int64_t b_rows = call.transpose_b ? call.n : call.k;
  const int64_t b_columns = call.transpose_b ? call.k : call.n;
  const int64_t a_rows = call.transpose_a ? call.k : call.m;
  const int64_t a_columns = call.transpose_a ? call.m : call.k;
  const Buffer<float> a = widen(call.a, call.lda, a_rows, a_columns);
  const Buffer<float> b = widen(call.b, call.ldb, b_rows, b_columns);
  const Buffer<float> c = allocate<float>(call.m * call.n);
  multiply(kernels, Operands<float>{call.m, call.n, call.k, a.get(), a_columns, b.get(), b_columns,
                                    call.transpose_b, c.get(), call.n, call.transpose_a});
  auto* out = static_cast<uint16_t*>(call.c);
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) {
      out[i * call.ldc + j] = float_to_half(c[static_cast<size_t>(i * call.n + j)], bf16);
    }
  }
}

template <class T>
Operands<T> operands(const ProductCall& call) {
  return {call.m,
          call.n,
          call.k,
          static_cast<const T*>(call.a),
          call.lda,
          static_cast<const T*>(call.b),
          call.ldb,
          call.transpose_b,
          static_cast<T*>(call.c),
          call.ldc,
          call.transpose_a};
}

class OwnProduct final : public ProductProvider {
 public:
  OwnProduct(Level level, bool last_resort) : level_(level), last_resort_(last_resort) {}

  std::string name() const override {
    return "ingot product (" + std::string(name_of(level_)) + ")";
  }

  bool takes(const ProductCall& call) const override {
    if (last_resort_) return true;
    if (call.dtype != INGOT_F32) return false;
    const double elements = static_cast<double>(call.n) * static_cast<double>(call.k);
    if (call.m <= kDotRows && !call.transpose_a) {
      return call.transpose_b && elements >= kDotElements;
    }
    return call.m >= kPreferredRows && elements * static_cast<double>(call.m) >= kPreferredProducts;
  }

  bool run(const ProductCall& call) const override {
    if (call.m <= 0 || call.n <= 0) return true;
    if (call.dtype == INGOT_F64) {
      multiply(product_kernels<double>(level_), operands<double>(call));
    } else if (call.dtype == INGOT_F32) {
      multiply(product_kernels<float>(level_), operands<float>(call));
    } else if (call.dtype == INGOT_F16 || call.dtype == INGOT_BF16) {
      multiply_half(product_kernels<float>(level_), call);
    } else {
      return false;
    }
    return true;
  }

 private:
  Level level_;
  bool last_resort_;
};

}  // namespace

namespace baseline {
template <class T>
const ProductKernels<T>& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
template <class T>
const ProductKernels<T>& kernels();
}
namespace avx512 {
template <class T>
const ProductKernels<T>& kernels();
}
#endif

template <class T>
const ProductKernels<T>& product_kernels(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512) return avx512::kernels<T>();
  if (level == Level::avx2) return avx2::kernels<T>();
#endif
  (void)level;
  return baseline::kernels<T>();
}
template const ProductKernels<float>& product_kernels<float>(Level);
template const ProductKernels<double>& product_kernels<double>(Level);

std::shared_ptr<const ProductProvider> own_product(const Isa& isa, bool last_resort) {
  return std::make_shared<OwnProduct>(isa.level, last_resort);
}

}  // namespace ingot::cpu
