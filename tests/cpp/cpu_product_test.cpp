// Products of the CPU backend against sums in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <nlohmann/json.hpp>

#include "cpu/product/blas.h"
#include "cpu/product/onednn.h"
#include "cpu/product/own.h"
#include "cpu/product/provider.h"
#include "packed_memory.h"
#include "support/element.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

struct Case {
  int64_t m, n, k;
  bool transpose_b;
};

constexpr int64_t kPadding = 3;  // elements between rows

struct Problem {
  std::vector<std::byte> a, b, c;
  ProductCall call;
};

Problem make_problem(const Case& size, ingot_dtype dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Problem p;
  const auto width = static_cast<size_t>(element_size(dtype));
  const auto fill = [&](std::vector<std::byte>& data, int64_t rows, int64_t columns) {
    data.resize(static_cast<size_t>(rows * (columns + kPadding) + 1) * width);
    for (int64_t i = 0; i < rows * (columns + kPadding); ++i) {
      store_element(data.data(), dtype, i, normal(random));
    }
    return columns + kPadding;
  };
  p.call.m = size.m;
  p.call.n = size.n;
  p.call.k = size.k;
  p.call.transpose_b = size.transpose_b;
  p.call.dtype = dtype;
  p.call.lda = fill(p.a, size.m, size.k);
  p.call.ldb = size.transpose_b ? fill(p.b, size.n, size.k) : fill(p.b, size.k, size.n);
  p.call.ldc = fill(p.c, size.m, size.n);
  p.call.a = p.a.data();
  p.call.b = p.b.data();
  p.call.c = p.c.data();
  return p;
}

double exact(const Problem& p, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t q = 0; q < p.call.k; ++q) {
    const int64_t b = p.call.transpose_b ? j * p.call.ldb + q : q * p.call.ldb + j;
    sum += load_element(p.call.a, p.call.dtype, i * p.call.lda + q) *
           load_element(p.call.b, p.call.dtype, b);
  }
  return sum;
}

// Checks every element, and that nothing between the rows was written.
void check(const ProductProvider& provider, const Case& size, ingot_dtype dtype) {
  Problem p = make_problem(size, dtype, 1);
  const std::vector<std::byte> before = p.c;
  ASSERT_TRUE(provider.takes(p.call));
  ASSERT_TRUE(provider.run(p.call));
  const double epsilon = dtype == INGOT_F64   ? 1e-14
                         : dtype == INGOT_F32 ? 1e-6
                         : dtype == INGOT_F16 ? 1e-3
                                              : 8e-3;
  const double scale = std::sqrt(static_cast<double>(size.k)) + 1;
  for (int64_t i = 0; i < size.m; ++i) {
    for (int64_t j = 0; j < p.call.ldc; ++j) {
      const double found = load_element(p.c.data(), dtype, i * p.call.ldc + j);
      const double expected =
          j < size.n ? exact(p, i, j) : load_element(before.data(), dtype, i * p.call.ldc + j);
      ASSERT_NEAR(found, expected, j < size.n ? 4 * epsilon * scale : 0)
          << provider.name() << " " << size.m << "x" << size.n << "x" << size.k << " at " << i
          << "," << j;
    }
  }
}

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const nlohmann::json& masks : {nlohmann::json::object(), nlohmann::json{{"avx512", false}},
                                      nlohmann::json{{"avx2", false}}}) {
    found.push_back(detect_isa(masks));
  }
  return found;
}

const Case kCases[] = {
    {1, 1, 1, true},     {1, 100, 77, true},  {3, 5, 700, true},     {4, 33, 64, true},
    {5, 33, 64, true},   {14, 32, 256, true}, {15, 31, 257, true},   {100, 130, 300, true},
    {460, 40, 20, true}, {7, 2100, 9, true},  {1, 50, 60, false},    {29, 65, 513, false},
    {6, 16, 0, true},    {0, 4, 4, true},     {1051, 33, 260, true}, {70, 1, 100, true},
    {61, 7, 130, true},  {16, 9, 64, true},   {300, 12, 20, true},   {50, 16, 300, false},
    {2, 30, 65, true},   {7, 100, 40, true},  {6, 50, 130, true},    {100, 1, 3, true},
    {1, 70, 63, true},   {90, 3, 100, true},  {90, 8, 140, true},    {60, 40, 250, true},
    {60, 60, 250, true}, {33, 9, 1, true}};

