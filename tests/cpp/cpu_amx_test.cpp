// The product on AMX tiles: its guards, its bits, its accuracy, its dispatch. On a machine without
// AMX the tiles are emulated; where they are, the instructions are tested too, against the
// emulation.
#include <gtest/gtest.h>

#include <cerrno>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include <nlohmann/json.hpp>

#include "cpu/half.h"
#include "cpu/product/amx/probe.h"
#include "cpu/product/amx/product.h"
#include "cpu/product/amx/support.h"
#include "cpu/product/own.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu::amx {
namespace {

Isa machine() {
  return detect_isa(nlohmann::json::object());
}

// What runs here: the emulations, and the instructions where they execute.
std::vector<const Engine*> engines(Scheme scheme) {
  std::vector<const Engine*> found{emulated_engine()};
  if (&best_emulated_engine(machine()) != emulated_engine()) {
    found.push_back(&best_emulated_engine(machine()));
  }
  const Support usable = support(machine());
  if (scheme == Scheme::f3 ? usable.fp16 : usable.bf16) found.push_back(instruction_engine());
  return found;
}

const Engine& fastest(Scheme scheme) {
  return *engines(scheme).back();
}

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

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  float normal() { return normal_(generator_); }
  float uniform() { return uniform_(generator_); }
  int integer(int from, int to) { return std::uniform_int_distribution<int>(from, to)(generator_); }

 private:
  std::mt19937 generator_;
  std::normal_distribution<float> normal_;
  std::uniform_real_distribution<float> uniform_;
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
    const auto packed = product.pack(trial.call);
    ASSERT_NE(packed, nullptr);
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 0}) {
      for (const PackedOperand* right :
           {static_cast<const PackedOperand*>(nullptr), packed.get()}) {
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
  const auto packed = product.pack(one.call);
  other.call.packed_b = packed.get();
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

// The tiles' instructions -------------------------------------------------------------------------

// One step with a single row of a and column of b: halves by bits, the rest zero.
float one_dot(const Engine& engine, Scheme scheme, const std::vector<uint16_t>& a,
              const std::vector<uint16_t>& b) {
  alignas(64) static std::byte left[kPanelBytes[1]], right[kPanelBytes[1]];
  alignas(64) static float sums[kPanelRows * kPanelRows];
  std::memset(left, 0, sizeof left);
  std::memset(right, 0, sizeof right);
  for (size_t k = 0; k < a.size(); ++k) {
    std::memcpy(left + 2 * k, &a[k], 2);
    std::memcpy(right + k / 2 * 64 + k % 2 * 2, &b[k], 2);
  }
  Update nothing;
  engine.begin();
  engine.multiply[static_cast<int>(scheme)]({left, right, 1, sums, {}}, &nothing);
  engine.end();
  return sums[0];
}

TEST(CpuAmx, TilesRoundAndFlushAsTheManualSays) {
  const auto bf16 = [](float v) { return float_to_bf16(v); };
  const auto fp16 = [](float v) { return float_to_fp16(v); };
  for (const Engine* engine : engines(Scheme::b6)) {
    SCOPED_TRACE(engine->name);
    // Subnormal operands count as zero, and subnormal results become zero.
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {0x0040}, {bf16(0x1p100f)}), 0.0f);
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p-70f)}, {bf16(0x1p-70f)}), 0.0f);
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p-60f)}, {bf16(0x1p-66f)}), 0x1p-126f);
    // Even and odd k have sums of their own: 2²⁴ does not swallow the ones beside it.
    EXPECT_EQ(
        one_dot(*engine, Scheme::b6, {bf16(0x1p24f), bf16(1), 0, bf16(1), bf16(-0x1p24f), bf16(1)},
                {bf16(1), bf16(1), 0, bf16(1), bf16(1), bf16(1)}),
        3.0f);
    // Within one of them it does, a tie going to even.
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p24f), 0, bf16(1), 0, bf16(-0x1p24f), 0},
                      {bf16(1), 0, bf16(1), 0, bf16(1), 0}),
              0.0f);
  }
  for (const Engine* engine : engines(Scheme::f3)) {
    SCOPED_TRACE(engine->name);
    EXPECT_EQ(one_dot(*engine, Scheme::f3, {0x0001}, {0x0001}), 0x1p-48f);
    EXPECT_EQ(one_dot(*engine, Scheme::f3, {fp16(0x1p15f), 0x0001}, {fp16(1), fp16(0x1p15f)}),
              0x1p15f + 0x1p-9f);
    EXPECT_EQ(one_dot(*engine, Scheme::f3,
                      {fp16(0x1p12f), fp16(1), fp16(1), fp16(1), fp16(-0x1p12f), fp16(1)},
                      {fp16(0x1p12f), fp16(1), fp16(1), fp16(1), fp16(0x1p12f), fp16(1)}),
              3.0f);
  }
}

