#include "standalone/program_writer.h"

#include <algorithm>

#include "codegen/body_writer.h"
#include "standalone/product_writer.h"
#include "support/error.h"

namespace ingot::standalone {
namespace {

constexpr std::string_view kKernelStart = "\nextern \"C\" __global__";

class ProgramWriter {
 public:
  ProgramWriter(const Request& request, Amalgamation& headers)
      : request_(request), plan_(*request.plan), headers_(headers), binding_(request) {}

  ProgramText write() {
    headers_.add_header("standalone/call.h");
    for (size_t i = 0; i < plan_.sweeps.size(); ++i) {
      const Sweep& sweep = plan_.sweeps[i];
      run_ += fmt::format("  // {}: {} sweep.\n", sweep.name, name_of(sweep.kind));
      if (sweep.kind == SweepKind::product) {
        add_product(static_cast<int>(i));
        continue;
      }
      for (const KernelSource& source : generate_sweep(plan_, static_cast<int>(i))) {
        add_kernels(source);
      }
    }
    text_.host = layout() + functions();
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

  // The operands of a kernel, one a line.
  std::string operands(const std::vector<KernelOperand>& list) const {
    std::string text;
    for (const KernelOperand& operand : list) {
      const std::array<int64_t, kAxes> strides = binding_.strides(operand.value, operand.seen);
      text += fmt::format("        bind({}, {}),\n", binding_.address(operand.value),
                          fmt::join(strides, ", "));
    }
    return text;
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

  // splits: an expression for the number of partial states that are in scratch memory already, at
  // `partials`; empty where the kernels make them.
  void add_kernels(const KernelSource& source, const std::string& partials = "",
                   const std::string& splits = "") {
    const bool nested = !partials.empty();  // the block of a product is open
    const std::vector<const KernelEntry*> many = chosen(source, false), one = chosen(source, true);
    std::vector<const KernelEntry*> used = many;
    for (const KernelEntry* entry : one) {
      if (std::find(used.begin(), used.end(), entry) == used.end()) used.push_back(entry);
    }
    add_text(source, used);
    run_ += fmt::format("{}    const ingot::{}::Operands operands = {{\n{}    }};\n",
                        nested ? "" : "  {\n", functor_of(source), operands(source.operands));
    if (many == one) {
      run_ += launches(source, many, "    ", partials, splits);
    } else {
      run_ += "    if (batch == 1) {\n" + launches(source, one, "      ", partials, splits) +
              "    } else {\n" + launches(source, many, "      ", partials, splits) + "    }\n";
    }
    if (!nested) run_ += "  }\n";
  }

  static std::string functor_of(const KernelSource& source) {
    constexpr std::string_view kStruct = "\nstruct ";
    const size_t at = source.text.find(kStruct) + kStruct.size();
    return source.text.substr(at, source.text.find(' ', at) - at);
  }

  std::string launches(const KernelSource& source, const std::vector<const KernelEntry*>& entries,
                       const std::string& pad, const std::string& partials,
                       const std::string& splits) {
    const std::string samples = source.batched ? "batch" : "i64{1}";
    std::string text, cut = splits, where = partials.empty() ? "scratch" : partials;
    for (const KernelEntry* entry : entries) {
      std::string blocks, arguments;
      switch (entry->role) {
        case KernelRole::map:
          blocks = fmt::format("{} * divide_up({}, {})", entry->tiles, samples, entry->per_block);
          arguments = samples;
          break;
        case KernelRole::groups:
          blocks = arguments = samples;
          break;
        case KernelRole::rows:
          arguments = fmt::format("{} * {}", samples, source.rows_per_sample);
          blocks = fmt::format("divide_up({}, {})", arguments, entry->per_block);
          if (entry->tiles > 1) blocks = fmt::format("{} * {}", entry->tiles, blocks);
          break;
        case KernelRole::columns:
        case KernelRole::columns_inner: {
          const std::string name = fmt::format("cut{}", cuts_++);
          text +=
              fmt::format("{}const SampleSplits {} = {};\n", pad, name, cut_text(source, *entry));
          scratch_.push_back(fmt::format("{}.splits * {}", cut_text(source, *entry),
                                         source.columns * source.state_bytes));
          blocks = fmt::format("{} * {}.splits", entry->tiles, name);
          arguments = fmt::format("{0}.samples, {0}.per_split, {1}", name, where);
          cut = name + ".splits";
          break;
        }
        case KernelRole::merge:
          blocks = std::to_string(entry->tiles);
          arguments = fmt::format("{}, {}", where, cut);
          break;
      }
      text += fmt::format("{}launch(call, {}, {}, {}, operands, {});\n", pad, entry->name, blocks,
                          entry->threads, arguments);
    }
    return text;
  }

  static std::string cut_text(const KernelSource& source, const KernelEntry& entry) {
    return fmt::format("split_samples({}{}, {}, {})", source.batched ? "batch * " : "",
                       source.leading, entry.per_block, entry.tiles);
  }

  void add_product(int index) {
    const Sweep& sweep = plan_.sweeps[static_cast<size_t>(index)];
    ProductText product = write_product(binding_, index, headers_);
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
    text_.splits.merge(product.splits);
    scratch_.push_back(
        fmt::format("i64(product_layout(current_device(), {}(batch)).bytes)", product.describe));
    const std::string y =
        epilogue.stored == kNoValue ? "nullptr" : binding_.address(epilogue.stored);
    run_ += fmt::format(
        "  {{\n    const Product product = {}(batch);\n    const ProductTensors tensors = {{{}, "
        "{}, "
        "{}}};\n    const ingot::{}::Params params = {{\n{}    }};\n"
        "    {}run_product(call, product, tensors, scratch, params);\n",
        product.describe, binding_.address(binding_.matrix_value(sweep, 0)),
        binding_.address(binding_.matrix_value(sweep, 1)), y, epilogue.functor,
        operands(epilogue.operands), epilogue.merge ? "const i64 sample_tiles = " : "");
    if (epilogue.merge) {
      run_ +=
          "    unsigned char* const partials =\n"
          "        scratch + product_layout(call.device, product).partials;\n";
      add_kernels(*epilogue.merge, "partials", "sample_tiles");
    }
    run_ += "  }\n";
  }

  std::string layout() const {
    std::string fields, body;
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      const WorkspaceBuffer& buffer = plan_.buffers[i];
      const std::string name = binding_.buffer_name(static_cast<int>(i));
      fields += fmt::format("  size_t {};\n", name);
      body += fmt::format(
          "  at.{} = pieces.take({}i64{{{}}});\n", name, buffer.shape.batched ? "batch * " : "",
          buffer.shape.static_elements() * static_cast<int64_t>(size_of(buffer.dtype)));
    }
    std::string scratch = "i64{0}";
    for (const std::string& bytes : scratch_) scratch += ",\n                        " + bytes;
    return fmt::format(
        "// Workspace of {0}: values that cross sweeps, then what each sweep uses in passing.\n"
        "struct Layout_{0} {{\n{1}  size_t scratch, bytes;\n}};\n\n"
        "inline Layout_{0} layout_{0}([[maybe_unused]] i64 batch) {{\n  Layout_{0} at = {{}};\n  "
        "Pieces pieces;\n{2}"
        "  at.scratch = pieces.bytes;\n  pieces.take(std::max({{{3}}}));\n"
        "  at.bytes = pieces.bytes;\n  return at;\n}}\n\n",
        request_.name, fields, body, scratch);
  }

  std::string functions() const {
    return fmt::format(
        "inline void run_{0}(const Call& call) {{\n"
        "  [[maybe_unused]] const i64 batch = call.batch;\n  const Layout_{0} at = "
        "layout_{0}(batch);\n"
        "  if (call.workspace_bytes < at.bytes) throw std::runtime_error(\"the workspace is too "
        "small\");\n"
        "  [[maybe_unused]] unsigned char* const scratch = call.workspace + at.scratch;\n{1}}}\n\n",
        request_.name, run_);
  }

  const Request& request_;
  const Plan& plan_;
  Amalgamation& headers_;
  Binding binding_;
  ProgramText text_;
  std::string run_;
  std::vector<std::string> scratch_;  // bytes that each sweep uses, as expressions
  int cuts_ = 0;
};

}  // namespace

ProgramText write_program(const Request& request, Amalgamation& headers) {
  return ProgramWriter(request, headers).write();
}

}  // namespace ingot::standalone
