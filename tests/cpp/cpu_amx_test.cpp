// The product on AMX tiles: its guards, its bits, its accuracy, its dispatch. On a machine without
// AMX the tiles are emulated; where they are, the instructions are tested too, against the
// emulation.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "amx_testing.h"
#include "cpu/product/amx/product.h"
#include "cpu/product/own.h"
#include "packed_memory.h"
#include "support/threads.h"

namespace ingot::cpu::amx {
namespace {

Product product_on(const Engine& engine, Scheme scheme) {
  return {"under test", engine, scheme, machine(), true};
}

// A product with room between rows, and filled by a function of (operand, row, k).
struct Trial {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = true;
  std::vector<float> a, b, c;
  ProductCall call;

  static constexpr int64_t kPadding = 3;
  static constexpr float kUntouched = -77.0f;

  using Fill = std::function<float(int operand, int64_t row, int64_t k)>;

  Trial(int64_t m_, int64_t n_, int64_t k_, const Fill& fill, bool ta = false, bool tb = true)
      : m(m_), n(n_), k(k_), transpose_a(ta), transpose_b(tb) {
    call.m = m;
    call.n = n;
    call.k = k;
    call.transpose_a = ta;
    call.transpose_b = tb;
    const auto make = [&](std::vector<float>& data, int64_t rows, int64_t columns) {
      data.assign(static_cast<size_t>(rows * (columns + kPadding) + 1), NAN);
      return columns + kPadding;
    };
    call.lda = ta ? make(a, k, m) : make(a, m, k);
    call.ldb = tb ? make(b, n, k) : make(b, k, n);
    call.ldc = make(c, m, n);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t p = 0; p < k; ++p) a[at(0, i, p)] = fill(0, i, p);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t p = 0; p < k; ++p) b[at(1, j, p)] = fill(1, j, p);
    clear();
    call.a = a.data();
    call.b = b.data();
    call.c = c.data();
  }
  Trial(const Trial&) = delete;

  void clear() { std::fill(c.begin(), c.end(), kUntouched); }
  size_t at(int operand, int64_t row, int64_t p) const {
    const bool across = operand == 0 ? transpose_a : !transpose_b;
    const int64_t ld = operand == 0 ? call.lda : call.ldb;
    return static_cast<size_t>(across ? p * ld + row : row * ld + p);
  }
  double left(int64_t i, int64_t p) const { return a[at(0, i, p)]; }
  double right(int64_t j, int64_t p) const { return b[at(1, j, p)]; }
  float result(int64_t i, int64_t j) const { return c[static_cast<size_t>(i * call.ldc + j)]; }
  double exact(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t p = 0; p < k; ++p) sum += left(i, p) * right(j, p);
    return sum;
  }
  double magnitude(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t p = 0; p < k; ++p) sum += std::abs(left(i, p) * right(j, p));
    return sum;
  }
  // The largest error relative to Σ|a||b|, which is what fp32 arithmetic can promise.
  double worst_error() const {
    double worst = 0;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double scale = magnitude(i, j) + 0x1p-125;
        const double error = std::abs(result(i, j) - exact(i, j)) / scale;
        worst = std::max(worst, std::isnan(error) ? INFINITY : error);
      }
    }
    return worst;
  }
  bool untouched_between_rows() const {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = n; j < call.ldc; ++j) {
        if (result(i, j) != kUntouched) return false;
      }
    }
    return true;
  }
};

Trial::Fill normal_numbers(Random& random) {
  return [&random](int, int64_t, int64_t) { return random.normal(); };
}

// What rounding to nearest in fp32 sums gives is about √K·2⁻²⁴; the split's part is 2⁻²².
constexpr double kBound = 6 * 0x1p-22;

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{1, 1, 1},     {3, 5, 2},    {31, 33, 31},  {32, 32, 256},
                           {33, 17, 257}, {64, 96, 77}, {70, 300, 65}, {100, 45, 600}};

