// Compositions of pointwise operators: the bits of their operators, and taken where they may be.
#include "cpu/composites.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "backend/executable.h"
#include "cpu/primitives.h"
#include "cpu_levels.h"
#include "graph/graph.h"
#include "graph/importer.h"

namespace ingot::cpu {
namespace {

using Values = std::vector<float>;

Values by_primitive(Level level, Pointwise op, std::vector<Values> args) {
  Values out(args[0].size());
  MapBlock<float> block{};
  block.out = out.data();
  for (size_t k = 0; k < args.size(); ++k) block.in[k] = args[k].data();
  block.rows = 1;
  block.columns = static_cast<int64_t>(out.size());
  primitives<float>(level).map[static_cast<int>(op)][0](block);
  return out;
}

// The value of a composition, one primitive after the other.
template <class Composition>
struct OneByOne;
template <int index>
struct OneByOne<composite::Arg<index>> {
  static Values of(Level, const std::vector<Values>& x) { return x[index]; }
};
template <double value>
struct OneByOne<composite::Number<value>> {
  static Values of(Level, const std::vector<Values>& x) {
    return Values(x[0].size(), static_cast<float>(value));
  }
};
template <Pointwise op, class... Args>
struct OneByOne<composite::Apply<op, Args...>> {
  static Values of(Level level, const std::vector<Values>& x) {
    return by_primitive(level, op, {OneByOne<Args>::of(level, x)...});
  }
};

struct Row {
  const char* name;
  Composite composite;
  Values (*one_by_one)(Level, const std::vector<Values>&);
};

std::vector<Row> rows() {
  using namespace composite;
  return {
#define INGOT_TEST_ROW(name, ...) {#name, Composite::name, OneByOne<__VA_ARGS__>::of},
      INGOT_COMPOSITES(INGOT_TEST_ROW)
#undef INGOT_TEST_ROW
  };
}

Values draw(std::mt19937* generator, int64_t n) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3e38f, -90.0f};
  Values out(static_cast<size_t>(n));
  for (float& value : out) {
    value = (*generator)() % 16 == 0 ? special[(*generator)() % 8] : normal(*generator);
  }
  return out;
}

// Two rows of operands that lie apart, some of them constant along a row.
void expect_equal_bits(const Row& row, Level level, int64_t columns, unsigned constants) {
  constexpr int64_t kRows = 2;
  const int64_t stride = columns + 3;
  std::mt19937 generator(static_cast<unsigned>(columns) * 64 + constants);
  std::vector<Values> memory;
  MapBlock<float> block{};
  Values out(static_cast<size_t>(kRows * stride), -7.0f);
  block.out = out.data();
  block.out_stride = stride;
  for (int k = 0; k < kCompositeArity; ++k) memory.push_back(draw(&generator, kRows * stride));
  for (size_t k = 0; k < kCompositeArity; ++k) {
    block.in[k] = memory[k].data();
    block.in_stride[k] = stride;
  }
  block.rows = kRows;
  block.columns = columns;
  block.constants = constants;
  primitives<float>(level).composite[static_cast<int>(row.composite)](block);
  for (int64_t i = 0; i < kRows; ++i) {
    std::vector<Values> x;
    for (int k = 0; k < kCompositeArity; ++k) {
      const float* from = memory[static_cast<size_t>(k)].data() + i * stride;
      x.emplace_back(from, from + columns);
      if ((constants >> k & 1) != 0) std::fill(x.back().begin(), x.back().end(), *from);
    }
    const Values expected = row.one_by_one(level, x);
    for (int64_t j = 0; j < columns; ++j) {
      const float want = expected[static_cast<size_t>(j)];
      const float found = out[static_cast<size_t>(i * stride + j)];
      ASSERT_TRUE((std::isnan(want) && std::isnan(found)) || std::memcmp(&want, &found, 4) == 0)
          << row.name << ", " << name_of(level) << ", " << columns << " columns, constants "
          << constants << ": " << found << " for " << want << " at " << i << ", " << j;
    }
    for (int64_t j = columns; j < stride; ++j) {
      ASSERT_EQ(out[static_cast<size_t>(i * stride + j)], -7.0f) << row.name;
    }
  }
}

TEST(CpuComposites, GiveTheBitsOfTheirOperators) {
  for (const Level level : levels()) {
    for (const Row& row : rows()) {
      for (const int64_t columns : {1, 15, 16, 37, 130}) {
        for (unsigned constants = 0; constants < 31; constants += 5) {
          expect_equal_bits(row, level, columns, columns == 1 ? 0 : constants);
        }
      }
    }
  }
}

// Steps of the only sweep of a graph with inputs x, y and z, one value for each of `values`.
int64_t operations(const std::vector<nlohmann::json>& values, std::vector<int> results) {
  nlohmann::json all = nlohmann::json::array();
  for (const char* name : {"x", "y", "z"}) {
    all.push_back({{"op", "input"}, {"name", name}, {"dtype", "f32"}, {"shape", {"B", 1, 1, 32}}});
  }
  for (const auto& value : values) all.push_back(value);
  nlohmann::json stored = nlohmann::json::array();
  for (const int result : results) {
    stored.push_back({{"value", result}, {"name", std::to_string(result)}});
  }
  const nlohmann::json graph{{"ingot_graph", 1},
                             {"name", "chain"},
                             {"values", all},
                             {"results", stored},
                             {"updates", nlohmann::json::array()}};
  ProgramOptions options;
  auto executable = make_cpu_executable(
      make_plan(import_graph(graph.dump()), cpu_target(options), Precision::fp32), options);
  return executable->describe(4)["sweeps"][0]["operations"].get<int64_t>();
}

nlohmann::json value(const char* op, std::vector<int> args) {
  return {{"op", op}, {"args", args}};
}

TEST(CpuComposites, AreTakenInEitherOrderOfAProduct) {
  EXPECT_EQ(operations({value("silu", {0})}, {3}), 1);
  EXPECT_EQ(operations({value("silu", {0}), value("mul", {3, 1})}, {4}), 1);
  EXPECT_EQ(operations({value("silu", {0}), value("mul", {1, 3})}, {4}), 1);
  EXPECT_EQ(operations({value("gelu", {0}), value("add", {1, 3})}, {4}), 1);
  EXPECT_EQ(operations({value("mul", {0, 1}), value("add", {2, 3}), value("relu", {4})}, {5}), 1);
}

TEST(CpuComposites, LeaveAloneWhatOthersReadToo) {
  // The product is a result of its own, or the operand of two.
  EXPECT_EQ(operations({value("mul", {0, 1}), value("add", {3, 2})}, {3, 4}), 2);
  EXPECT_EQ(operations({value("mul", {0, 1}), value("add", {3, 3})}, {4}), 2);
  EXPECT_EQ(operations({value("silu", {0}), value("mul", {3, 3})}, {4}), 2);
  // A difference the other way round is none of the table's.
  EXPECT_EQ(operations({value("mul", {0, 1}), value("sub", {2, 3})}, {4}), 2);
}

}  // namespace
}  // namespace ingot::cpu
