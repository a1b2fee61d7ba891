#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"

namespace ingot {
namespace {

constexpr int kMapThreads = 256;
// Samples that a thread loads at once: more where an element is 2 bytes, since what depends on the
// feature alone (fp32 statistics, folded scales) then outweighs it.
constexpr int kUnroll = 4, kUnrollOfHalf = 8;

int64_t power_of_two_at_least(int64_t value) {
  int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

}  // namespace

KernelSource write_map(const Plan& plan, int sweep) {
  SweepContext context(plan, sweep);
  KernelSource source;
  source.name = kernel_name(plan, sweep);
  source.sweep = sweep;
  source.batched = context.space().batched;
  const std::string functor = functor_name(source.name);
  const int64_t elements = context.space().static_elements();

  SampleBody body(context);
  FunctionWriter finish = body.writer();
  for (const ValueId value : context.sweep().stores) {
    // Behind a library product the product itself is there already.
    if (value != context.sweep().matmul) finish.store(value);
  }
  const std::string finish_text = finish.text(4);
  const std::string declarations = body.declarations();

  UnitParts parts;
  parts.comment = sweep_comment(context, source.name);
  parts.includes = {"common/pointwise.cuh", "sweeps/map.cuh"};
  parts.functor = functor;
  parts.members = fmt::format("  static constexpr i64 kElements = {};\n", elements) +
                  context.operands_struct() + declarations +
                  "  template <int V>\n"
                  "  INGOT_D static void finish(const Operands& operands, const Feature<V>& shared,"
                  " Element<V>& held,\n                             i64 b, i64 e) {\n" +
                  finish_text + "  }\n";

  std::vector<int> widths = {context.width()};
  if (widths[0] > 1) widths.push_back(1);
  for (const int width : widths) {
    const int64_t vectors = elements / width;
    const int64_t lanes = std::min<int64_t>(power_of_two_at_least(vectors), kMapThreads);
    const int64_t rows = kMapThreads / lanes;
    const int unroll = width > 4 ? kUnrollOfHalf : kUnroll;
    KernelEntry entry;
    entry.name = source.name + (width == 1 && widths.size() > 1 ? "_unaligned" : "");
    entry.role = KernelRole::map;
    entry.width = width;
    entry.threads = kMapThreads;
    entry.tiles = (vectors + lanes - 1) / lanes;
    entry.per_block = rows * unroll;
    parts.kernels.push_back(
        kernel_text(entry.name, functor, kMapThreads, "ingot::i64 samples",
                    fmt::format("map_sweep<ingot::{}, {}, {}, {}, {}>(operands, samples)", functor,
                                width, lanes, rows, unroll)));
    source.entries.push_back(entry);
  }
  source.operands = context.operands();
  source.text = translation_unit(parts);
  return source;
}

}  // namespace ingot