TEST(CpuAmx, EveryLayoutAndSizeMatchesDouble) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    const Product product = product_on(fastest(scheme), scheme);
    for (const Size& size : kSizes) {
      for (const bool ta : {false, true}) {
        for (const bool tb : {false, true}) {
          Random random(1);
          Trial trial(size.m, size.n, size.k, normal_numbers(random), ta, tb);
          ASSERT_TRUE(product.run(trial.call));
          EXPECT_LE(trial.worst_error(), kBound)
              << size.m << "x" << size.n << "x" << size.k << " layouts " << ta << tb;
          EXPECT_TRUE(trial.untouched_between_rows());
        }
      }
    }
  }
}

TEST(CpuAmx, EmptyProducts) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  Random random(2);
  Trial none(4, 6, 0, normal_numbers(random));
  ASSERT_TRUE(product.run(none.call));
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 6; ++j) EXPECT_EQ(none.result(i, j), 0.0f);
  EXPECT_TRUE(none.untouched_between_rows());
  Trial no_rows(0, 6, 5, normal_numbers(random));
  EXPECT_TRUE(product.run(no_rows.call));
}

// Every kind of data that reaches another branch of packing.
std::vector<std::pair<const char*, Trial::Fill>> hostile_data(Random& random) {
  const auto scaled = [&random](int from, int to) {
    return [&random, from, to](int, int64_t, int64_t) {
      return std::ldexp(random.normal(), random.integer(from, to));
    };
  };
  return {
      {"normal", normal_numbers(random)},
      {"uniform", [&](int, int64_t, int64_t) { return random.uniform(); }},
      {"2^±20 in a row", scaled(-20, 20)},
      {"2^±60 in a row", scaled(-60, 60)},
      {"rows of 2^±60",
       [&](int, int64_t row, int64_t) {
         return std::ldexp(random.normal(), static_cast<int>(row * 37 % 121) - 60);
       }},
      {"subnormal against large",
       [&](int operand, int64_t, int64_t) {
         return std::ldexp(random.normal(), operand == 0 ? -140 : 100);
       }},
      {"near FLT_MAX against tiny",
       [&](int operand, int64_t, int64_t) {
         return operand == 0 ? 0.9f * FLT_MAX * random.uniform()
                             : std::ldexp(random.normal(), -124);
       }},
      {"zeros and few others",
       [&](int, int64_t, int64_t) { return random.integer(0, 9) == 0 ? random.normal() : 0.0f; }},
      {"outliers of 2^30 that meet zeros", [&](int operand, int64_t, int64_t k) {
         const bool outlier = k % 100 == 7;
         if (operand == 1) return outlier ? 0.0f : random.normal();
         return random.normal() * (outlier ? 0x1p30f : 1.0f);
       }}};
}

TEST(CpuAmx, ThePromiseHoldsOnHostileData) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    const Product product = product_on(fastest(scheme), scheme);
    Random random(3);
    for (const auto& [name, fill] : hostile_data(random)) {
      Trial trial(40, 70, 300, fill);
      ASSERT_TRUE(product.run(trial.call)) << name;
      EXPECT_LE(trial.worst_error(), kBound) << name << ", scheme " << static_cast<int>(scheme);
    }
  }
}

double relative_norm(const Trial& trial) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < trial.m; ++i) {
    for (int64_t j = 0; j < trial.n; ++j) {
      const double exact = trial.exact(i, j);
      error += std::pow(trial.result(i, j) - exact, 2);
      norm += exact * exact;
    }
  }
  return std::sqrt(error / norm);
}

TEST(CpuAmx, ErrorInNormIsThatOfFp32) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    for (const int64_t k : {64, 1024}) {
      Random random(4);
      Trial trial(64, 64, k, normal_numbers(random));
      ASSERT_TRUE(product_on(fastest(scheme), scheme).run(trial.call));
      EXPECT_LE(relative_norm(trial), 2.5e-7) << "K " << k;
    }
  }
}

// Bits ------------------------------------------------------------------------------------------

