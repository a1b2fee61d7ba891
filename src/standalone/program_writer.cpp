#include "standalone/program_writer.h"

#include <algorithm>
#include <set>

#include "codegen/type_names.h"
#include "support/error.h"
#include "sweeps/waves.cuh"

namespace ingot::standalone {
namespace {

constexpr std::string_view kKernelStart = "\nextern \"C\" __global__";

class ProgramWriter {
 public:
  ProgramWriter(const Request& request, Amalgamation& headers, ProductTables& tables)
      : request_(request),
        plan_(*request.plan),
        headers_(headers),
        tables_(tables),
        binding_(request) {}

  ProgramText write() {
    headers_.add_header("standalone/call.h");
    for (size_t i = 0; i < plan_.sweeps.size(); ++i) {
      const Sweep& sweep = plan_.sweeps[i];
      if (sweep.kind == SweepKind::product) {
        add_product(static_cast<int>(i));
        continue;
      }
      const std::vector<KernelSource> sources = generate_sweep(plan_, static_cast<int>(i));
      if (const std::optional<KernelSource> turned = turned_source(sources.front())) {
        add_kernels(*turned);
        continue;
      }
      for (const KernelSource& source : sources) add_kernels(source);
    }
    text_.host = function();
    return std::move(text_);
  }

 private:
  // The comment at the top, the functor, and those of its kernels that are launched.
  void add_text(const KernelSource& source, const std::vector<const KernelEntry*>& used) {
    const std::string text = headers_.take_includes(source.text);
    size_t at = text.find(kKernelStart);
    text_.kernels += text.substr(0, at);
    while (at != std::string::npos) {
      const size_t next = text.find(kKernelStart, at + 1);
      const std::string kernel = text.substr(at, next == std::string::npos ? next : next - at);
      const bool is_used = std::any_of(used.begin(), used.end(), [&](const KernelEntry* entry) {
        return kernel.find(" " + entry->name + "(") != std::string::npos;
      });
      if (is_used) text_.kernels += kernel;
      at = next;
    }
    text_.kernels += "\n";
    for (const KernelEntry* entry : used) text_.names.push_back(entry->name);
  }

  // What follows `head`: the operands of a kernel with their strides, several a line.
  std::string operands(const std::string& head, const std::vector<KernelOperand>& list) const {
    std::string text = "  const " + head + " = {";
    size_t line = text.size();
    if (line > 60) {
      text += "\n     ";
      line = 5;
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const std::array<int64_t, kAxes> strides = binding_.strides(list[i].value, list[i].seen);
      const std::string item =
          fmt::format("{{{}, {{{}}}}}{}", binding_.address(list[i].value), fmt::join(strides, ", "),
                      i + 1 < list.size() ? "," : "");
      if (i > 0 && line + item.size() > 97) {
        text += "\n     ";
        line = 5;
      }
      text += (text.ends_with('{') ? "" : " ") + item;
      line += item.size() + 1;
    }
    return text + "};\n";
  }

  // The sweep's kernel for operands that lie turned, where these do.
  std::optional<KernelSource> turned_source(const KernelSource& source) const {
    const auto turned = turned_operands(plan_, source, binding_.layouts(source), Binding::kMany);
    if (!turned) return {};
    return generate_turned(plan_, source, *turned);
  }

  // The first of each role that the operands' alignment admits.
  std::vector<const KernelEntry*> chosen(const KernelSource& source, bool single) const {
    std::vector<const KernelEntry*> result;
    for (const KernelEntry& entry : source.entries) {
      if (!result.empty() && result.back()->role == entry.role) continue;
      if (binding_.admits(source, entry, single)) result.push_back(&entry);
    }
    return result;
  }

  // splits: an expression for the number of partial states that are in the workspace already, at
  // `partials`; empty where the kernels make them.
  void add_kernels(const KernelSource& source, const std::string& partials = "workspace",
                   const std::string& splits = "") {
    const std::vector<const KernelEntry*> many = chosen(source, false), one = chosen(source, true);
    std::vector<const KernelEntry*> used = many;
    for (const KernelEntry* entry : one) {
      if (std::find(used.begin(), used.end(), entry) == used.end()) used.push_back(entry);
    }
    add_text(source, used);
    const std::string name = next_operands();
    run_ += operands(fmt::format("{}::Operands {}", functor_of(source), name), source.operands);
    if (many == one) {
      run_ += launches(source, many, name, "  ", partials, splits);
    } else {
      run_ += "  if (batch == 1) {\n" + launches(source, one, name, "    ", partials, splits) +
              "  } else {\n" + launches(source, many, name, "    ", partials, splits) + "  }\n";
    }
  }

