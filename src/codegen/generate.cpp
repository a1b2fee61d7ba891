#include <fmt/format.h>

#include <algorithm>

#include "codegen/kernel_source.h"
#include "codegen/product_epilogue.h"
#include "codegen/sweep_writers.h"
#include "sweeps/waves.cuh"

namespace ingot {
namespace {

bool has_reductions(const Graph& graph, const Sweep& sweep) {
  return std::any_of(sweep.body.begin(), sweep.body.end(),
                     [&](ValueId value) { return graph[value].kind == NodeKind::reduce; });
}

}  // namespace

int64_t rows_of(const KernelSource& source, int64_t batch) {
  return (source.batched ? batch : 1) * source.rows_per_sample;
}

SampleSplits splits_of(const KernelSource& source, const KernelEntry& entry, int64_t batch) {
  return split_samples((source.batched ? batch : 1) * source.leading, entry.per_block, entry.tiles);
}

int64_t blocks_of(const KernelSource& source, const KernelEntry& entry, int64_t batch) {
  const int64_t samples = source.batched ? batch : 1;
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  switch (entry.role) {
    case KernelRole::map:
      return entry.tiles * up(samples, entry.per_block);
    case KernelRole::columns:
    case KernelRole::columns_inner:
      return entry.tiles * splits_of(source, entry, batch).splits;
    case KernelRole::columns_whole:
    case KernelRole::merge:
      return entry.tiles;
    case KernelRole::rows:
    case KernelRole::rows_packed:
      return entry.tiles * up(rows_of(source, batch), entry.per_block);
    case KernelRole::waves_begin:
      return kWaveBeginBlocks;
    case KernelRole::waves:
      if (entry.stay > 0) return std::min(entry.stay, rows_of(source, batch) * entry.tiles);
      return wave_tasks(rows_of(source, batch), entry.tiles, source.phases);
    case KernelRole::groups:
      return samples;
  }
  return 0;
}

std::vector<KernelSource> generate_sweep(const Plan& plan, int index) {
  const Sweep& sweep = plan.sweeps[static_cast<size_t>(index)];
  switch (sweep.kind) {
    case SweepKind::map:
      return {write_map(plan, index)};
    case SweepKind::columns:
      return {write_columns(plan, index)};
    case SweepKind::rows:
      if (!has_reductions(plan.graph, sweep)) return {write_map(plan, index)};
      if (reduces_rows(plan, index)) return {write_rows(plan, index)};
      return {write_groups(plan, index)};
    case SweepKind::scan:
      return {write_scan(plan, index)};
    case SweepKind::product:
      break;
  }
  return write_behind_product(plan, index);
}

std::optional<KernelSource> generate_packing(const Plan& plan, int sweep, ValueId value,
                                             hopper::Scheme scheme) {
  return write_packing(plan, sweep, value, scheme);
}

std::vector<KernelSource> generate(const Plan& plan) {
  std::vector<KernelSource> sources;
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    for (KernelSource& source : generate_sweep(plan, static_cast<int>(i))) {
      sources.push_back(std::move(source));
    }
  }
  return sources;
}

}  // namespace ingot
