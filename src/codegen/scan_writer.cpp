#include <fmt/format.h>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

constexpr int64_t kWarp = 32, kMostThreads = 512, kWarpsOfShortRows = 4;

// Threads that go through a row of so many vectors: steps of a row wait for one another.
int64_t team_for(int64_t vectors) {
  int64_t team = kWarp;
  while (team < kMostThreads && team < vectors) team *= 2;
  return team;
}

}  // namespace

KernelSource write_scan(const Plan& plan, int sweep) {
  SweepContext context(plan, sweep);
  const ValueId scan = context.sweep().stores[0];
  const Shape& space = context.space();
  KernelSource source;
  source.name = kernel_name(plan, sweep);
  source.sweep = sweep;
  source.batched = space.batched;
  source.rows_per_sample = space.rows * space.groups;

  FunctionWriter values(context, nullptr);
  const Reference element = values.value(context.node(scan).args[0]);
  values.lane_statement(fmt::format("x[i] = static_cast<Value>({});", element.text));
  FunctionWriter finish(context, [&](ValueId value) -> std::optional<Reference> {
    if (value != scan) return std::nullopt;
    return Reference{"sum[i]", context.type_of(scan)};
  });
  finish.store(scan);

  UnitParts parts;
  parts.comment = sweep_comment(context, source.name);
  parts.includes = {"common/pointwise.cuh", "sweeps/scan.cuh"};
  parts.functor = functor_name(source.name);
  const std::string constants =
      fmt::format("  static constexpr i64 kRow = {}, kRowsPerSample = {};\n  using Value = {};\n",
                  space.features, source.rows_per_sample, context.type_of(scan));
  const std::string functions = fmt::format(
      "  template <int V>\n"
      "  INGOT_D static void values(const Operands& operands, i64 b, i64 e, Value (&x)[V]) {{\n"
      "{}  }}\n"
      "  template <int V>\n"
      "  INGOT_D static void store(const Operands& operands, i64 b, i64 e,\n"
      "                            const Value (&sum)[V]) {{\n{}  }}\n",
      values.text(4), finish.text(4));
  parts.members = constants + context.operands_struct() + functions;

  std::vector<int> widths = {context.width()};
  if (widths[0] > 1) widths.push_back(1);
  for (const int width : widths) {
    KernelEntry entry;
    entry.name = source.name + (width == 1 && widths.size() > 1 ? "_unaligned" : "");
    entry.role = KernelRole::rows;
    entry.width = width;
    const int64_t team = team_for(space.features / width);
    entry.per_block = team > kWarp ? 1 : kWarpsOfShortRows;
    entry.threads = static_cast<int>(team * entry.per_block);
    parts.kernels.push_back(
        kernel_text(entry.name, parts.functor, entry.threads, "ingot::i64 rows",
                    fmt::format("scan_sweep<ingot::{}, {}, {}, {}>(operands, rows)", parts.functor,
                                width, team, entry.per_block)));
    source.entries.push_back(entry);
  }
  source.operands = context.operands();
  source.text = translation_unit(parts);
  return source;
}

}  // namespace ingot
