#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

constexpr int64_t kWarp = 32, kLargestTeam = 512, kBlock = 128;
// Loads of a thread that are on their way at once, of short rows and of others; and elements.
constexpr int64_t kFewestLoads = 2, kLoads = 4, kHeld = 16, kMostHeld = 32;
constexpr int kWideVector = 4;  // narrower ones need registers for addresses as well

// Who goes through a row.
struct Team {
  int64_t threads, vectors;  // vectors: of a tile, by thread
  int64_t rows_of_block() const { return threads > kWarp ? 1 : kBlock / threads; }
};

Team team_for(int64_t vectors, int width) {
  Team team{4, kFewestLoads};
  while (team.threads < kWarp && team.threads * team.vectors < vectors) team.threads *= 2;
  if (team.threads * team.vectors >= vectors) return team;
  team.vectors = std::min(std::max(kHeld / width, kLoads), (vectors + kWarp - 1) / kWarp);
  const bool long_row = vectors > kLargestTeam * team.vectors;
  if (long_row && width >= kWideVector) team.vectors = kMostHeld / width;
  const int64_t of_warp = kWarp * team.vectors;
  team.threads = std::min((vectors + of_warp - 1) / of_warp * kWarp, kLargestTeam);
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
    const Team team = team_for(space.features / width, width);
    entry.per_block = team.rows_of_block();
    entry.threads = static_cast<int>(team.threads * entry.per_block);
    parts.kernels.push_back(kernel_text(
        entry.name, parts.functor, entry.threads, "ingot::i64 rows",
        fmt::format("scan_sweep<ingot::{}, {}, {}, {}, {}>(operands, rows)", parts.functor, width,
                    team.threads, team.vectors, entry.per_block)));
    source.entries.push_back(entry);
  }
  source.operands = context.operands();
  source.text = translation_unit(parts);
  return source;
}

}  // namespace ingot