TEST(CpuAmx, EnginesAgreeBitByBit) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    Random random(5);
    for (const auto& [name, fill] : hostile_data(random)) {
      for (const bool other_layouts : {false, true}) {
        Trial trial(35, 66, 290, fill, other_layouts, !other_layouts);
        std::vector<std::vector<float>> results;
        for (const Engine* engine : engines(scheme)) {
          trial.clear();
          ASSERT_TRUE(product_on(*engine, scheme).run(trial.call));
          results.push_back(trial.c);
          EXPECT_EQ(0,
                    std::memcmp(results[0].data(), trial.c.data(), trial.c.size() * sizeof(float)))
              << engine->name << " against " << engines(scheme)[0]->name << " on " << name;
        }
      }
    }
  }
}

TEST(CpuAmx, BitsDependNeitherOnThreadsNorOnPackingBefore) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    const Product product = product_on(fastest(scheme), scheme);
    Random random(6);
    // Wide rows on either side in some panels, so that both schemes and their mixture occur.
    Trial trial(200, 330, 600, [&](int, int64_t row, int64_t k) {
      const bool wide = row % 64 == 5 && k > 300;
      return std::ldexp(random.normal(), wide ? random.integer(-30, 0) : 0);
    });
    trial.a[trial.at(0, 100, 400)] = INFINITY;
    trial.b[trial.at(1, 200, 10)] = NAN;
    const PackedMemory packed(product, trial.call);
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 0}) {
      for (const std::byte* right : {static_cast<const std::byte*>(nullptr), packed.data()}) {
        set_host_threads(nullptr, threads);
        trial.clear();
        trial.call.packed_b = right;
        const bool done = product.run(trial.call);
        set_host_threads(nullptr, 0);
        ASSERT_TRUE(done);
        if (first.empty()) first = trial.c;
        EXPECT_EQ(0, std::memcmp(first.data(), trial.c.data(), first.size() * sizeof(float)))
            << threads << " threads, packed " << (right != nullptr);
      }
    }
  }
}

TEST(CpuAmx, APackedOperandOfAnotherMatrixIsNotUsed) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  Random random(7);
  Trial one(32, 40, 64, normal_numbers(random)), other(32, 40, 64, normal_numbers(random));
  const PackedMemory packed(product, one.call);
  other.call.packed_b = packed.data();
  ASSERT_TRUE(product.run(other.call));
  EXPECT_LE(other.worst_error(), kBound);
}

TEST(CpuAmx, BlockingCoversEveryShapeAndThreadCount) {
  for (const int64_t m : {1, 2, 31, 33, 1000}) {
    for (const int64_t n : {1, 7, 8, 500}) {
      for (const int64_t threads : {1, 2, 7, 64}) {
        const Blocking b = choose_blocking(m, n, 32, threads, false);
        EXPECT_LE(b.over_m * b.over_n, threads);
        EXPECT_GE(b.over_m * b.over_n, 1);
        EXPECT_GE(b.strips * b.strip, m);
        EXPECT_LT((b.strips - 1) * b.strip, m);
        EXPECT_LE(ceil_div(b.strip, b.over_m), kRowsPerThread);
      }
    }
  }
  EXPECT_EQ(choose_blocking(32, 256, 32, 2, false).over_n, 2);
  EXPECT_GE(choose_blocking(512, 2, 32, 8, false).over_m, 4);
}

// Guards ----------------------------------------------------------------------------------------

TEST(CpuAmx, OrdinaryDataIsNotSentToB6) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  Random random(8);
  Trial trial(256, 256, 512, normal_numbers(random));
  Counts counts;
  ASSERT_TRUE(product.run_counted(trial.call, &counts));
  EXPECT_LE(counts.pairs[1], counts.pairs[0] / 10);
  EXPECT_EQ(counts.pairs[0] + counts.pairs[1], 8 * 8 * 2);
}

TEST(CpuAmx, RangeGuardSendsWidePanelsToB6AndNoOthers) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  for (const int side : {0, 1}) {
    Trial trial(64, 96, 512, [&](int operand, int64_t row, int64_t k) {
      const float value = static_cast<float>(1 + (row * 7 + k * 3) % 5);
      // Row 40 of one operand, in its second block: small elements beside a large one, which meets
      // zeros in the other operand.
      if (k == 300) return operand != side ? 0.0f : row == 40 ? 0x1p24f : 1.0f;
      return value;
    });
    Counts counts;
    ASSERT_TRUE(product.run_counted(trial.call, &counts));
    // A panel of 2 rows or 3 columns of panels, one block of two.
    EXPECT_EQ(counts.pairs[1], side == 0 ? 3 : 2);
    EXPECT_EQ(counts.pairs[0] + counts.pairs[1], 2 * 3 * 2);
    EXPECT_LE(trial.worst_error(), 0x1p-22);
  }
}

