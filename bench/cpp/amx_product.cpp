// What the parts of the product on AMX tiles cost: packing a panel, the product of two panels, the
// update of partial sums, the whole. Labels say whether the instructions ran or their emulation,
// whose times mean nothing but for packing and update.
#include <benchmark/benchmark.h>

#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "cpu/product/amx/product.h"
#include "cpu/product/amx/support.h"
#include "cpu/product/buffers.h"

namespace ingot::cpu::amx {
namespace {

Isa machine() {
  return detect_isa(nlohmann::json::object());
}

const Engine& engine_for(Scheme scheme) {
  const Support usable = support(machine());
  const bool real = scheme == Scheme::f3 ? usable.fp16 : usable.bf16;
  return real ? *instruction_engine() : best_emulated_engine(machine());
}

std::vector<float> random_matrix(int64_t elements) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> data(static_cast<size_t>(elements));
  for (float& v : data) v = uniform(generator);
  return data;
}

void add_rate(benchmark::State& state, const char* name, double each) {
  state.counters[name] = benchmark::Counter(each * static_cast<double>(state.iterations()),
                                            benchmark::Counter::kIsRate);
}

// Arguments: scheme, whether rows lie across k, whether it packs the right side.
void amx_pack(benchmark::State& state) {
  const auto scheme = static_cast<Scheme>(state.range(0));
  const Engine& engine = engine_for(scheme);
  constexpr int64_t kLd = 4096 + 16;
  const std::vector<float> data = random_matrix(kLd * kBlockK);
  const PanelSource source{data.data(),        kLd, kPanelRows, kBlockK, state.range(1) != 0,
                           state.range(2) != 0};
  Buffer packed;
  float exponents[kPanelRows];
  packed.reserve(kPanelBytes[1]);
  for (auto _ : state) {
    benchmark::DoNotOptimize(engine.pack(scheme, source, packed.reserve(0), exponents));
    benchmark::ClobberMemory();
  }
  add_rate(state, "elements", kPanelRows * kBlockK);
  state.SetLabel(engine.name);
}
BENCHMARK(amx_pack)->ArgsProduct({{0, 1}, {0, 1}, {0, 1}})->ArgNames({"scheme", "across", "right"});

// Arguments: scheme, right panels in turn (their bytes decide the cache), whether an update of
// partial sums runs in between.
void amx_multiply(benchmark::State& state) {
  const auto scheme = static_cast<Scheme>(state.range(0));
  const Engine& engine = engine_for(scheme);
  const int64_t panels = state.range(1);
  const std::vector<float> data = random_matrix(kPanelRows * kBlockK);
  Buffer memory;
  std::byte* const left = memory.reserve(static_cast<size_t>((panels + 1) * kPanelBytes[1]));
  std::byte* const right = left + kPanelBytes[1];
  float exponents[kPanelRows];
  PanelSource source{data.data(), kBlockK, kPanelRows, kBlockK, false, false};
  engine.pack(scheme, source, left, exponents);
  source.right = true;
  for (int64_t i = 0; i < panels; ++i) {
    engine.pack(scheme, source, right + i * kPanelBytes[1], exponents);
  }
  constexpr int kFloats = kPanelRows * kPanelRows;
  alignas(64) static float sums[2][kFloats], partial[kFloats], zeros[kFloats];
  Update pending;
  engine.begin();
  int64_t i = 0;
  for (auto _ : state) {
    engine.multiply[state.range(0)]({left, right + i * kPanelBytes[1], kSteps, sums[0], {}},
                                    &pending);
    i = i + 1 < panels ? i + 1 : 0;
    if (state.range(2) != 0) {
      pending = {zeros,      exponents,  exponents, partial, nullptr, 0,
                 kPanelRows, kPanelRows, 0,         false,   false};
    }
    benchmark::ClobberMemory();
  }
  engine.end();
  add_rate(state, "flops", 2.0 * kPanelRows * kPanelRows * kBlockK);
  state.SetLabel(engine.name);
}
BENCHMARK(amx_multiply)
    ->ArgsProduct({{0, 1}, {1, 8, 128}, {0, 1}})
    ->ArgNames({"scheme", "panels", "update"});

// Argument: whether it is the last block, which goes to c.
void amx_update(benchmark::State& state) {
  const Engine& engine = engine_for(Scheme::b6);
  constexpr int kFloats = kPanelRows * kPanelRows;
  constexpr int64_t kLd = 4096 + 16;
  alignas(64) static float sums[kFloats], partial[kFloats];
  std::vector<float> c(static_cast<size_t>(kLd * kPanelRows));
  float exponents[kPanelRows] = {};
  for (auto _ : state) {
    Update pending{sums,       exponents,  exponents, partial, c.data(),           kLd,
                   kPanelRows, kPanelRows, 0,         false,   state.range(0) != 0};
    engine.finish(&pending);
    benchmark::ClobberMemory();
  }
  add_rate(state, "elements", kFloats);
  state.SetLabel(engine.name);
}
BENCHMARK(amx_update)->DenseRange(0, 1)->ArgName("last");

// Arguments: scheme, m, n, k, whether the right operand is packed before.
void amx_whole(benchmark::State& state) {
  const auto scheme = static_cast<Scheme>(state.range(0));
  const int64_t m = state.range(1), n = state.range(2), k = state.range(3);
  const Engine& engine = engine_for(scheme);
  const Product product("benchmark", engine, scheme, machine(), true);
  const std::vector<float> a = random_matrix(m * k), b = random_matrix(n * k);
  std::vector<float> c(static_cast<size_t>(m * n));
  ProductCall call{m, n, k, a.data(), k, b.data(), k, true, c.data(), n};
  Buffer packed;
  if (state.range(4) != 0) {
    product.pack(call, packed.reserve(product.packed_bytes(call)));
    call.packed_b = packed.data();
  }
  for (auto _ : state) {
    product.run(call);
    benchmark::ClobberMemory();
  }
  add_rate(state, "flops",
           2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
  state.SetLabel(engine.name);
}
BENCHMARK(amx_whole)
    ->ArgsProduct({{0, 1}, {128}, {1024}, {1024}, {0, 1}})
    ->ArgsProduct({{0, 1}, {512}, {1024}, {1024}, {0}})
    ->ArgNames({"scheme", "m", "n", "k", "packed"})
    ->UseRealTime();

}  // namespace
}  // namespace ingot::cpu::amx