TEST(CpuProduct, OwnMatchesDouble) {
  for (const Isa& isa : isas()) {
    const auto own = own_product(isa, true);
    for (const Case& size : kCases) {
      for (const ingot_dtype dtype : {INGOT_F32, INGOT_F64, INGOT_F16, INGOT_BF16}) {
        check(*own, size, dtype);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CpuProduct, OwnBitsDoNotDependOnThreads) {
  for (const Case& size : {Case{130, 700, 600, true}, Case{3, 5000, 300, true}}) {
    std::vector<std::vector<std::byte>> results;
    for (const int threads : {1, 2, 0}) {
      set_host_threads(nullptr, threads);
      Problem p = make_problem(size, INGOT_F32, 2);
      ASSERT_TRUE(own_product(detect_isa({}), true)->run(p.call));
      results.push_back(p.c);
    }
    set_host_threads(nullptr, 0);
    EXPECT_EQ(results[0], results[1]);
    EXPECT_EQ(results[0], results[2]);
  }
}

TEST(CpuProduct, OwnBitsAreTheSamePackedBefore) {
  for (const Isa& isa : isas()) {
    const auto own = own_product(isa, true);
    for (const Case& size : {Case{3, 50, 70, true}, Case{60, 130, 600, true},
                             Case{9, 67, 300, false}, Case{1100, 40, 30, true}}) {
      Problem p = make_problem(size, INGOT_F32, 6);
      ASSERT_TRUE(own->run(p.call));
      const std::vector<std::byte> expected = p.c;
      const PackedMemory packed(*own, p.call);
      p.call.packed_b = packed.data();
      std::fill(p.c.begin(), p.c.end(), std::byte{0});
      ASSERT_TRUE(own->run(p.call));
      for (int64_t i = 0; i < size.m; ++i) {
        const int64_t at = i * p.call.ldc * 4;
        ASSERT_EQ(std::memcmp(p.c.data() + at, expected.data() + at, size_t(size.n) * 4), 0);
      }
      // Packed from another matrix, it is left aside.
      Problem other = make_problem(size, INGOT_F32, 7);
      other.call.packed_b = packed.data();
      ASSERT_TRUE(own->run(other.call));
      EXPECT_NEAR(load_element(other.c.data(), INGOT_F32, 2), exact(other, 0, 2), 1e-3);
    }
  }
}

// Keeps a copy of what it is given.
class Recorder final : public BlockConsumer {
 public:
  Recorder(const Case& size, int64_t rows, int64_t columns)
      : seen(static_cast<size_t>(size.m * size.n), 0.0f),
        times(seen.size(), 0),
        n_(size.n),
        rows_(rows),
        columns_(columns) {}
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void consume(Range rows, Range columns, const void* data, int64_t ld) const override {
    EXPECT_EQ(rows.begin % rows_, 0);
    EXPECT_EQ(columns.begin % columns_, 0);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (int64_t j = columns.begin; j < columns.end; ++j) {
        const auto at = static_cast<size_t>(i * n_ + j);
        seen[at] = static_cast<const float*>(data)[(i - rows.begin) * ld + j - columns.begin];
        ++times[at];
      }
    }
  }
  mutable std::vector<float> seen;
  mutable std::vector<int> times;

 private:
  int64_t n_, rows_, columns_;
};

TEST(CpuProduct, AConsumerIsGivenEveryBlockOnceWithTheProductsBits) {
  for (const Isa& isa : isas()) {
    const auto own = own_product(isa, true);
    for (const Case& size : {Case{600, 1024, 300, true}, Case{2100, 64, 40, true},
                             Case{360, 480, 513, false}, Case{512, 30, 9, true}}) {
      for (const bool kept : {true, false}) {
        Problem p = make_problem(size, INGOT_F32, 8);
        ASSERT_TRUE(own->run(p.call));
        const std::vector<std::byte> expected = p.c;
        const Recorder recorder(size, 2, 20);
        p.call.consumer = &recorder;
        ASSERT_TRUE(own->consumes(p.call));
        if (!kept) p.call.c = nullptr;
        ASSERT_TRUE(own->run(p.call));
        EXPECT_EQ(p.c, expected);
        for (int64_t i = 0; i < size.m; ++i) {
          for (int64_t j = 0; j < size.n; ++j) {
            const auto at = static_cast<size_t>(i * size.n + j);
            ASSERT_EQ(recorder.times[at], 1);
            ASSERT_EQ(static_cast<double>(recorder.seen[at]),
                      load_element(expected.data(), INGOT_F32, i * p.call.ldc + j));
          }
        }
      }
    }
  }
}

TEST(CpuProduct, AConsumerThatWouldLeaveThreadsIdleIsNotServed) {
  const Case size{256, 1536, 512, true};
  Problem p = make_problem(size, INGOT_F32, 9);
  const Recorder recorder(size, 256, 512);  // three blocks
  p.call.consumer = &recorder;
  const auto own = own_product(detect_isa({}), true);
  set_host_threads(nullptr, 1);
  EXPECT_TRUE(own->consumes(p.call));
  set_host_threads(nullptr, 0);
  if (thread_count() != 2) GTEST_SKIP() << "needs two threads";
  EXPECT_FALSE(own->consumes(p.call));
}

TEST(CpuProduct, ARowIsAddedWithTheBitsOfAdditionBehind) {
  for (const Isa& isa : isas()) {
    const auto own = own_product(isa, true);
    for (const Case& size : kCases) {
      if (size.k == 0 || size.m == 0) continue;
      Problem p = make_problem(size, INGOT_F32, 10);
      ASSERT_TRUE(own->run(p.call));
      std::vector<float> row(static_cast<size_t>(size.n));
      for (size_t j = 0; j < row.size(); ++j) row[j] = 0.3f * static_cast<float>(j) - 1.0f;
      std::vector<std::byte> expected = p.c;
      auto* sums = reinterpret_cast<float*>(expected.data());
      for (int64_t i = 0; i < size.m; ++i) {
        for (int64_t j = 0; j < size.n; ++j) {
          sums[i * p.call.ldc + j] += row[static_cast<size_t>(j)];
        }
      }
      p.call.row = row.data();
      ASSERT_TRUE(own->adds_row(p.call));
      ASSERT_TRUE(own->run(p.call));
      ASSERT_TRUE(p.c == expected) << size.m << "x" << size.n << "x" << size.k;
    }
  }
}

// Rows one behind the other are read by vectors that hold several.
TEST(CpuProduct, OwnMatchesDoubleWithoutPadding) {
  for (const Isa& isa : isas()) {
    const auto own = own_product(isa, true);
    for (int64_t k = 1; k <= 5; ++k) {
      for (const Case& size : {Case{70, 1, k, true}, Case{1, 70, k, true}, Case{5, 67, k, true}}) {
        Problem p = make_problem(size, INGOT_F32, 11);
        p.call.lda = p.call.ldb = k;
        ASSERT_TRUE(own->run(p.call));
        for (int64_t i = 0; i < size.m; ++i) {
          for (int64_t j = 0; j < size.n; ++j) {
            ASSERT_NEAR(load_element(p.c.data(), INGOT_F32, i * p.call.ldc + j), exact(p, i, j),
                        1e-5);
          }
        }
      }
    }
  }
}

TEST(CpuProduct, OwnKeepsNaNAndInfinityInTheirRows) {
  Problem p = make_problem({20, 40, 300, true}, INGOT_F32, 3);
  store_element(p.a.data(), INGOT_F32, 5 * p.call.lda + 7, INFINITY);
  store_element(p.a.data(), INGOT_F32, 9 * p.call.lda + 299, NAN);
  ASSERT_TRUE(own_product(detect_isa({}), true)->run(p.call));
  for (int64_t i = 0; i < 20; ++i) {
    for (int64_t j = 0; j < 40; ++j) {
      const double value = load_element(p.c.data(), INGOT_F32, i * p.call.ldc + j);
      EXPECT_EQ(std::isinf(value), i == 5);
      EXPECT_EQ(std::isnan(value), i == 9);
    }
  }
}

TEST(CpuProduct, OneDnnMatchesDoubleWhereThereIsOne) {
  const auto onednn = onednn_product();
  if (onednn == nullptr) GTEST_SKIP() << "no oneDNN on this machine";
  check(*onednn, {29, 65, 113, true}, INGOT_F32);
  check(*onednn, {29, 65, 113, false}, INGOT_F32);
}

TEST(CpuProduct, LibraryMatchesDoubleWhereThereIsOne) {
  const auto library = library_product();
  if (library == nullptr) GTEST_SKIP() << "no BLAS on this machine";
  check(*library, {29, 65, 113, true}, INGOT_F32);
  check(*library, {29, 65, 113, false}, INGOT_F64);
}

int counted_calls = 0;
int refuse(int64_t, int64_t, int64_t, const void*, int64_t, const void*, int64_t, int, void*,
           int64_t, const void*, int32_t, void*) {
  ++counted_calls;
  return 1;
}

TEST(CpuProduct, AHostProductThatRefusesIsReplaced) {
  const Isa isa = detect_isa({{"avx2", false}});  // where no provider goes before the host's
  counted_calls = 0;
  set_host_product("refuses", refuse, nullptr);
  Problem p = make_problem({8, 8, 8, true}, INGOT_F32, 4);
  const std::string who = run_product(providers_of(isa, p.call), p.call);
  set_host_product("", nullptr, nullptr);
  EXPECT_EQ(counted_calls, 1);
  EXPECT_NE(who, "refuses");
  EXPECT_NEAR(load_element(p.c.data(), INGOT_F32, 0), exact(p, 0, 0), 1e-4);
}

// Stands for a BLAS: column-major, everything by pointer.
template <class Integer>
void plain_gemm(const char* transpose_a, const char*, const Integer* m, const Integer* n,
                const Integer* k, const float*, const float* a, const Integer* lda, const float* b,
                const Integer* ldb, const float*, float* c, const Integer* ldc) {
  for (Integer j = 0; j < *n; ++j) {
    for (Integer i = 0; i < *m; ++i) {
      float sum = 0;
      for (Integer p = 0; p < *k; ++p) {
        sum += (*transpose_a == 'T' ? a[i * *lda + p] : a[p * *lda + i]) * b[j * *ldb + p];
      }
      c[j * *ldc + i] = sum;
    }
  }
}

TEST(CpuProduct, ABlasIsCalledWithItsOwnIntegers) {
  for (const bool transpose : {true, false}) {
    for (const int bytes : {4, 8}) {
      ingot_blas blas{};
      blas.sgemm = bytes == 4 ? reinterpret_cast<void*>(&plain_gemm<int32_t>)
                              : reinterpret_cast<void*>(&plain_gemm<int64_t>);
      blas.integer_bytes = bytes;
      Problem p = make_problem({7, 11, 13, transpose}, INGOT_F32, 5);
      const auto run = [&](ingot_dtype dtype) {
        return ingot_blas_product(p.call.m, p.call.n, p.call.k, p.call.a, p.call.lda, p.call.b,
                                  p.call.ldb, transpose, p.call.c, p.call.ldc, nullptr, dtype,
                                  &blas);
      };
      ASSERT_EQ(run(INGOT_F32), 0);
      EXPECT_NEAR(load_element(p.c.data(), INGOT_F32, 2 * p.call.ldc + 3), exact(p, 2, 3), 1e-5);
      EXPECT_NE(run(INGOT_F64), 0);  // it has no dgemm, and there is no other
    }
  }
}

}  // namespace
}  // namespace ingot::cpu
