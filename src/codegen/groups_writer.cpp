#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr int kGroupThreads = 256;
constexpr int64_t kResultBytes = 40000;  // of the 48 KB of static shared memory
// Of a sample, which one block reads for every reduction: PyTorch's operators share the GPU.
constexpr int64_t kMostElements = int64_t{1} << 17;

constexpr Axis kStaticAxes[] = {kRows, kGroups, kFeatures};

AxisMask axes_of(const Shape& seen, bool batch) {
  AxisMask mask = batch ? axis_bit(kBatch) : AxisMask{0};
  for (const Axis axis : kStaticAxes) {
    if (seen.extent(axis, 1) > 1) mask = static_cast<AxisMask>(mask | axis_bit(axis));
  }
  return mask;
}

// Writes the functor of kernels/sweeps/groups.cuh.
class GroupsWriter {
 public:
  GroupsWriter(const Plan& plan, int sweep) : context_(plan, sweep) {
    const Sweep& s = context_.sweep();
    std::vector<ValueId> reductions;
    for (const ValueId value : s.body) {
      if (context_.node(value).kind == NodeKind::reduce) reductions.push_back(value);
    }
    states_ = shared_states(plan.graph, s, reductions);
    source_.name = kernel_name(plan, sweep);
    source_.sweep = sweep;
    source_.batched = s.space.batched;
    functor_ = functor_name(source_.name);
  }

  KernelSource write() {
    if (context_.space().static_elements() > kMostElements) {
      fail(INGOT_UNSUPPORTED,
           "sweep {} reduces unlike parts of samples of {} elements; one block has time for {}",
           context_.sweep().name, context_.space().static_elements(), kMostElements);
    }
    std::string results, traits, values, resolves, stores;
    int64_t bytes = 0;
    for (size_t r = 0; r < states_.size(); ++r) write_reduction(r, &traits, &values, &resolves);
    for (const SharedState& state : states_) {
      for (const ValueId value : state.finishes) {
        const int64_t groups = context_.seen(value).static_elements();
        results += fmt::format("    {} {}[{}];\n", context_.type_of(value), context_.name_of(value),
                               groups);
        bytes += groups * (context_.type_of(value) == "float" ? 4 : 8);
      }
    }
    if (bytes > kResultBytes) {
      fail(INGOT_UNSUPPORTED,
           "sweep {} keeps {} bytes of reductions of one sample; the CUDA backend has room for {}",
           context_.sweep().name, bytes, kResultBytes);
    }
    const std::string outputs = write_outputs(&stores);
    const std::string nothing = "    // no reductions\n";

    UnitParts parts;
    parts.comment = sweep_comment(context_, source_.name);
    parts.includes = {"common/pointwise.cuh", "sweeps/groups.cuh"};
    parts.functor = functor_;
    parts.members =
        fmt::format(
            "  static constexpr int kReductions = {}, kOutputs = {};\n"
            "  static constexpr i64 kOutputElements[] = {{{}}};\n",
            states_.size(), context_.sweep().stores.size(), outputs) +
        context_.operands_struct() + "  struct Results {\n" + results + "  };\n" + traits +
        "\n  template <int R>\n"
        "  INGOT_D static auto value(const Operands& operands, const Results& results, i64 b,\n"
        "                            u32 group, u32 j) {\n" +
        values +
        "\n  }\n  template <int R, class State>\n"
        "  INGOT_D static void resolve(const State& state, u32 group, Results& results) {\n" +
        resolves +
        "\n  }\n  template <int S>\n"
        "  INGOT_D static void store(const Operands& operands, const Results& results, i64 b,\n"
        "                            u32 e) {\n" +
        stores + "\n  }\n";
    KernelEntry entry;
    entry.name = source_.name;
    entry.role = KernelRole::groups;
    entry.threads = kGroupThreads;
    parts.kernels.push_back(kernel_text(
        entry.name, functor_, kGroupThreads, "ingot::i64 samples",
        fmt::format("groups_sweep<ingot::{}, {}>(operands, samples)", functor_, kGroupThreads)));
    source_.entries.push_back(entry);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

 private:
  // results.v9_max[g]: a merged reduction at the current element.
  std::optional<Reference> result(FunctionWriter& writer, ValueId value) const {
    if (!context_.computes(value) || context_.node(value).kind != NodeKind::reduce) {
      return std::nullopt;
    }
    return Reference{fmt::format("results.{}[{}]", context_.name_of(value),
                                 writer.flat_index(context_.seen(value))),
                     context_.type_of(value)};
  }

  void write_reduction(size_t r, std::string* traits, std::string* values, std::string* resolves) {
    const SharedState& state = states_[r];
    const Shape& space = context_.space();
    const std::string type = reduction_type(context_, {state.finishes.at(0)});
    int64_t groups = 1, count = 1;
    // e from the group (kept axes) and j (reduced axes).
    std::string flat;
    int64_t stride = 1;
    for (const Axis axis : {kFeatures, kGroups, kRows}) {
      const int64_t extent = space.extent(axis, 1);
      if (extent == 1) continue;
      const bool reduced = (state.axes & axis_bit(axis)) != 0;
      int64_t& before = reduced ? count : groups;
      flat = fmt::format("{} / {} % {} * {}{}{}", reduced ? "j" : "group", before, extent, stride,
                         flat.empty() ? "" : " + ", flat);
      before *= extent;
      stride *= extent;
    }
    *traits +=
        fmt::format("  INGOT_D static GroupReduction<{}, {}, {}, {}> reduction(Index<{}>);\n",
                    context_.monoid(state, type), type, groups, count, r);

    FunctionWriter* self = nullptr;
    FunctionWriter writer(
        context_, [this, &self](ValueId value) { return result(*self, value); },
        FunctionWriter::Lanes::scalar);
    self = &writer;
    const Reference reference = writer.value(state.arg);
    writer.statement(fmt::format("return static_cast<{}>({});", type, reference.text));
    const char* branch = r == 0 ? "    if constexpr" : " else if constexpr";
    *values += fmt::format("{} (R == {}) {{\n      const u32 e = {};\n{}    }}", branch, r,
                           flat.empty() ? "0" : flat, writer.text(6));
    std::string lines;
    for (const ValueId value : state.finishes) {
      lines += fmt::format(
          "      results.{}[group] = static_cast<{}>({});\n", context_.name_of(value),
          context_.type_of(value),
          finish_expression(context_.node(value).finish, context_.monoid(state, type), "state"));
    }
    *resolves += fmt::format("{} (R == {}) {{\n{}    }}", branch, r, lines);
  }

  std::string write_outputs(std::string* stores) {
    std::vector<std::string> extents;
    size_t index = 0;
    for (const ValueId value : context_.sweep().stores) {
      const Shape& seen = context_.seen(value);
      FunctionWriter* self = nullptr;
      FunctionWriter writer(
          context_, [this, &self](ValueId v) { return result(*self, v); },
          FunctionWriter::Lanes::scalar, axes_of(seen, context_.space().batched));
      self = &writer;
      writer.store(value);
      *stores += fmt::format("{} (S == {}) {{\n{}    }}",
                             index == 0 ? "    if constexpr" : " else if constexpr", index,
                             writer.text(6));
      extents.push_back(fmt::format("{}", seen.static_elements()));
      ++index;
    }
    return fmt::format("{}", fmt::join(extents, ", "));
  }

  SweepContext context_;
  KernelSource source_;
  std::string functor_;
  std::vector<SharedState> states_;
};

}  // namespace

KernelSource write_groups(const Plan& plan, int sweep) {
  return GroupsWriter(plan, sweep).write();
}

}  // namespace ingot
