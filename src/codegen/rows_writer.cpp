#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "codegen/row_cut.h"
#include "codegen/sweep_writers.h"
#include "support/error.h"
#include "sweeps/waves.cuh"

namespace ingot {
namespace {

constexpr int64_t kAcrossTeam = 16;  // at most, in blocks of 512 threads
constexpr int kBeginThreads = 1024;

// A template's name and its header's, of those that cut rows into pieces.
const char* name_of_pieces(RowTemplate kernel) {
  return kernel == RowTemplate::resident ? "rows_resident"
         : kernel == RowTemplate::folded ? "rows_folded"
                                         : "rows_in_waves";
}

// Members of the functor: {0} is the type of an element's index.
constexpr const char* kFunctions =
    R"(  INGOT_D static void row(const Operands& operands, i64 b, {0} e, Row& row) {{
{1}  }}
  template <int P, int V, int N>
  INGOT_D static void phase(const Operands& operands, const Row& row, i64 b, {0} e,
                            Element<V>& held, Value (&x)[N][V]) {{
{2}
  }}
  template <int P, class State>
  INGOT_D static void resolve(const Operands& operands, const State& state, i64 b, {0} e,
                              Row& row) {{
{3}
  }}
  template <int V>
  INGOT_D static void finish(const Operands& operands, const Row& row, i64 b, {0} e,
                             Element<V>& held{5}) {{
{4}  }}
  INGOT_D static void finish_row(const Operands& operands, const Row& row, i64 b, {0} e) {{
{6}  }}
)";

// Writes the functor of kernels/sweeps/rows.cuh or rows_across.cuh. The functions are written
// repeatedly: which values must be held across reductions, and which are one a row, is learnt from
// what later phases ask for, until nothing new is asked.
class RowsWriter {
 public:
  // packed: a value that the sweep stores, to be handed out to rows_packed.cuh; or kNoValue.
  RowsWriter(const Plan& plan, int sweep, ValueId packed = kNoValue)
      : context_(plan, sweep), packed_(packed) {
    const Sweep& s = context_.sweep();
    const std::vector<ValueId> reductions = reductions_of(plan.graph, s);
    states_ = shared_states(plan.graph, s, reductions);
    value_type_ = reduction_type(context_, reductions);
    inside_ = reductions.empty()
                  ? axis_bit(kFeatures)
                  : static_cast<AxisMask>(s.space.static_axes() &
                                          reduced_axes(plan.graph, s, reductions[0]));
    for (const Axis axis : {kRows, kGroups, kFeatures}) {
      const int64_t extent = s.space.extent(axis, 1);
      (inside_ & axis_bit(axis) ? row_elements_ : rows_per_sample_) *= extent;
    }
    inner_ = inner_extent(s.space, inside_);
    for (const SharedState& state : states_) {
      phase_of_state_.push_back(phase(state.arg));
      phases_ = std::max(phases_, phase_of_state_.back() + 1);
    }
    source_.name = kernel_name(plan, sweep);
    source_.sweep = sweep;
    source_.batched = s.space.batched;
    source_.rows_per_sample = rows_per_sample_;
    if (!across() && (inside_ & axis_bit(kFeatures))) source_.row_axes = inside_;
    if (!across() && row_elements_ > kMostHeldRow) odd_width_ = context_.odd_width(row_elements_);
    if (odd_width_ > 0) {
      for (const ValueId value : context_.sweep().loads) {
        if (context_.lies_otherwise(value)) context_.move_apart(value, false);
      }
    }
    functor_ = functor_name(source_.name);
  }