  std::string next_operands() { return fmt::format("operands{}", operands_++); }

  static std::string functor_of(const KernelSource& source) {
    constexpr std::string_view kStruct = "\nstruct ";
    const size_t at = source.text.find(kStruct) + kStruct.size();
    return source.text.substr(at, source.text.find(' ', at) - at);
  }

  std::string launches(const KernelSource& source, const std::vector<const KernelEntry*>& entries,
                       const std::string& operands, const std::string& pad,
                       const std::string& partials, const std::string& splits) {
    const std::string samples = source.batched ? "batch" : "1";
    std::string text, cut = splits;
    for (const KernelEntry* entry : entries) {
      std::string blocks, arguments;
      switch (entry->role) {
        case KernelRole::map:
          blocks = divided(entry->tiles, source.batched ? 0 : 1, entry->per_block);
          arguments = samples;
          break;
        case KernelRole::groups:
          blocks = arguments = samples;
          break;
        case KernelRole::waves_begin: {
          const std::string bytes = fmt::format("wave_bytes({}, {}, {}, {})", rows_of(source),
                                                entry->tiles, source.phases, source.state_bytes);
          blocks = std::to_string(kWaveBeginBlocks);
          arguments = "workspace, " + bytes;
          scratch_.insert(fmt::format("size_t({})", bytes));
          break;
        }
        case KernelRole::waves:
          blocks = entry->stay > 0 ? fmt::format("std::min<int64_t>({}, {} * {})", entry->stay,
                                                 rows_of(source), entry->tiles)
                                   : fmt::format("wave_tasks({}, {}, {})", rows_of(source),
                                                 entry->tiles, source.phases);
          arguments = rows_of(source) + ", workspace";
          break;
        case KernelRole::rows:
        case KernelRole::rows_packed:
          arguments = rows_of(source);
          blocks = entry->per_block == 1
                       ? arguments
                       : fmt::format("divide_up({}, {})", arguments, entry->per_block);
          if (entry->tiles > 1) blocks = fmt::format("{} * {}", entry->tiles, blocks);
          break;
        case KernelRole::columns:
        case KernelRole::columns_inner: {
          const std::string name = cut_of(source, *entry);
          blocks = fmt::format("{} * {}.splits", entry->tiles, name);
          arguments = fmt::format("{0}.samples, {0}.per_split, {1}", name, partials);
          cut = name + ".splits";
          break;
        }
        case KernelRole::columns_whole:
          blocks = std::to_string(entry->tiles);
          arguments = samples_of(source);
          break;
        case KernelRole::merge:
          blocks = std::to_string(entry->tiles);
          arguments = fmt::format("{}, {}", partials, cut);
          break;
      }
      const std::string grid = entry->shared_bytes > 0
                                   ? fmt::format("Grid{{{}, {}, most_shared({})}}", blocks,
                                                 entry->threads, entry->shared_bytes)
                                   : fmt::format("{}, {}", blocks, entry->threads);
      std::string line = fmt::format("{}launch({}, {},", pad, entry->name, grid);
      const std::string rest = fmt::format(" {}, {});", operands, arguments);
      if (line.size() + rest.size() > 100) line += "\n" + pad + "      ";
      text += line + rest + "\n";
    }
    return text;
  }

  static std::string rows_of(const KernelSource& source) {
    return source.batched ? times("batch", source.rows_per_sample)
                          : std::to_string(source.rows_per_sample);
  }

  // Of a columns sweep.
  static std::string samples_of(const KernelSource& source) {
    return source.batched ? times("batch", source.leading) : std::to_string(source.leading);
  }

  static std::string times(const std::string& count, int64_t by) {
    return by == 1 ? count : fmt::format("{} * {}", count, by);
  }

  // tiles for each `per_block` samples: the batch, or as many as are given.
  static std::string divided(int64_t tiles, int64_t samples, int64_t per_block) {
    if (samples > 0) return std::to_string(tiles * ((samples + per_block - 1) / per_block));
    if (per_block == 1) return times("batch", tiles);
    const std::string parts = fmt::format("divide_up(batch, {})", per_block);
    return tiles == 1 ? parts : fmt::format("{} * {}", tiles, parts);
  }

