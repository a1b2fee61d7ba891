// Our own portable product as a provider: what it takes, and the cases beside the blocked one.
#include "cpu/product/own.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "cpu/half.h"
#include "cpu/product/blocked.h"
#include "cpu/product/buffers.h"
#include "cpu/product/kernels.h"
#include "cpu/product/packed.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

// With so few rows of a or of b, packing the other would cost more than the products that it
// serves; vectors along k want some of it, fewer the fewer rows there are.
constexpr int64_t kFewRows = 8, kVeryFewRows = 4;
constexpr int64_t kLeastDotK = 128, kLeastVectorK = 64;
// Turning an element costs as much as so many operations.
constexpr double kTurningFlops = 32;
// Rows of the longer matrix that a thread takes at least.
constexpr int64_t kDotUnit = 16;

// Below these it was measured slower than MKL on a processor that is not Intel's where b lies along
// its columns.
constexpr int64_t kPreferredRowsAcross = 32;
constexpr double kPreferredProductsAcross = 4e6;

// Two matrices of a few long rows want k divided between the threads, which MKL does: with vectors
// of less than 64 bytes it then passes ours by.
constexpr int64_t kDividedRows = 16, kMostDividedRows = 24, kLeastDividedK = 512;

bool wants_k_divided(const ProductCall& call) {
  const int64_t rows = std::max(call.m, call.n);
  return rows >= kDividedRows && rows <= kMostDividedRows && call.k >= kLeastDividedK;
}

// Whether few rows are multiplied with vectors along the other matrix's rows: those are short, and
// results lie beside each other.
template <class Call>
bool turns(const Call& o) {
  if (o.m > kMostTurned) return o.n == 1 && o.k < kLeastVectorK;
  return o.k < (o.m == 1 || o.n == 1 ? kLeastVectorK : kLeastDotK);
}

template <class Call>
bool has_few_rows(const Call& o) {
  if (!o.transpose_b || o.transpose_a || std::min(o.m, o.n) > kFewRows) return false;
  return turns(o) || o.k >= (std::min(o.m, o.n) <= kVeryFewRows ? kLeastVectorK : kLeastDotK);
}

template <class T>
void multiply_few_rows(const ProductKernels<T>& kernels, const Operands<T>& o) {
  const bool few_of_a = o.m <= o.n, turned = turns(o);
  const int64_t many = few_of_a ? o.n : o.m;
  const double products =
      static_cast<double>(o.m) * static_cast<double>(o.n) * static_cast<double>(o.k);
  // Memory bounds it, or turning rows: a row takes as long for one product as for some.
  const double once = (turned ? kTurningFlops : 4.0) * static_cast<double>(many * o.k);
  const int64_t threads = threads_for(std::max(2 * products, once), 0);
  const auto dot = turned ? kernels.dot_turned : kernels.dot_rows;
  parallel_for(threads, [&](int64_t task, int) {
    const Range some = part_of({0, many}, threads, task, kDotUnit);
    if (some.size() <= 0) return;
    const T* const row = few_of_a && o.row != nullptr ? o.row + some.begin : o.row;
    if (few_of_a) {
      dot({o.k, o.a, o.lda, o.m, o.b + some.begin * o.ldb, o.ldb, some.size(), o.c + some.begin,
           o.ldc, 1, row, 0, 1});
    } else {
      dot({o.k, o.b, o.ldb, o.n, o.a + some.begin * o.lda, o.lda, some.size(),
           o.c + some.begin * o.ldc, 1, o.ldc, row, 1, 0});
    }
  });
}

template <class T>
void multiply(const ProductKernels<T>& kernels, const Operands<T>& o) {
  if (o.k == 0) {
    for (int64_t i = 0; i < o.m; ++i) std::fill_n(o.c + i * o.ldc, o.n, T(0));
    return;
  }
  if (has_few_rows(o)) return multiply_few_rows(kernels, o);
  multiply_blocked(kernels, o);
}

float* floats(Buffer& memory, int64_t count) {
  return reinterpret_cast<float*>(memory.reserve(static_cast<size_t>(count) * sizeof(float)));
}