  KernelSource write() {
    std::string functions = all_functions();
    // Rows that registers hold, and pieces of rows in waves, are whole vectors.
    if (odd_width_ > 0 && cut().kernel != RowTemplate::looped) odd_width_ = 0;
    if (!across() && cut().kernel == RowTemplate::looped) {
      holds_as_read_ = true;
      functions = all_functions_anew();
    }
    if (indexes_in_rows()) {
      context_.index_in_rows(inside_);
      functions = all_functions();
    } else if (!across() && cut().streams) {
      context_.stream_results();
      // A piece for each stage takes all the registers that there are.
      const bool small = row_elements_ * rows_per_sample_ < int64_t{1} << 31;
      if (in_pieces(cut().kernel) && small) {
        functions = pieces_functions();
      } else {
        functions = all_functions();
      }
    }
    UnitParts parts;
    parts.comment = sweep_comment(context_, source_.name);
    parts.includes = {"common/pointwise.cuh",
                      across() ? "sweeps/rows_across.cuh" : "sweeps/rows.cuh"};
    parts.functor = functor_;
    parts.members = constants() + context_.operands_struct() + structs() + functions;
    across() ? write_across(parts) : write_kernels(parts);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

  // Nothing where rows are none of the product's, or too long to be held.
  std::optional<KernelSource> write_packing(hopper::Scheme scheme) {
    constexpr int kWidth = 4;
    const bool scaled = scheme == hopper::Scheme::scaled;
    if (inside_ != axis_bit(kFeatures) || across() || context_.width() != kWidth) return {};
    if (context_.seen(packed_) != context_.space() || !context_.space().batched) return {};
    source_.name += "_packed";
    functor_ = functor_name(source_.name);
    const std::string functions = all_functions();
    const int64_t team = team_for(needs(), kWarp, kWidth);
    if (team > kMostTeamThreads || row_elements_ % (scaled ? 64 : 32) != 0) return {};
    if (row_elements_ < kLeastPackedRow) return {};
    UnitParts parts;
    parts.comment = sweep_comment(context_, source_.name) +
                    "//   packed on the way: " + context_.name_of(packed_) + "\n";
    parts.includes = {"common/pointwise.cuh", "sweeps/rows_packed.cuh"};
    parts.functor = functor_;
    parts.members = constants() + context_.operands_struct() + structs() + functions;
    KernelEntry entry;
    entry.name = source_.name;
    entry.role = KernelRole::rows_packed;
    entry.width = kWidth;
    entry.per_block = team > kWarp ? 1 : kBlockThreads / team;
    entry.threads = static_cast<int>(team * entry.per_block);
    parts.kernels.push_back(kernel_text(
        entry.name, functor_, entry.threads,
        "ingot::i64 rows, void* packed,\n    ingot::i32* exponent, bool plain",
        fmt::format("rows_packed<ingot::{}, {}, {}, ingot::{}>(\n"
                    "      operands, rows, packed, exponent, plain)",
                    functor_, team, entry.per_block, scaled ? "ScaledVectors" : "SplitVectors")));
    source_.entries.push_back(entry);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

  // Nothing where rows are too long to be held.
  std::optional<KernelSource> write_turned(const TurnedOperands& operands) {
    context_.turn(operands.apart, inside_);
    source_.name += "_turned";
    functor_ = functor_name(source_.name);
    const std::string functions = all_functions();
    const int width = context_.width();
    int64_t states = 0;
    for (const SharedState& state : states_) states += state_bytes(state.monoid, value_type_);
    const std::optional<TurnedBlock> block = turned_block(
        row_elements_ / width, width * different_per_element(), states, operands.are_most);
    if (!block) return {};
    UnitParts parts;
    parts.comment = sweep_comment(context_, source_.name);
    parts.includes = {"common/pointwise.cuh", "sweeps/rows_turned.cuh"};
    parts.functor = functor_;
    parts.members = constants() + context_.operands_struct() + structs() + functions;
    KernelEntry entry;
    entry.name = source_.name;
    entry.role = KernelRole::rows;
    entry.width = width;
    entry.threads = block->threads();
    entry.per_block = block->rows * block->groups;
    parts.kernels.push_back(
        kernel_text(entry.name, functor_, entry.threads, "ingot::i64 rows",
                    fmt::format("rows_turned<ingot::{}, {}, {}, {}, {}>(operands, rows)", functor_,
                                width, block->rows, block->warps, block->groups),
                    1, block->at_once));
    source_.entries.push_back(entry);
    source_.operands = context_.operands();
    source_.text = translation_unit(parts);
    return std::move(source_);
  }

 private:
  bool across() const { return inner_ > 1; }

  // Rows that registers hold, whatever the kernel's width.
  bool indexes_in_rows() const {
    const auto holds = [](const RowCut& cut) { return cut.kernel == RowTemplate::registers; };
    return !across() && holds(cut()) && holds(narrow_cut()) && rows_per_sample_ < kElementsByI32;
  }

  // Of a row's pieces, where they are one feature after another: what is one value for all features
  // is then one a piece.
  std::string pieces_functions() {
    holds_as_read_ = true;
    const int64_t features = context_.space().features;
    if (features == row_elements_ || features % wave_piece(2) == 0) {
      context_.index_in_pieces();
      one_a_piece_ = true;
      const std::string functions = all_functions_anew();
      if (in_pieces(cut().kernel)) return functions;
      one_a_piece_ = false;
    }
    context_.index_in_32_bits();
    return all_functions_anew();
  }

  std::string all_functions_anew() {
    held_.clear();
    row_fields_.clear();
    return all_functions();
  }
  std::string all_functions() {
    size_t known = 0;
    std::string functions;
    do {
      known = held_.size() + row_fields_.size();
      functions = write_functions();
    } while (held_.size() + row_fields_.size() != known);
    return functions;
  }

  // The reductions that must have been merged before a value is known.
  int phase(ValueId value) {
    value = context_.resolve(value);
    if (!context_.computes(value)) return 0;
    if (const auto found = phase_.find(value); found != phase_.end()) return found->second;
    const Node& node = context_.node(value);
    int result = 0;
    for (const ValueId arg : node.args) result = std::max(result, phase(arg));
    if (node.kind == NodeKind::reduce) ++result;
    phase_[value] = result;
    return result;
  }

  // What `row` and `resolve` compute for all elements that follow.
  bool is_field(ValueId value) const {
    return one_a_piece_ ? context_.seen(value).features == 1 : is_one_a_row(value);
  }
  bool is_one_a_row(ValueId value) const {
    for (const Axis axis : {kRows, kGroups, kFeatures}) {
      if ((inside_ & axis_bit(axis)) && context_.seen(value).extent(axis, 1) > 1) return false;
    }
    return true;
  }

  Reference row_field(ValueId value) {
    row_fields_.insert(value);
    return {"row." + context_.name_of(value), context_.type_of(value)};
  }

  // Kernels of several phases have no registers left for coarse exponentials: nvcc interleaves more
  // of those.
  std::string monoid(const SharedState& state) const {
    return phases_ > 1 ? monoid_type(state.monoid, value_type_)
                       : context_.monoid(state, value_type_);
  }

  std::optional<Reference> finished(ValueId value, int phase) const {
    size_t index = 0;
    for (size_t n = 0; n < states_.size(); ++n) {
      if (phase_of_state_[n] != phase) continue;
      const auto& finishes = states_[n].finishes;
      if (std::find(finishes.begin(), finishes.end(), value) != finishes.end()) {
        const std::string text = finish_expression(context_.node(value).finish, monoid(states_[n]),
                                                   "state" + together_member(index));
        return Reference{fmt::format("static_cast<{}>({})", context_.type_of(value), text),
                         context_.type_of(value)};
      }
      ++index;
    }
    return std::nullopt;
  }

  // Values per element, in the function of `at` (a phase, or phases_ for finish).
  FunctionWriter element_writer(int at) {
    return FunctionWriter(context_, [this, at](ValueId value) -> std::optional<Reference> {
      if (context_.is_constant(value)) return std::nullopt;
      if (is_field(value)) return row_field(value);
      if (!context_.seen(value).batched && context_.space().batched) return std::nullopt;
      // Asked again by the function that asked first, it is that function's own: compositions ask
      // without computing what they skip.
      if (evaluated_.try_emplace(value, at).first->second == at) return std::nullopt;
      if (const ValueId read = read_of(value); read != kNoValue) {
        held_.insert(read);
        context_.hold_as_read(read);
        return Reference{context_.held_as_read(read), context_.type_of(value)};
      }
      held_.insert(value);
      const bool lanes = context_.seen(value).features > 1;
      return Reference{fmt::format("held.{}{}", context_.name_of(value), lanes ? "[i]" : ""),
                       context_.type_of(value)};
    });
  }

  // The 16-bit vector that a value to be held is, or is a widened element of; or kNoValue.
  ValueId read_of(ValueId value) const {
    value = context_.resolve(value);
    const Node& node = context_.node(value);
    if (node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_ &&
        node.dtype == DType::f32) {
      value = context_.resolve(node.args[0]);
    }
    const bool is_read = !context_.computes(value) && size_of(context_.dtype_in_memory(value)) == 2;
    const bool in_vectors = context_.seen(value).features > 1 && !context_.is_apart(value, false);
    return holds_as_read_ && is_read && in_vectors ? value : kNoValue;
  }

  void hold(FunctionWriter& writer, int at) {
    for (const ValueId value : held_) {
      if (context_.is_held_as_read(value)) continue;
      if (const auto found = evaluated_.find(value);
          found != evaluated_.end() && found->second == at) {
        writer.assign("held." + context_.name_of(value), value);
      }
    }
  }

  std::string write_functions() {
    evaluated_.clear();
    std::string phase_branches, resolve_branches;
    for (int p = 0; p < phases_; ++p) {
      const char* branch = p == 0 ? "    if constexpr" : " else if constexpr";
      FunctionWriter values = element_writer(p);
      write_values(values, p);
      hold(values, p);
      phase_branches += fmt::format("{} (P == {}) {{\n{}    }}", branch, p, values.text(6));
      resolve_branches += fmt::format("{} (P == {}) {{\n{}    }}", branch, p, resolve_text(p));
    }
    FunctionWriter finish = element_writer(phases_);
    FunctionWriter finish_row(
        context_,
        [this](ValueId value) -> std::optional<Reference> {
          if (context_.is_constant(value)) return std::nullopt;
          return row_field(value);
        },
        FunctionWriter::Lanes::scalar);
    for (const ValueId value : context_.sweep().stores) {
      if (value == packed_) continue;
      (is_one_a_row(value) ? finish_row : finish).store(value);
    }
    if (packed_ != kNoValue) finish.assign("packed", packed_);
    const std::string index = across() ? "u32" : context_.index_type();
    const bool packs = packed_ != kNoValue;
    return fmt::format(kFunctions, index, resolve_text(-1), phase_branches, resolve_branches,
                       finish.text(4), packs ? ", float (&packed)[V]" : "", finish_row.text(4)) +
           (packs ? place_function() : "") + prefetch_function();
  }

  // What phase 0 reads of an element, of rows that stay: into the L2 cache.
  std::string prefetch_function() {
    const bool stays =
        cut().kernel == RowTemplate::resident || narrow_cut().kernel == RowTemplate::resident;
    if (across() || !stays) return "";
    FunctionWriter writer(context_, nullptr);
    for (const ValueId value : context_.sweep().loads) {
      const auto found = evaluated_.find(value);
      if (found == evaluated_.end() || found->second > 0 || context_.counts(value)) continue;
      writer.statement(fmt::format("ptx::prefetch_line({});", writer.address(value)));
    }
    return fmt::format(
        "  template <int V>\n"
        "  INGOT_D static void prefetch(const Operands& operands, i64 b, {} e) {{\n{}  }}\n",
        context_.index_type(), writer.text(4));
  }

  // Where the packed value is stored: apart from finish(), so that all operands of a row are loaded
  // before any of it is.
  std::string place_function() {
    FunctionWriter writer(context_, nullptr);
    return fmt::format(
        "  INGOT_D static float* place(const Operands& operands, i64 b, i64 e) {{\n"
        "    return {};\n  }}\n",
        writer.address(packed_, true));
  }

  void write_values(FunctionWriter& writer, int p) {
    size_t index = 0;
    for (size_t n = 0; n < states_.size(); ++n) {
      if (phase_of_state_[n] != p) continue;
      const bool lanes = writer.has_lanes(states_[n].arg);
      const Reference reference = writer.value(states_[n].arg);
      const std::string text = fmt::format("x[{}][{}] = static_cast<Value>({});", index++,
                                           lanes ? "i" : "0", reference.text);
      lanes ? writer.lane_statement(text) : writer.statement(text);
    }
  }

  // The row's values that are known once phase p is merged; p = -1: before any.
  std::string resolve_text(int p) {
    FunctionWriter writer(
        context_,
        [this, p](ValueId value) -> std::optional<Reference> {
          if (context_.is_constant(value)) return std::nullopt;
          const int known_after = phase(value) - 1;
          if (known_after < p) return row_field(value);
          if (context_.node(value).kind == NodeKind::reduce && context_.computes(value)) {
            return finished(value, p);
          }
          return std::nullopt;
        },
        FunctionWriter::Lanes::scalar);
    const std::set<ValueId> fields = row_fields_;
    for (const ValueId value : fields) {
      if (phase(value) - 1 == p) writer.assign("row." + context_.name_of(value), value);
    }
    return writer.text(p < 0 ? 4 : 6);
  }

  std::string constants() const {
    std::string text = fmt::format(
        "  static constexpr i64 kRow = {}, kRowsPerSample = {};\n"
        "  static constexpr int kPhases = {};\n"
        "  using Value = {};\n",
        row_elements_, rows_per_sample_, phases_, value_type_);
    text += across() ? fmt::format("  static constexpr i64 kInner = {};\n", inner_)
                     : fmt::format("  using Place = {};\n", context_.index_type());
    if (phases_ == 0) text += "  INGOT_D static Together<Sum<Value>> monoid(Index<0>);\n";
    for (int p = 0; p < phases_; ++p) {
      std::vector<std::string> monoids;
      for (size_t n = 0; n < states_.size(); ++n) {
        if (phase_of_state_[n] == p) monoids.push_back(monoid(states_[n]));
      }
      text += fmt::format("  INGOT_D static Together<{}> monoid(Index<{}>);\n",
                          fmt::join(monoids, ", "), p);
    }
    return text;
  }

  std::string structs() const {
    std::string text = "  struct Row {\n";
    for (const ValueId value : row_fields_) text += field_declaration(context_, value, false);
    text += "  };\n  template <int V>\n  struct Element {\n";
    for (const ValueId value : held_) {
      text +=
          context_.is_held_as_read(value)
              ? fmt::format("    Pack<{}, V> {};\n", storage_type(context_.dtype_in_memory(value)),
                            context_.name_of(value))
              : field_declaration(context_, value, context_.seen(value).features > 1);
    }
    return text + "  };\n\n";
  }

  int64_t words_of_type(ValueId value) const { return context_.type_of(value) == "float" ? 1 : 2; }
  int64_t words(ValueId value) const {
    return context_.seen(value).features > 1 ? words_of_type(value) : 0;
  }
  int64_t held_per_element() const {
    int64_t sum = 0;
    for (const ValueId value : held_) sum += words(value);
    return std::max<int64_t>(sum, 1);
  }
  // The same without those that are others of them, widened: one register for both.
  int64_t different_per_element() const {
    int64_t sum = 0;
    for (const ValueId value : held_) {
      const Node& node = context_.node(value);
      const bool widens = node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_ &&
                          node.dtype == DType::f32 && held_.contains(node.args[0]) &&
                          context_.type_of(node.args[0]) == "float";
      if (!widens) sum += words(value);
    }
    return std::max<int64_t>(sum, 1);
  }

  RowCut cut() const { return cut_row(needs(), width(), context_.plan().target); }
  RowCut narrow_cut() const { return cut_beside(cut(), needs(), 1, context_.plan().target); }
  int width() const {
    if (odd_width_ > 0) return odd_width_;
    return inside_ & axis_bit(kFeatures) ? context_.width() : 1;
  }

  RowNeeds needs() const {
    RowNeeds needs;
    needs.elements = row_elements_;
    needs.values = held_per_element();
    for (const ValueId value : held_) {
      const int64_t bytes = context_.is_held_as_read(value) ? 2 : 4 * words_of_type(value);
      (context_.seen(value).features > 1 ? needs.lane_bytes : needs.other_bytes) += bytes;
    }
    needs.phases = phases_;
    needs.one_live = held_.size() <= 1;
    needs.small_state =
        states_.empty() || (states_.size() == 1 && states_[0].monoid != MonoidKind::moments);
    const std::vector<ValueId>& loads = context_.sweep().loads;
    needs.weighted = std::any_of(loads.begin(), loads.end(),
                                 [&](ValueId value) { return context_.lies_otherwise(value); });
    const std::vector<ValueId>& stores = context_.sweep().stores;
    needs.stores = std::any_of(stores.begin(), stores.end(),
                               [&](ValueId value) { return !is_one_a_row(value); });
    needs.odd = odd_width_ > 0;
    return needs;
  }

  void write_kernels(UnitParts& parts) {
    const RowCut first = cut();
    const RowCut narrow = narrow_cut();
    if (in_pieces(first.kernel)) {
      begin_pieces(parts, {first.kernel, narrow.kernel}, std::max(first.blocks, narrow.blocks));
    }
    KernelEntry entry;
    entry.name = source_.name;
    entry.width = width();
    entry.odd = odd_width_ > 0;
    write_kernel(parts, entry, first);
    if (entry.width == 1) return;
    entry.name += "_unaligned";
    entry.width = 1;
    entry.odd = false;
    write_kernel(parts, entry, narrow);
  }

  void write_kernel(UnitParts& parts, KernelEntry entry, const RowCut& cut) {
    entry.role = in_pieces(cut.kernel) ? KernelRole::waves : KernelRole::rows;
    entry.threads = cut.threads();
    entry.per_block = cut.teams;
    entry.tiles = cut.blocks;
    entry.stay = cut.stay;
    entry.shared_bytes = cut.shared_bytes;
    const char *parameters = "ingot::i64 rows", *arguments = "rows";
    std::string of;
    switch (cut.kernel) {
      case RowTemplate::registers:
        of = fmt::format("rows_in_registers<ingot::{}, {}, {}, {}>", functor_, entry.width,
                         cut.team, cut.teams);
        break;
      case RowTemplate::looped:
        of = fmt::format("{}rows_looped<ingot::{}, {}, {}, {}>", entry.odd ? "odd_" : "", functor_,
                         entry.width, cut.team, cut.blocks);
        break;
      case RowTemplate::waves:
      case RowTemplate::resident:
      case RowTemplate::folded:
        of = fmt::format("{}<ingot::{}, {}, {}>", name_of_pieces(cut.kernel), functor_, entry.width,
                         cut.team);
        parameters = "ingot::i64 rows, void* memory";
        arguments = "rows, memory";
        break;
    }
    const int64_t cluster = cut.kernel == RowTemplate::looped ? cut.blocks : 1;
    parts.kernels.push_back(kernel_text(entry.name, functor_, entry.threads, parameters,
                                        fmt::format("{}(operands, {})", of, arguments), cluster,
                                        cut.at_once));
    source_.entries.push_back(std::move(entry));
  }

  void begin_pieces(UnitParts& parts, const std::set<RowTemplate>& kernels, int64_t most_pieces) {
    parts.includes.pop_back();
    for (const RowTemplate kernel : kernels) {
      parts.includes.push_back(fmt::format("sweeps/{}.cuh", name_of_pieces(kernel)));
    }
    source_.phases = phases_;
    for (const SharedState& state : states_) {
      source_.state_bytes += (state_bytes(state.monoid, value_type_) + 7) / 8 * 8;
    }
    KernelEntry entry;
    entry.name = source_.name + "_begin";
    entry.role = KernelRole::waves_begin;
    entry.threads = kBeginThreads;
    entry.tiles = most_pieces;
    parts.kernels.push_back(
        kernel_text(entry.name, functor_, entry.threads, "void* memory, ingot::i64 bytes",
                    fmt::format("begin_waves<{}>(memory, bytes)", entry.threads)));
    source_.entries.push_back(entry);
  }

  void write_across(UnitParts& parts) {
    KernelEntry entry;
    entry.name = source_.name;
    entry.role = KernelRole::rows;
    const auto of_thread = [&](int64_t team, int64_t words) {
      return (row_elements_ + team - 1) / team * words;
    };
    // By measurement: a thread holds as many as it may, with what it reduces of each element where
    // that is another value; but of an even number that are needed again, each of two has a half.
    std::set<ValueId> live = held_;
    for (const SharedState& state : states_) live.insert(state.arg);
    int64_t live_words = 0;
    for (const ValueId value : live) live_words += words_of_type(value);
    const bool in_halves = !held_.empty() && row_elements_ % 2 == 0;
    int64_t team = in_halves && of_thread(1, held_per_element()) > kHeldTarget ? 2 : 1;
    while (team < kAcrossTeam && of_thread(team, live_words) > kHeldLimit) team *= 2;
    const int64_t lanes = std::max(kBlockThreads / team, kWarp);
    entry.threads = static_cast<int>(team * lanes);
    entry.per_block = lanes;
    const char* loops = of_thread(team, held_per_element()) <= kHeldLimit ? "" : "_looped";
    const std::string call = fmt::format("rows_across{}<ingot::{}, {}, {}>(operands, rows)", loops,
                                         functor_, team, lanes);
    parts.kernels.push_back(
        kernel_text(entry.name, functor_, entry.threads, "ingot::i64 rows", call));
    source_.entries.push_back(entry);
  }

  SweepContext context_;
  const ValueId packed_;
  KernelSource source_;
  std::string functor_, value_type_;
  std::vector<SharedState> states_;
  std::vector<int> phase_of_state_;
  std::map<ValueId, int> phase_;
  AxisMask inside_ = 0;
  int64_t row_elements_ = 1, rows_per_sample_ = 1, inner_ = 1;
  int phases_ = 0, odd_width_ = 0;
  bool one_a_piece_ = false, holds_as_read_ = false;
  std::map<ValueId, int> evaluated_;  // element values, and the phase that computes them
  std::set<ValueId> held_, row_fields_;
};

}  // namespace

KernelSource write_rows(const Plan& plan, int sweep) {
  return RowsWriter(plan, sweep).write();
}

std::optional<KernelSource> write_rows_turned(const Plan& plan, int sweep,
                                              const TurnedOperands& operands) {
  return RowsWriter(plan, sweep).write_turned(operands);
}

std::optional<KernelSource> write_packing(const Plan& plan, int sweep, ValueId value,
                                          hopper::Scheme scheme) {
  const Sweep& s = plan.sweeps[static_cast<size_t>(sweep)];
  const bool pointwise = reductions_of(plan.graph, s).empty();
  if (s.kind != SweepKind::map && s.kind != SweepKind::rows) return {};
  if (!pointwise && !reduces_rows(plan, sweep)) return {};
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  const bool stored = std::find(s.stores.begin(), s.stores.end(), value) != s.stores.end();
  if (!stored || plan.graph[value].dtype != DType::f32 || placement.kind == Placement::Kind::update)
    return {};
  return RowsWriter(plan, sweep, value).write_packing(scheme);
}

}  // namespace ingot
