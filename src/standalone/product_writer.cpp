#include "standalone/product_writer.h"

#include <algorithm>
#include <map>
#include <set>

#include "codegen/body_writer.h"
#include "product/hopper/launch.h"
#include "product/portable/launch.h"
#include "support/error.h"

namespace ingot::standalone {
namespace {

// Shared memory limits of the compute capabilities without Hopper's kernels.
constexpr size_t kSharedBytes[] = {101376, 166912, 232448};
constexpr int64_t kMaxSamples = int64_t{1} << 20;

// A kernel template with the configurations that some batch size takes.
struct Template {
  std::string header;
  std::set<std::string> configs;
};

struct Found {
  std::map<std::string, Template> hopper, portable;  // by function
  std::map<std::string, std::string> splits;         // launch bounds by function
  std::set<std::string> split_headers;

  void add(std::map<std::string, Template>& kernels, const hopper::ProductPlan& plan) {
    if (plan.variant == hopper::Variant::unsupported) return;
    Template& kernel = kernels[plan.kernel];
    kernel.header = plan.header;
    kernel.configs.insert(plan.config);
    for (const hopper::SplitStep& step : plan.splits) {
      splits[step.kernel] = step.resident > 1 ? fmt::format("{}, {}", step.threads, step.resident)
                                              : fmt::format("{}", step.threads);
      split_headers.insert(step.header);
    }
  }
};

class ProductWriter {
 public:
  ProductWriter(const Binding& binding, int sweep, Amalgamation& headers)
      : binding_(binding),
        plan_(binding.plan()),
        sweep_(plan_.sweeps[static_cast<size_t>(sweep)]),
        headers_(headers) {
    check();
    std::string why;
    std::optional<ProductEpilogue> epilogue = write_epilogue(plan_, sweep, &why);
    if (!epilogue) refuse(why);
    text_.epilogue = *std::move(epilogue);
  }

  ProductText write() {
    find_kernels();
    text_.splits = found_.splits;
    text_.describe = "describe_" + text_.epilogue.kernel;
    text_.kernels = fmt::format("namespace ingot {{\n\n{}\n}}  // namespace ingot\n\n",
                                text_.epilogue.functor_text);
    headers_.add_header("common/pointwise.cuh");
    headers_.add_header("sweeps/tensor.cuh");
    headers_.add_header("standalone/product.h");
    for (const std::string& header : found_.split_headers) headers_.add_header(header);
    std::string table;
    write_kernels("INGOT_HOPPER", true, found_.hopper, &table);
    write_kernels("INGOT_PORTABLE", false, found_.portable, &table);
    text_.kernels += description(table);
    return std::move(text_);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    fail(INGOT_UNSUPPORTED,
         "a standalone file cannot hold the matrix product of {} ({}): {}; without --standalone "
         "the product is the library's",
         sweep_.name, plan_.graph[sweep_.matmul].source, why);
  }

  void check() const {
    const auto arg = [&](size_t i) -> const Node& {
      return plan_.graph[plan_.graph[sweep_.matmul].args[i]];
    };
    if (plan_.precision != Precision::fp32 && !scaled()) {
      refuse(fmt::format("its precision is {}, and only fp32 and tf32 have kernels to write down",
                         name_of(plan_.precision)));
    }
    if (arg(0).dtype != DType::f32 || arg(1).dtype != DType::f32) {
      refuse("its operands are not f32");
    }
    if (arg(1).shape.batched) refuse("its weight differs from sample to sample");
  }

  // tf32 on Hopper; the portable kernels have fp32's accuracy there too.
  bool scaled() const { return plan_.precision == Precision::tf32; }

  int64_t samples_per_entry() const {
    return plan_.graph[plan_.graph[sweep_.matmul].args[0]].shape.rows;
  }
  bool batched() const { return plan_.graph[plan_.graph[sweep_.matmul].args[0]].shape.batched; }

  hopper::ProductShape shape(int64_t samples) const {
    const MatrixStrides x = binding_.matrix(sweep_, 0), w = binding_.matrix(sweep_, 1);
    hopper::ProductShape shape;
    shape.m = samples;
    shape.n = plan_.graph[sweep_.matmul].shape.features;
    shape.k = plan_.graph[plan_.graph[sweep_.matmul].args[0]].shape.features;
    shape.x = {x.row_stride, x.k_stride, true};
    shape.w = {w.row_stride, w.k_stride, true};
    shape.y_stride = shape.n;
    shape.stores_result = text_.epilogue.stored != kNoValue;
    if (scaled()) shape.scheme = hopper::Scheme::scaled;
    return shape;
  }

  // Every kernel that some number of samples takes on the GPU that the plan is for.
  void find_kernels() {
    for (int64_t samples = 1; samples <= kMaxSamples; samples = samples < 64 ? samples + 1
                                                                : samples < 8192
                                                                    ? samples + 32
                                                                    : samples * 17 / 16) {
      const hopper::ProductShape wanted = shape(samples);
      const bool here = arch_of(plan_.target.sm).hopper_kernels;
      const int units = here ? plan_.target.units : kHopper.multiprocessors;
      found_.add(found_.hopper, hopper::plan_product(wanted, hopper::limits_of(units)));
      for (const size_t bytes : kSharedBytes) {
        found_.add(found_.portable, portable::plan_product(hopper::as_split(wanted), bytes));
      }
    }
  }