// Half-precision operands, widened whole: correct everywhere, fast nowhere. A machine where it
// matters has a library that takes them.
void multiply_half(const ProductKernels<float>& kernels, const ProductCall& call) {
  const bool bf16 = call.dtype == INGOT_BF16;
  const auto widen = [&](const void* source, int64_t ld, int64_t rows, int64_t columns) {
    Buffer memory;
    float* const wide = floats(memory, rows * columns);
    const auto* bits = static_cast<const uint16_t*>(source);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        wide[i * columns + j] = half_to_float(bits[i * ld + j], bf16);
      }
    }
    return memory;
  };
  const int64_t b_rows = call.transpose_b ? call.n : call.k;
  const int64_t b_columns = call.transpose_b ? call.k : call.n;
  const int64_t a_rows = call.transpose_a ? call.k : call.m;
  const int64_t a_columns = call.transpose_a ? call.m : call.k;
  Buffer a = widen(call.a, call.lda, a_rows, a_columns);
  Buffer b = widen(call.b, call.ldb, b_rows, b_columns);
  Buffer sums;
  float* const c = floats(sums, call.m * call.n);
  multiply(kernels, Operands<float>{call.m, call.n, call.k, floats(a, 0), a_columns, floats(b, 0),
                                    b_columns, call.transpose_b, c, call.n, call.transpose_a});
  auto* out = static_cast<uint16_t*>(call.c);
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) {
      out[i * call.ldc + j] = float_to_half(c[i * call.n + j], bf16);
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
          call.transpose_a,
          nullptr,
          call.consumer,
          static_cast<const T*>(call.row)};
}

template <class T>
const ProductKernels<T>& kernels_for(Level level, int64_t n) {
  const ProductKernels<T>& narrow = product_kernels<T>(level, true);
  return n <= narrow.tile_columns ? narrow : product_kernels<T>(level);
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
    const double products =
        static_cast<double>(call.m) * static_cast<double>(call.n) * static_cast<double>(call.k);
    if (call.transpose_b && !call.transpose_a) {
      return level_ == Level::avx512 || !wants_k_divided(call);
    }
    return call.m >= kPreferredRowsAcross && products >= kPreferredProductsAcross;
  }

  bool run(const ProductCall& call) const override {
    if (call.m <= 0 || call.n <= 0) return true;
    if (call.dtype == INGOT_F64) {
      multiply(kernels_for<double>(level_, call.n), operands<double>(call));
    } else if (call.dtype == INGOT_F32) {
      const ProductKernels<float>& kernels = kernels_for<float>(level_, call.n);
      Operands<float> o = operands<float>(call);
      o.packed_b = reinterpret_cast<const float*>(packed_by(call, header_of(call, &kernels)));
      multiply(kernels, o);
    } else if (call.dtype == INGOT_F16 || call.dtype == INGOT_BF16) {
      multiply_half(kernels_for<float>(level_, call.n), call);
    } else {
      return false;
    }
    return true;
  }

  bool consumes(const ProductCall& call) const override {
    return call.consumer != nullptr && call.dtype == INGOT_F32 && call.m > 0 && call.n > 0 &&
           !has_few_rows(call) &&
           blocks_suit(*call.consumer, kernels_for<float>(level_, call.n).tile_columns, call.m,
                       call.n, call.k);
  }

  bool adds_row(const ProductCall& call) const override {
    return call.dtype == INGOT_F32 && call.k > 0;
  }

  size_t packed_bytes(const ProductCall& call) const override {
    if (call.dtype != INGOT_F32 || call.n <= 0 || call.k <= 0) return 0;
    const int64_t elements = packed_elements(kernels_for<float>(level_, call.n), call.n, call.k);
    return sizeof(PackedHeader) + static_cast<size_t>(elements) * sizeof(float);
  }

  void pack(const ProductCall& call, std::byte* memory) const override {
    const ProductKernels<float>& kernels = kernels_for<float>(level_, call.n);
    new (memory) PackedHeader(header_of(call, &kernels));
    pack_whole_b(kernels, operands<float>(call),
                 reinterpret_cast<float*>(memory + sizeof(PackedHeader)));
  }

 private:
  Level level_;
  bool last_resort_;
};

}  // namespace

namespace baseline {
template <class T>
const ProductKernels<T>& kernels(bool narrow);
}
#if defined(__x86_64__)
namespace avx2 {
template <class T>
const ProductKernels<T>& kernels(bool narrow);
}
namespace avx512 {
template <class T>
const ProductKernels<T>& kernels(bool narrow);
}
#endif

template <class T>
const ProductKernels<T>& product_kernels(Level level, bool narrow) {
#if defined(__x86_64__)
  if (level == Level::avx512) return avx512::kernels<T>(narrow);
  if (level == Level::avx2) return avx2::kernels<T>(narrow);
#endif
  (void)level;
  return baseline::kernels<T>(narrow);
}
template const ProductKernels<float>& product_kernels<float>(Level, bool);
template const ProductKernels<double>& product_kernels<double>(Level, bool);

std::shared_ptr<const ProductProvider> own_product(const Isa& isa, bool last_resort) {
  return std::make_shared<OwnProduct>(isa.level, last_resort);
}

}  // namespace ingot::cpu
