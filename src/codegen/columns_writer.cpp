#include <fmt/format.h>

#include <algorithm>

#include "codegen/sweep_writers.h"
#include "plan/cost.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr int kColumnThreads = 256;
// Samples that a thread folds at once: fewer where it loads several tensors, since registers then
// leave a multiprocessor but one block.
constexpr int kChunk = 8, kChunkOfSeveral = 4;
// Vectors of a column that a thread reads ahead in the inner layout, and of how many elements at
// most, since they are registers.
constexpr int kInnerChunk = 4, kInnerElements = 16;
// Of few columns: blocks share a sample's part of one, in pieces of so many vectors or more, and
// are small, so that all of them are under way at once.
constexpr int64_t kFewColumns = 16, kPieceVectors = 1024;
constexpr int kFewColumnsThreads = 128;
// Threads of a multiprocessor that the compiler is told of where the body loads so few tensors that
// none of their vectors leaves its registers: left to itself it takes fewer registers, and waits
// for one vector after the other.
constexpr int kFewColumnsAtOnce = 1024;
constexpr size_t kFewLoads = 2;
// Of an element, from which on what it is computed by takes all the threads that there can be.
constexpr double kMuchWork = 40;
constexpr int kMergeLanes = 16;     // columns of a merging block
constexpr int kMergeSegments = 32;  // ranges of splits that it merges side by side
// Of so many columns the samples are split into few (sweeps/splits.h): a thread merges them.
constexpr int64_t kManyColumns = int64_t{1} << 17;
constexpr int kManyLanes = 256;
constexpr int kMostLanes = 32;  // of the leading layout

int64_t extent_over(const Shape& space, AxisMask mask) {
  int64_t product = 1;
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    if (mask & axis_bit(axis)) product *= space.extent(axis, 1);
  }
  return product;
}

// Into how many equal pieces of whole vectors the reduced elements of a sample are cut.
int64_t pieces_of(int64_t columns, int64_t elements, int width) {
  const int64_t vectors = elements / width;
  if (columns >= kFewColumns) return 1;
  for (int64_t pieces = std::min<int64_t>(vectors / kPieceVectors, 1024); pieces > 1; --pieces) {
    if (vectors % pieces == 0) return pieces;
  }
  return 1;
}

// Whether samples are split, if there are many, where blocks have so many columns each.
bool are_split(int64_t columns, int64_t of_block) {
  return split_samples(int64_t{1} << 40, 1, (columns + of_block - 1) / of_block).splits > 1;
}

// e = Σ coordinate·stride, each coordinate taken from `column` (kept axes) or `inner` (reduced).
std::string flat_expression(const Shape& space, AxisMask reduced) {
  std::vector<std::string> terms;
  const int64_t all_kept = extent_over(space, static_cast<AxisMask>(~reduced));
  const int64_t all_reduced = extent_over(space, reduced);
  int64_t stride = 1, kept_inner = 1, reduced_inner = 1;
  for (const Axis axis : {kFeatures, kGroups, kRows}) {
    const int64_t extent = space.extent(axis, 1);
    if (extent == 1) continue;
    const bool is_reduced = (reduced & axis_bit(axis)) != 0;
    int64_t& before = is_reduced ? reduced_inner : kept_inner;
    std::string term = is_reduced ? "inner" : "column";
    if (before > 1) term += fmt::format(" / {}", before);
    if (before * extent < (is_reduced ? all_reduced : all_kept)) {
      term += fmt::format(" % {}", extent);
    }
    if (stride > 1) term += fmt::format(" * {}", stride);
    terms.insert(terms.begin(), term);
    before *= extent;
    stride *= extent;
  }
  return terms.empty() ? "0" : fmt::format("{}", fmt::join(terms, " + "));
}

// Whether a sweep loads a tensor of every sample that the other touches.
bool shares_samples(const Plan& plan, const Sweep& sweep, const Sweep& other) {
  return std::any_of(sweep.loads.begin(), sweep.loads.end(), [&](ValueId id) {
    const auto among = [id](const std::vector<ValueId>& list) {
      return std::find(list.begin(), list.end(), id) != list.end();
    };
    return plan.graph[id].shape.batched && (among(other.loads) || among(other.stores));
  });
}

// A columns sweep begins where the last sweep that touched its tensors ended. Products end
// everywhere.
bool runs_backwards(const Plan& plan, int sweep) {
  const Sweep& own = plan.sweeps[static_cast<size_t>(sweep)];
  for (int before = sweep - 1; before >= 0 && own.kind == SweepKind::columns; --before) {
    const Sweep& other = plan.sweeps[static_cast<size_t>(before)];
    if (!shares_samples(plan, own, other)) continue;
    return other.kind != SweepKind::product && !runs_backwards(plan, before);
  }
  return false;
}