TEST(CpuAmx, InstructionsEqualTheEmulationOnRandomBits) {
  const Support usable = support(machine());
  if (!usable.bf16) GTEST_SKIP() << "AMX is " << usable.state;
  const Engine& emulated = best_emulated_engine(machine());
  for (const Scheme scheme : {Scheme::b6, Scheme::f3}) {
    if (scheme == Scheme::f3 && !usable.fp16) continue;
    Random random(11);
    std::vector<std::byte> memory(2 * kPanelBytes[1] + 64);
    auto* left = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) &
                                              ~uintptr_t{63});
    std::byte* right = left + kPanelBytes[1];
    alignas(64) static float found[2][kPanelRows * kPanelRows];
    for (int round = 0; round < 200; ++round) {
      for (int i = 0; i < kPanelBytes[1]; ++i) {
        // Finite halves of every magnitude: the exponent's uppermost bit follows the round.
        const int upper = random.integer(0, 255) & (i % 2 == 1 ? (round % 2 ? 0xbf : 0xfb) : 0xff);
        left[i] = static_cast<std::byte>(upper);
        right[i] = static_cast<std::byte>(random.integer(0, 255) & (i % 2 == 1 ? 0xbb : 0xff));
      }
      int side = 0;
      for (const Engine* engine : {&emulated, instruction_engine()}) {
        Update nothing;
        engine->begin();
        engine->multiply[static_cast<int>(scheme)]({left, right, kSteps, found[side++], {}},
                                                   &nothing);
        engine->end();
      }
      for (int i = 0; i < kPanelRows * kPanelRows; ++i) {
        if (std::isnan(found[0][i]) && std::isnan(found[1][i])) continue;
        ASSERT_EQ(0, std::memcmp(&found[0][i], &found[1][i], sizeof(float)))
            << "scheme " << static_cast<int>(scheme) << ", element " << i << ": " << found[0][i]
            << " emulated, " << found[1][i] << " by the instructions";
      }
    }
  }
}

// Dispatch ----------------------------------------------------------------------------------------

TEST(CpuAmx, StatesSayWhatIsMissing) {
  Findings f;
  EXPECT_EQ(judge(f).state, "not on this processor");
  f.tiles = f.bf16 = f.fp16 = true;
  EXPECT_NE(judge(f).state.find("AVX-512"), std::string::npos);
  f.vectors = true;
  EXPECT_NE(judge(f).state.find("kernel does not save"), std::string::npos);
  f.saved = true;
  f.refusal = EPERM;
  EXPECT_NE(judge(f).state.find("refused permission (Operation not permitted)"), std::string::npos);
  EXPECT_FALSE(judge(f).bf16);
  f.refusal = ENOSPC;
  EXPECT_NE(judge(f).state.find("signal stack"), std::string::npos);
  f.refusal = 0;
  EXPECT_NE(judge(f).state.find("do not execute"), std::string::npos);
  EXPECT_FALSE(judge(f).bf16);
  f.bf16_executes = true;
  EXPECT_TRUE(judge(f).bf16);
  EXPECT_FALSE(judge(f).fp16);
  f.fp16_executes = true;
  EXPECT_TRUE(judge(f).fp16);
  EXPECT_EQ(judge(f).state, "usable");
}