  // The name of how the samples of a sweep are cut.
  std::string cut_of(const KernelSource& source, const KernelEntry& entry) {
    headers_.add_header("sweeps/splits.h");
    const std::string text =
        fmt::format("split_samples({}, {}, {})", samples_of(source), entry.per_block, entry.tiles);
    const auto known = std::find(cuts_.begin(), cuts_.end(), text);
    const std::string name = fmt::format("cut{}", known - cuts_.begin());
    if (known == cuts_.end()) {
      cuts_.push_back(text);
      before_ += fmt::format("  const SampleSplits {} = {};\n", name, text);
    }
    scratch_.insert(
        fmt::format("size_t({}.splits * {})", name, source.columns * source.state_bytes));
    return name;
  }

  void add_product(int index) {
    const Sweep& sweep = plan_.sweeps[static_cast<size_t>(index)];
    ProductText product = write_product(binding_, index, headers_, tables_);
    const ProductEpilogue& epilogue = product.epilogue;
    for (const ValueId value : {binding_.matrix_value(sweep, 0), binding_.matrix_value(sweep, 1)}) {
      if (plan_.graph[value].dtype != DType::f32) {
        fail(INGOT_UNSUPPORTED,
             "a standalone file cannot hold the matrix product of {}: an "
             "operand lies in memory as {}",
             sweep.name, name_of(plan_.graph[value].dtype));
      }
    }
    text_.kernels += fmt::format(
        "// {}: a matrix product with everything behind it that needs no "
        "wait.\n{}\n",
        epilogue.kernel, product.kernels);
    text_.names.push_back(epilogue.kernel);
    const std::string name = fmt::format("product{}", products_);
    const std::string kernels = fmt::format("kernels{}", products_++);
    before_ +=
        fmt::format("  const void* const {}[] = {{{}}};\n  const Planned {} = {};\n", kernels,
                    product.by_tile, name, fmt::format(fmt::runtime(product.plan), kernels));
    scratch_.insert(name + ".bytes");
    const std::string operands_name = next_operands();
    const std::string y =
        epilogue.stored == kNoValue ? "nullptr" : binding_.address(epilogue.stored);
    run_ +=
        operands(fmt::format("{}::Params {}", epilogue.functor, operands_name), epilogue.operands);
    run_ += fmt::format("  run(launch, {}, {}, {}, {}, workspace, {});\n", name,
                        binding_.address(binding_.matrix_value(sweep, 0)),
                        binding_.address(binding_.matrix_value(sweep, 1)), y, operands_name);
    if (epilogue.merge) {
      add_kernels(*epilogue.merge, fmt::format("workspace + {}.statistics", name),
                  name + ".partials");
    }
  }

  // What each sweep uses in passing, at the start; then values that cross sweeps.
  std::string workspace() const {
    std::string text;
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      const WorkspaceBuffer& buffer = plan_.buffers[i];
      const int64_t bytes =
          buffer.shape.static_elements() * static_cast<int64_t>(size_of(buffer.dtype));
      text += fmt::format("  const size_t {} = pieces.take({});\n",
                          binding_.buffer_name(static_cast<int>(i)),
                          buffer.shape.batched ? times("batch", bytes) : std::to_string(bytes));
    }
    if (!scratch_.empty()) {
      const std::string most = fmt::format("{}", fmt::join(scratch_, ", "));
      text = fmt::format("  pieces.take(i64({}));\n",
                         scratch_.size() == 1 ? most : "std::max({" + most + "})") +
             text;
    }
    if (text.empty()) return "";
    return "  Pieces pieces;\n" + text +
           "  auto* const workspace = static_cast<unsigned char*>(allocate(pieces.bytes));\n\n";
  }

  std::string function() const {
    const auto unused = [](const std::string& text, const char* name) {
      return text.find(name) == std::string::npos ? "[[maybe_unused]] " : "";
    };
    const std::string space = workspace();
    return fmt::format(
        "void run_{}(\n    void* const* tensors, {}long long batch, {}const Allocate& allocate, "
        "void* stream) {{\n  const Launcher launch(stream);\n{}{}{}}}\n\n",
        request_.name, unused(before_ + space + run_, "batch"), unused(space, "allocate"), before_,
        space, run_);
  }

  const Request& request_;
  const Plan& plan_;
  Amalgamation& headers_;
  ProductTables& tables_;
  Binding binding_;
  ProgramText text_;
  std::string before_, run_;       // what a call's batch settles; launches
  std::set<std::string> scratch_;  // bytes that sweeps use, as expressions
  std::vector<std::string> cuts_;
  int products_ = 0, operands_ = 0;
};

}  // namespace

ProgramText write_program(const Request& request, Amalgamation& headers, ProductTables& tables) {
  return ProgramWriter(request, headers, tables).write();
}

}  // namespace ingot::standalone