TEST(CpuAmx, RangeGuardAllowsFewSmallElementsAndNoTinyOne) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  const auto b6_pairs = [&](int small, float value) {
    Trial trial(32, 32, 256, [&](int operand, int64_t row, int64_t k) {
      return operand == 0 && row == 3 && k < small ? value : 1.0f + static_cast<float>(k) / 256;
    });
    Counts counts;
    EXPECT_TRUE(product.run_counted(trial.call, &counts));
    return counts.pairs[1];
  };
  EXPECT_EQ(b6_pairs(2, 0x1p-18f), 0);
  EXPECT_EQ(b6_pairs(3, 0x1p-18f), 1);
  EXPECT_EQ(b6_pairs(200, 0x1p-17f), 0);
  EXPECT_EQ(b6_pairs(1, 0x1p-22f), 0);
  EXPECT_EQ(b6_pairs(1, 0x0.ffp-22f), 1);
  EXPECT_EQ(b6_pairs(200, 0.0f), 0);
}

TEST(CpuAmx, WidePanelsOnOneSideMeetEveryPanelOfTheOther) {
  const Product product = product_on(fastest(Scheme::f3), Scheme::f3);
  for (const int wide : {0, 1}) {
    for (const Size& size : {Size{96, 32, 512}, Size{32, 96, 512}, Size{32, 300, 300}}) {
      Random random(12);
      Trial trial(size.m, size.n, size.k, [&](int operand, int64_t row, int64_t) {
        // The other side's rows have a scale each: none may be undone by another's.
        if (operand != wide) return std::ldexp(random.normal(), static_cast<int>(row * 5 % 61));
        return std::ldexp(random.normal(), row % 32 == 3 ? random.integer(-30, 0) : 0);
      });
      Counts counts;
      ASSERT_TRUE(product.run_counted(trial.call, &counts));
      EXPECT_EQ(counts.pairs[0], 0);
      EXPECT_LE(trial.worst_error(), kBound) << size.m << "x" << size.n << ", wide " << wide;
    }
  }
}

TEST(CpuAmx, SmallTimesSmallBesideLargeSurvivesB6) {
  const Product product = product_on(fastest(Scheme::b6), Scheme::b6);
  Trial trial(32, 32, 3, [](int operand, int64_t, int64_t k) {
    constexpr float kValues[2][3] = {{0x1p60f, 0, 0x1p-10f}, {0, 1, 0x1p-70f}};
    return kValues[operand][k];
  });
  ASSERT_TRUE(product.run(trial.call));
  EXPECT_EQ(trial.result(0, 0), 0x1p-80f);
}

TEST(CpuAmx, RowsAndColumnsWithInfOrNaNAreThoseOfFp32Arithmetic) {
  const float specials[] = {INFINITY, -INFINITY, NAN};
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    const Product product = product_on(fastest(scheme), scheme);
    for (const bool other_layouts : {false, true}) {
      Random random(9);
      Trial trial(80, 90, 300, normal_numbers(random), other_layouts, !other_layouts);
      for (int i = 0; i < 3; ++i) {
        trial.a[trial.at(0, 7 + 30 * i, 100 * i + 3)] = specials[i];
        trial.b[trial.at(1, 11 + 33 * (i % 2), 120 * i + 5)] = specials[(i + 1) % 3];
      }
      trial.b[trial.at(1, 50, 3)] = 0.0f;  // Inf · 0
      Counts counts;
      ASSERT_TRUE(product.run_counted(trial.call, &counts));
      EXPECT_EQ(counts.rows, 3);
      EXPECT_EQ(counts.columns, 2);
      const std::vector<float> found = trial.c;
      ASSERT_TRUE(own_product(machine(), true)->run(trial.call));
      for (int64_t i = 0; i < trial.m; ++i) {
        for (int64_t j = 0; j < trial.n; ++j) {
          const float value = found[static_cast<size_t>(i * trial.call.ldc + j)];
          const float expected = trial.result(i, j);
          ASSERT_EQ(std::isnan(value), std::isnan(expected)) << i << "," << j;
          if (std::isinf(expected) || std::isinf(value)) {
            ASSERT_EQ(value, expected) << i << "," << j;
          } else if (!std::isnan(value)) {
            ASSERT_NEAR(value, expected, 1e-4) << i << "," << j;
          }
        }
      }
    }
  }
}