  void write_kernels(const char* guard, bool tensor_maps,
                     const std::map<std::string, Template>& kernels, std::string* table) {
    if (kernels.empty()) return;
    // The framework compiles one text for all architectures: bodies are for those that have the
    // instructions.
    const char* architecture =
        tensor_maps ? "defined(__CUDA_ARCH_FEAT_SM90_ALL)" : "!defined(__CUDA_ARCH_FEAT_SM90_ALL)";
    text_.kernels += fmt::format("#if defined({})\n", guard);
    *table += fmt::format("#if defined({})\n", guard);
    for (const auto& [function, kernel] : kernels) {
      headers_.add_header(kernel.header);
      const std::string name =
          text_.epilogue.kernel + function.substr(std::string_view("product").size());
      text_.kernels += fmt::format(
          "template <class Config>\n__global__ void __launch_bounds__(Config::kThreads, 1) "
          "{0}(\n{1}"
          "    const __grid_constant__ ingot::hopper::ProductArgs args,\n"
          "    const __grid_constant__ ingot::{2}::Params params) {{\n"
          "#if {3}\n  ingot::{4}::{5}<Config, ingot::{2}>({6}, args, params);\n#endif\n}}\n",
          name,
          tensor_maps ? "    const __grid_constant__ ingot::TensorMap w,\n"
                        "    const __grid_constant__ ingot::TensorMap x,\n"
                        "    const __grid_constant__ ingot::TensorMap y,\n"
                      : "    const __grid_constant__ ingot::portable::PackedOperands operands,\n",
          text_.epilogue.functor, architecture, tensor_maps ? "hopper" : "portable", function,
          tensor_maps ? "w, x, y" : "operands");
      for (const std::string& config : kernel.configs) {
        *table += fmt::format(
            "      {{\"{0}\", \"{1}\",\n       reinterpret_cast<const "
            "void*>({2}<ingot::{3}::{1}>)}},\n",
            function, config, name, tensor_maps ? "hopper" : "portable");
      }
    }
    text_.kernels += "#endif\n";
    *table += "#endif\n";
  }

  std::string description(const std::string& table) const {
    const hopper::ProductShape one = shape(1);
    const std::string samples =
        fmt::format("{}{}", batched() ? "batch * " : "", samples_per_entry());
    return fmt::format(
        "\n// The shape and the kernels of the product in {0}.\n"
        "inline ingot::standalone::Product describe_{0}(ingot::i64 batch) {{\n"
        "  static const ingot::standalone::ProductKernel kernels[] = {{\n{1}  }};\n"
        "  ingot::standalone::Product product = {{}};\n"
        "  product.shape.m = {2};\n  product.shape.n = {3};\n  product.shape.k = {4};\n"
        "  product.shape.x = {{{5}, {6}, true}};\n  product.shape.w = {{{7}, {8}, true}};\n"
        "  product.shape.y_stride = {3};\n  product.shape.stores_result = {9};\n"
        "{11}  product.moments = {10};\n  product.sums = {12};\n"
        "  product.kernels = kernels;\n  product.kernel_count = int(std::size(kernels));\n"
        "  product.splits = split_kernels;\n"
        "  product.split_count = int(std::size(split_kernels));\n"
        "  return product;\n}}\n",
        text_.epilogue.kernel, table, samples, one.n, one.k, one.x.row_stride, one.x.k_stride,
        one.w.row_stride, one.w.k_stride, one.stores_result, text_.epilogue.moments,
        scaled() ? "  product.shape.scheme = ingot::hopper::Scheme::scaled;\n" : "",
        text_.epilogue.sums);
  }

  const Binding& binding_;
  const Plan& plan_;
  const Sweep& sweep_;
  Amalgamation& headers_;
  Found found_;
  ProductText text_;
};

}  // namespace

ProductText write_product(const Binding& binding, int sweep, Amalgamation& headers) {
  return ProductWriter(binding, sweep, headers).write();
}

std::string write_splits(const std::map<std::string, std::string>& functions) {
  std::string kernels, table;
  for (const auto& [function, bounds] : functions) {
    const std::string name = identifier(function);
    kernels += fmt::format(
        "__global__ void __launch_bounds__({}) {}(\n"
        "    const __grid_constant__ ingot::SplitArgs args) {{\n  ingot::{}(args);\n}}\n",
        bounds, name, function);
    table += fmt::format("    {{\"{}\", reinterpret_cast<const void*>({})}},\n", function, name);
  }
  return fmt::format(
      "// What packs fp32 operands into fp16.\n{}\n"
      "const ingot::standalone::SplitKernel split_kernels[] = {{\n{}}};\n",
      kernels, table);
}

}  // namespace ingot::standalone
