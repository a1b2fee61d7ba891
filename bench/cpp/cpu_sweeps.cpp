// What the parts of a host sweep cost: loops of primitives over a block in cache, and the product.
#include <benchmark/benchmark.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "cpu/primitives.h"
#include "cpu/product/own.h"
#include "graph/graph.h"

namespace ingot::cpu {
namespace {

constexpr int64_t kElements = 8192;  // a tile

const Primitives<float>& widest() {
  return primitives<float>(detect_isa(nlohmann::json::object()).level);
}

void pointwise(benchmark::State& state, PointwiseOp op) {
  std::vector<float> a(kElements, 0.75f), b(kElements, 1.25f), c(kElements, 2.0f), out(kElements);
  MapBlock<float> block{};
  block.out = out.data();
  block.in[0] = a.data();
  block.in[1] = b.data();
  block.in[2] = c.data();
  block.rows = 1;
  block.columns = kElements;
  const auto map = widest().map[static_cast<int>(op)][0];
  for (auto _ : state) {
    map(block);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}
#define INGOT_BENCH(name, arity, ...) BENCHMARK_CAPTURE(pointwise, name, PointwiseOp::name##_);
INGOT_POINTWISE_OPERATORS(INGOT_BENCH)
#undef INGOT_BENCH

void reduce_columns(benchmark::State& state) {
  constexpr int64_t kColumns = 512;
  std::vector<float> x(kElements, 0.5f);
  std::vector<double> first(kColumns), second(kColumns);
  const auto reduce = widest().reduce_columns[state.range(0)];
  for (auto _ : state) {
    reduce(x.data(), kColumns, kElements / kColumns, kColumns,
           {first.data(), second.data(), 16, 0});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}
BENCHMARK(reduce_columns)->DenseRange(0, static_cast<int>(ReduceMonoid::count_) - 1);

void reduce_run(benchmark::State& state) {
  std::vector<float> x(kElements, 0.5f);
  double first = 0, second = 0;
  const auto reduce = widest().reduce_run[state.range(0)];
  for (auto _ : state) {
    reduce(x.data(), kElements, {&first, &second, 16, 0});
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kElements);
}
BENCHMARK(reduce_run)->DenseRange(0, static_cast<int>(ReduceMonoid::count_) - 1);

void product(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  std::vector<float> a(static_cast<size_t>(m * k), 0.5f), b(static_cast<size_t>(n * k), 0.25f),
      c(static_cast<size_t>(m * n));
  const auto own = own_product(detect_isa(nlohmann::json::object()), true);
  for (auto _ : state) {
    own->run({m, n, k, a.data(), k, b.data(), k, true, c.data(), n, INGOT_F32});
    benchmark::ClobberMemory();
  }
  state.counters["flops"] = benchmark::Counter(
      2.0 * static_cast<double>(m * n * k) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}
BENCHMARK(product)
    ->Args({1, 8192, 8192})
    ->Args({64, 64, 64})
    ->Args({128, 4096, 4096})
    ->Args({512, 1024, 1024})
    ->Args({1024, 4096, 4096})
    ->UseRealTime();

}  // namespace
}  // namespace ingot::cpu