class ColumnsWriter {
 public:
  ColumnsWriter(const Plan& plan, int sweep) : context_(plan, sweep) {
    const Sweep& s = context_.sweep();
    states_ = statistics_states(plan, s);
    axes_ = reduced_axes(plan.graph, s, s.statistics.at(0));
    reduced_ = static_cast<AxisMask>(s.space.static_axes() & axes_);
    kept_ = static_cast<AxisMask>(s.space.static_axes() & ~axes_);
    value_type_ = reduction_type(context_, s.statistics);
    source_.name = kernel_name(plan, sweep);
    source_.sweep = sweep;
    source_.batched = s.space.batched;
    source_.columns = extent_over(s.space, kept_);
    // Masks compare as numbers since a later axis has a higher bit.
    leading_ = reduced_ < (kept_ & (~kept_ + 1)) || reduced_ == 0;
    inner_ = leading_ ? 1 : extent_over(s.space, reduced_);
    source_.leading = leading_ ? extent_over(s.space, reduced_)
                               : pieces_of(source_.columns, inner_, context_.width());
    inner_ /= leading_ ? 1 : source_.leading;
    if (has_few_columns()) context_.address_vectors();
    functor_ = functor_name(source_.name);
  }

  // The merging kernel and the tail alone, for partial states that a product emits.
  KernelSource write_merge_only() {
    source_.name += "_merge";
    functor_ = functor_name(source_.name);
    UnitParts parts;
    const std::string tail = tail_text();
    parts.comment = sweep_comment(context_, source_.name);
    parts.includes = {"common/pointwise.cuh", "sweeps/columns.cuh"};
    parts.functor = functor_;
    parts.members = constants() + context_.operands_struct() + tail_function(tail);
    add_merge(parts, source_.name);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

  KernelSource write() {
    SampleBody body(context_);
    FunctionWriter values = body.writer();
    write_values(values);
    const std::string values_text = values.text(4);
    const std::string declarations = body.declarations();
    const std::string tail = tail_text();
    chunk_ = body.loads() > 1 ? kChunkOfSeveral : kChunk;
    has_few_loads_ = body.loads() <= kFewLoads;

    UnitParts parts;
    parts.comment = sweep_comment(context_, source_.name);
    parts.includes = {"common/pointwise.cuh", "sweeps/columns.cuh"};
    parts.functor = functor_;
    parts.members = constants() + context_.operands_struct() + flat_function() + declarations +
                    fmt::format(
                        "  template <int V>\n"
                        "  INGOT_D static void values(const Operands& operands, const "
                        "Feature<V>& shared,\n                             Element<V>& "
                        "held, i64 b, i64 e, Value (&x)[{}][V]) {{\n",
                        states_.size()) +
                    values_text + "  }\n" + tail_function(tail);
    write_kernels(parts);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

 private:
  void write_values(FunctionWriter& values) {
    for (size_t n = 0; n < states_.size(); ++n) {
      const bool lanes = values.has_lanes(states_[n].arg);
      const Reference reference = values.value(states_[n].arg);
      const std::string text =
          fmt::format("x[{}][{}] = static_cast<Value>({});", n, lanes ? "i" : "0", reference.text);
      lanes ? values.lane_statement(text) : values.statement(text);
    }
    for (const ValueId value : context_.sweep().stores) {
      if (!in_tail(value) && value != context_.sweep().matmul) values.store(value);
    }
  }

  bool in_tail(ValueId value) const {
    const Sweep& s = context_.sweep();
    return std::find(s.tail.begin(), s.tail.end(), value) != s.tail.end() ||
           std::find(s.statistics.begin(), s.statistics.end(), value) != s.statistics.end();
  }

  std::string tail_text() {
    FunctionWriter tail(
        context_,
        [this](ValueId value) -> std::optional<Reference> {
          for (size_t n = 0; n < states_.size(); ++n) {
            const auto& finishes = states_[n].finishes;
            if (std::find(finishes.begin(), finishes.end(), value) == finishes.end()) continue;
            const std::string text = finish_expression(context_.node(value).finish,
                                                       context_.monoid(states_[n], value_type_),
                                                       "state" + together_member(n));
            return Reference{fmt::format("static_cast<{}>({})", context_.type_of(value), text),
                             context_.type_of(value)};
          }
          return std::nullopt;
        },
        FunctionWriter::Lanes::scalar, kept_);
    for (const ValueId value : context_.sweep().stores) {
      if (in_tail(value)) tail.store(value);
    }
    return tail.text(4);
  }

  static std::string tail_function(const std::string& tail) {
    return "  INGOT_D static void tail(const Operands& operands, const Statistics::State& state,"
           " i64 e) {\n" +
           tail + "  }\n";
  }

  std::string constants() {
    std::vector<std::string> monoids;
    for (const SharedState& state : states_) {
      monoids.push_back(context_.monoid(state, value_type_));
      source_.state_bytes += (state_bytes(state.monoid, value_type_) + 7) / 8 * 8;
    }
    return fmt::format(
        "  static constexpr i64 kColumns = {}, kLeading = {}, kInner = {};\n"
        "  static constexpr bool kBackwards = {}, kFeatureOfColumn = {};\n"
        "  using Value = {};\n  using Statistics = Together<{}>;\n",
        source_.columns, source_.leading, inner_, runs_backwards(context_.plan(), source_.sweep),
        has_features_of_column(), value_type_, fmt::join(monoids, ", "));
  }

  // Whether what is loaded once for all samples varies along none of the reduced axes.
  bool has_features_of_column() const {
    const Sweep& s = context_.sweep();
    return std::all_of(s.loads.begin(), s.loads.end(), [&](ValueId id) {
      const auto seen = s.shapes.find(id);
      if (seen == s.shapes.end()) return true;  // the tail's alone
      return seen->second.batched || (seen->second.static_axes() & reduced_) == 0;
    });
  }

  std::string flat_function() const {
    if (leading_) return "";
    return fmt::format(
        "  INGOT_D static i64 flat(i64 column, i64 inner) {{\n    return {};\n  }}\n",
        flat_expression(context_.space(), reduced_));
  }

  void write_kernels(UnitParts& parts) {
    int width = context_.width();
    // Lanes must lie along what the threads lie along.
    const AxisMask along = leading_ ? kept_ : reduced_;
    if (!(along & axis_bit(kFeatures))) width = 1;
    std::vector<int> widths = {width};
    if (width > 1) widths.push_back(1);
    const bool whole = leading_ && !are_split(source_.columns, int64_t{width} * kMostLanes);
    for (const int w : widths) {
      KernelEntry entry;
      entry.name = source_.name + (w == 1 && widths.size() > 1 ? "_unaligned" : "");
      entry.width = w;
      entry.threads = kColumnThreads;
      const std::string parameters =
          whole ? "ingot::i64 samples"
                : "ingot::i64 samples, ingot::i64 split_samples,\n    void* partials";
      const std::string arguments =
          whole ? "(operands, samples)" : "(operands, samples, split_samples, partials)";
      if (leading_) {
        const int64_t vectors = source_.columns / w;
        int64_t lanes = 1;
        while (lanes < vectors && lanes < kMostLanes) lanes *= 2;
        const int64_t rows = kColumnThreads / lanes;
        entry.role = whole ? KernelRole::columns_whole : KernelRole::columns;
        entry.tiles = (vectors + lanes - 1) / lanes;
        entry.per_block = rows * chunk_;
        const std::string function = whole ? "columns_whole_sweep" : "columns_sweep";
        parts.kernels.push_back(kernel_text(entry.name, functor_, kColumnThreads, parameters,
                                            fmt::format("{}<ingot::{}, {}, {}, {}, {}>", function,
                                                        functor_, w, lanes, rows, chunk_) +
                                                arguments));
      } else {
        entry.role = KernelRole::columns_inner;
        entry.tiles = source_.columns;
        if (has_few_columns() && work() < kMuchWork) entry.threads = kFewColumnsThreads;
        const bool bounded = has_few_columns() && has_few_loads_;
        const int at_once = bounded ? kFewColumnsAtOnce / entry.threads : 0;
        const int64_t vectors = inner_ / w;
        entry.per_block = std::max<int64_t>(1, 4 * entry.threads / vectors);
        parts.kernels.push_back(
            kernel_text(entry.name, functor_, entry.threads, parameters,
                        fmt::format("columns_inner_sweep<ingot::{}, {}, {}, {}>", functor_, w,
                                    entry.threads, std::min(kInnerChunk, kInnerElements / w)) +
                            arguments,
                        1, at_once));
      }
      source_.entries.push_back(entry);
    }
    if (!whole) add_merge(parts, source_.name + "_merge");
  }

  void add_merge(UnitParts& parts, const std::string& name) {
    KernelEntry merge;
    merge.name = name;
    merge.role = KernelRole::merge;
    int lanes = source_.columns < kManyColumns ? kMergeLanes : kManyLanes;
    int segments = source_.columns < kManyColumns ? kMergeSegments : 1;
    if (has_few_columns() && source_.columns == 1) {
      segments *= lanes;
      lanes = 1;
    }
    merge.threads = lanes * segments;
    merge.tiles = (source_.columns + lanes - 1) / lanes;
    parts.kernels.push_back(
        kernel_text(merge.name, functor_, merge.threads, "const void* partials, ingot::i64 splits",
                    fmt::format("merge_sweep<ingot::{}, {}, {}>(operands, partials, splits)",
                                functor_, lanes, segments)));
    source_.entries.push_back(merge);
  }

  // Whether blocks share a sample where that can be cut: of the inner layout.
  bool has_few_columns() const { return !leading_ && source_.columns < kFewColumns; }

  double work() const {
    double work = 0;
    for (const ValueId value : context_.sweep().body) work += element_flops(context_.node(value));
    return work;
  }

  SweepContext context_;
  KernelSource source_;
  std::vector<SharedState> states_;
  AxisMask axes_ = 0, reduced_ = 0, kept_ = 0;
  bool leading_ = true;
  int64_t inner_ = 1;  // of a sample or a piece of one
  int chunk_ = kChunk;
  bool has_few_loads_ = false;
  std::string value_type_, functor_;
};

}  // namespace

KernelSource write_merge(const Plan& plan, int sweep) {
  return ColumnsWriter(plan, sweep).write_merge_only();
}

KernelSource write_columns(const Plan& plan, int sweep) {
  return ColumnsWriter(plan, sweep).write();
}

}  // namespace ingot