TEST(CpuAmx, AMaskedProcessorIsNeverGivenTheInstructions) {
  for (const nlohmann::json& masks :
       {nlohmann::json{{"amx", false}}, nlohmann::json{{"avx512", false}},
        nlohmann::json{{"avx2", false}}}) {
    const Isa isa = detect_isa(masks);
    EXPECT_FALSE(support(isa).bf16);
    EXPECT_FALSE(support(isa).fp16);
    EXPECT_EQ(amx_product(isa, Choice::automatic), nullptr);
    EXPECT_THROW(amx_product(isa, Choice::bf16), Error);
    EXPECT_EQ(&best_emulated_engine(detect_isa({{"avx512", false}})), emulated_engine());
  }
  const Isa no_fp16 = detect_isa({{"amx_fp16", false}});
  EXPECT_FALSE(support(no_fp16).fp16);
  if (support(machine()).bf16) {
    EXPECT_EQ(amx_product(no_fp16, Choice::automatic)->name(), "ingot AMX product (bf16)");
  }
}

TEST(CpuAmx, ChoicesAreReadAndMistakesNamed) {
  EXPECT_EQ(parse_choice(""), Choice::automatic);
  EXPECT_EQ(parse_choice("auto"), Choice::automatic);
  EXPECT_EQ(parse_choice("no-amx"), Choice::none);
  EXPECT_EQ(parse_choice("amx-fp16"), Choice::fp16);
  EXPECT_EQ(parse_choice("amx-bf16"), Choice::bf16);
  EXPECT_EQ(parse_choice("amx-fp16-emulated"), Choice::fp16_emulated);
  EXPECT_EQ(parse_choice("amx-bf16-emulated"), Choice::bf16_emulated);
  EXPECT_THROW(parse_choice("amx"), Error);
  EXPECT_EQ(amx_product(machine(), Choice::none), nullptr);
  EXPECT_NE(amx_product(machine(), Choice::fp16_emulated), nullptr);
}

TEST(CpuAmx, SmallAndShortProductsAreLeftToTheLibrary) {
  const Product f3("f3", *emulated_engine(), Scheme::f3, machine(), false);
  const Product b6("b6", *emulated_engine(), Scheme::b6, machine(), false);
  const auto takes = [](const Product& p, int64_t m, int64_t n, int64_t k) {
    ProductCall call;
    call.m = m;
    call.n = n;
    call.k = k;
    return p.takes(call);
  };
  set_host_threads(nullptr, 2);
  EXPECT_TRUE(takes(f3, 1024, 8192, 8192));
  EXPECT_TRUE(takes(b6, 1024, 8192, 8192));
  EXPECT_TRUE(takes(f3, 128, 4096, 4096));
  EXPECT_FALSE(takes(f3, 1, 8192, 8192));
  EXPECT_FALSE(takes(f3, 64, 64, 64));
  EXPECT_FALSE(takes(b6, 64, 4096, 4096));
  EXPECT_FALSE(takes(b6, 256, 256, 256));
  ProductCall half;
  half.m = half.n = half.k = 1024;
  half.dtype = INGOT_BF16;
  EXPECT_FALSE(f3.takes(half));
  set_host_threads(nullptr, 0);
}

#if defined(__x86_64__) && defined(__linux__)
TEST(CpuAmx, AnIllegalInstructionEndsTheProbeAlone) {
  EXPECT_FALSE(survives([] { asm volatile("ud2"); }));
  EXPECT_TRUE(survives([] {}));
}
#endif

}  // namespace
}  // namespace ingot::cpu::amx