TEST(CpuAmx, ManyRowsWithInfAreLeftToTheNextProvider) {
  Random random(10);
  Trial trial(64, 64, 64, normal_numbers(random));
  for (int64_t i = 0; i < 40; ++i) trial.a[trial.at(0, i, 5)] = INFINITY;
  EXPECT_FALSE(product_on(fastest(Scheme::f3), Scheme::f3).run(trial.call));
}

TEST(CpuAmx, SubnormalRowsKeepEveryBit) {
  // Whole multiples of the smallest subnormal against a power of two: exact in both schemes.
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    Trial trial(32, 32, 32, [](int operand, int64_t row, int64_t k) {
      if (operand == 0) return static_cast<float>(row * 32 + k + 1) * FLT_TRUE_MIN;
      return row == k ? 0x1p100f : 0.0f;
    });
    ASSERT_TRUE(product_on(fastest(scheme), scheme).run(trial.call));
    for (int64_t i = 0; i < 32; ++i) {
      for (int64_t j = 0; j < 32; ++j) {
        ASSERT_EQ(trial.result(i, j), static_cast<float>(trial.exact(i, j))) << i << "," << j;
      }
    }
  }
}

TEST(CpuAmx, LargestAndSmallestScalesMeet) {
  for (const Scheme scheme : {Scheme::f3, Scheme::b6}) {
    const Product product = product_on(fastest(scheme), scheme);
    Trial largest(32, 32, 40, [](int operand, int64_t, int64_t k) {
      return k != 0 ? 0.0f : operand == 0 ? FLT_MAX : 1.0f;
    });
    ASSERT_TRUE(product.run(largest.call));
    // Within the split's own error; it must neither vanish nor overflow.
    EXPECT_GE(largest.result(3, 4), FLT_MAX * (1 - 0x1p-21f));
    EXPECT_TRUE(std::isinf(largest.result(3, 4)) || largest.result(3, 4) <= FLT_MAX);
    Trial smallest(32, 32, 40, [](int operand, int64_t, int64_t k) {
      return k != 0 ? 0.0f : operand == 0 ? FLT_TRUE_MIN : 1.0f;
    });
    ASSERT_TRUE(product.run(smallest.call));
    EXPECT_EQ(smallest.result(3, 4), FLT_TRUE_MIN);
    Trial overflow(32, 32, 40, [](int, int64_t, int64_t) { return 0x1p70f; });
    ASSERT_TRUE(product.run(overflow.call));
    EXPECT_EQ(overflow.result(0, 0), INFINITY);
    Trial underflow(32, 32, 40, [](int, int64_t, int64_t) { return 0x1p-80f; });
    ASSERT_TRUE(product.run(underflow.call));
    EXPECT_EQ(underflow.result(0, 0), 0.0f);
  }
}

TEST(CpuAmx, DoctorSaysWhetherItIsUsed) {
  Support usable;
  EXPECT_EQ(use_of(usable, Choice::automatic), "no");
  usable.bf16 = true;
  EXPECT_NE(use_of(usable, Choice::automatic).find("measurement"), std::string::npos);
  EXPECT_NE(use_of(usable, Choice::none).find("no-amx"), std::string::npos);
  EXPECT_EQ(use_of(usable, Choice::bf16).rfind("yes", 0), 0u);
}

}  // namespace
}  // namespace ingot::cpu::amx
