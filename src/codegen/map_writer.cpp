#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

constexpr int kMapThreads = 256;
// Samples that a thread loads at once: more where an element is 2 bytes, since what depends on the
// feature alone (fp32 statistics, folded scales) then outweighs it.
constexpr int kUnroll = 4, kUnrollOfHalf = 8;
// Vectors that a thread holds so, of the sweep's width or of four: with more fewer threads fit.
constexpr int kHeldVectors = 8;
// Fewer elements are moved one by one where no vector divides them.
constexpr int64_t kLeastOdd = 1024;
constexpr int64_t kIndex32 = int64_t{1} << 31;
// Bytes that samples share, from which on the L2 cache does not hold them from sample to sample.
constexpr int64_t kMuchShared = int64_t{8} << 20;
// Values that a thread loads at once where operands lie turned, and shared ones with them.
constexpr int64_t kTurnedValues = 16, kMostTurnedValues = 96;

int64_t power_of_two_at_least(int64_t value) {
  int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

// Of an element: own ones, and those that samples share; of which a vector has one each for its
// elements.
struct Values {
  int64_t loaded = 0, shared = 0, loaded_lanes = 0, shared_lanes = 0;
};

// The functor, behind `constants`; values: those that it takes.
UnitParts map_parts(SweepContext& context, const std::string& name, const std::string& constants,
                    Values& values) {
  SampleBody body(context);
  FunctionWriter finish = body.writer();
  for (const ValueId value : context.sweep().stores) {
    // Behind a library product the product itself is there already.
    if (value != context.sweep().matmul) finish.store(value);
  }
  const std::string finish_text = finish.text(4);
  const std::string declarations = body.declarations();
  values = {static_cast<int64_t>(body.loads()), static_cast<int64_t>(body.shares()),
            static_cast<int64_t>(body.loaded_lanes()), static_cast<int64_t>(body.shared_lanes())};

  UnitParts parts;
  parts.comment = sweep_comment(context, name);
  parts.includes = {"common/pointwise.cuh", "sweeps/map.cuh"};
  parts.functor = functor_name(name);
  parts.members = constants + context.operands_struct() + declarations +
                  "  template <int V>\n"
                  "  INGOT_D static void finish(const Operands& operands, const Feature<V>& shared,"
                  " Element<V>& held,\n                             i64 b, " +
                  context.index_type() + " e) {\n" + finish_text + "  }\n";
  return parts;
}

int samples_at_once(const Values& values, int width) {
  const int64_t held = values.loaded_lanes * (width - 1) + values.loaded;
  int samples = width > 4 ? kUnrollOfHalf : kUnroll;
  while (samples > 1 && samples * held > kHeldVectors * std::max(width, 4)) samples /= 2;
  return samples;
}

}  // namespace

KernelSource write_map(const Plan& plan, int sweep) {
  SweepContext context(plan, sweep);
  KernelSource source;
  source.name = kernel_name(plan, sweep);
  source.sweep = sweep;
  source.batched = context.space().batched;
  if (context.space().features > 1) source.row_axes = axis_bit(kFeatures);
  const int64_t elements = context.space().static_elements();
  if (elements < kIndex32) context.index_in_32_bits();
  const int across_width = context.width_across_rows();
  if (across_width > 0) context.go_across_rows();
  Values values;
  UnitParts parts =
      map_parts(context, source.name,
                fmt::format("  static constexpr i64 kElements = {};\n  using Index = {};\n",
                            elements, context.index_type()),
                values);
  const std::string& functor = parts.functor;
  const bool by_samples = 4 * elements * values.shared_lanes >= kMuchShared;
  parts.members.insert(0, fmt::format("  static constexpr bool kBySamples = {};\n", by_samples));

  // What depends on the element alone, and samples share, stands at another place of a vector for
  // each of them.
  const bool otherwise = std::any_of(
      context.operands().begin(), context.operands().end(),
      [&](const KernelOperand& o) { return o.vector && context.lies_otherwise(o.value); });
  const bool may_be_odd = values.shared_lanes == 0 && elements >= kLeastOdd && !otherwise;
  const int odd_width = may_be_odd ? context.odd_width(elements) : 0;
  std::vector<int> widths = {odd_width > 0 ? odd_width : context.width()};
  if (across_width > 0) widths.insert(widths.begin(), across_width);
  if (widths.back() > 1) widths.push_back(1);
  for (const int width : widths) {
    const bool first = source.entries.empty();
    const int64_t vectors = (elements + width - 1) / width;
    const int64_t lanes = std::min<int64_t>(power_of_two_at_least(vectors), kMapThreads);
    const int64_t rows = kMapThreads / lanes;
    KernelEntry entry;
    entry.name = source.name + (first ? "" : width == 1 ? "_unaligned" : "_in_rows");
    entry.role = KernelRole::map;
    entry.width = width;
    entry.odd = width > 1 && odd_width > 0;
    entry.across_rows = first && across_width > 0;
    entry.threads = kMapThreads;
    entry.tiles = (vectors + lanes - 1) / lanes;
    const int unroll = samples_at_once(values, width);
    entry.per_block = rows * unroll;
    parts.kernels.push_back(kernel_text(
        entry.name, functor, kMapThreads, "ingot::i64 samples",
        fmt::format("{}<ingot::{}, {}, {}, {}, {}>(operands, samples)",
                    entry.odd ? "odd_map" : "map_sweep", functor, width, lanes, rows, unroll)));
    source.entries.push_back(entry);
  }
  source.operands = context.operands();
  source.text = translation_unit(parts);
  return source;
}

KernelSource write_map_turned(const Plan& plan, int sweep, const TurnedOperands& operands) {
  SweepContext context(plan, sweep);
  context.turn(operands.apart, axis_bit(kFeatures));
  const Shape& space = context.space();
  KernelSource source;
  source.name = kernel_name(plan, sweep) + "_turned";
  source.sweep = sweep;
  source.batched = space.batched;
  source.rows_per_sample = space.rows * space.groups;
  Values values;
  UnitParts parts =
      map_parts(context, source.name,
                fmt::format("  static constexpr i64 kRow = {}, kRowsPerSample = {};\n",
                            space.features, source.rows_per_sample),
                values);
  parts.includes.back() = "sweeps/rows_turned.cuh";

  const int width = context.width();
  const int64_t vectors = space.features / width;
  int64_t unroll = kTurnedValues / width;
  const int64_t all = values.loaded + values.shared;
  while (unroll > 1 && unroll * width * all > kMostTurnedValues) unroll /= 2;
  TurnedBlock block{TurnedBlock::rows_of(operands.least_bytes)};
  while (block.warps < TurnedBlock::kFewestWarps && block.team() * unroll < vectors) {
    block.warps *= 2;
  }
  block.fill();
  KernelEntry entry;
  entry.name = source.name;
  entry.role = KernelRole::rows;
  entry.width = width;
  entry.threads = block.threads();
  entry.tiles = (vectors + block.team() * unroll - 1) / (block.team() * unroll);
  entry.per_block = block.rows * block.groups;
  parts.kernels.push_back(kernel_text(
      entry.name, parts.functor, entry.threads, "ingot::i64 rows",
      fmt::format("map_turned<ingot::{}, {}, {}, {}, {}, {}>(operands, rows)", parts.functor, width,
                  block.rows, block.warps, block.groups, unroll)));
  source.entries.push_back(entry);
  source.operands = context.operands();
  source.text = translation_unit(parts);
  return source;
}

}  // namespace ingot
