#include "standalone/product_writer.h"

#include <algorithm>
#include <map>
#include <set>

#include "codegen/type_names.h"
#include "product/portable/launch.h"
#include "support/error.h"

namespace ingot::standalone {
namespace {

using hopper::ProductPlan;
using hopper::SplitStep;
using hopper::Variant;

// Shared memory limits of the compute capabilities without Hopper's kernels: the first takes the
// narrow tile, the second the wide one.
constexpr size_t kSharedBytes[] = {101376, 166912};
// Up to here a product takes the tile that the library does, beyond it the last one's.
constexpr int64_t kMostSamples = int64_t{1} << 15;
// Tiles by how much a product contracts are for powers of two from here on.
constexpr int64_t kLeastContracted = 64;

constexpr std::string_view kProduct = "product";  // begins the kernels' names

// With braces as a format has them.
std::string doubled(const std::string& text) {
  std::string result;
  for (const char c : text) result.append(c == '{' || c == '}' ? 2 : 1, c);
  return result;
}

bool launches_alike(const ProductPlan& a, const ProductPlan& b) {
  const auto same = [](const SplitStep& one, const SplitStep& other) {
    return one.kernel == other.kernel && one.cluster == other.cluster;
  };
  return a.config == b.config &&
         std::equal(a.splits.begin(), a.splits.end(), b.splits.begin(), b.splits.end(), same);
}

// How one tile is launched, whatever the number of samples.
struct TileText {
  std::string function, header, config, rest;
  bool operator==(const TileText&) const = default;
};

class ProductWriter {
 public:
  ProductWriter(const Binding& binding, int sweep, Amalgamation& headers, ProductTables& tables)
      : binding_(binding),
        plan_(binding.plan()),
        sweep_(plan_.sweeps[static_cast<size_t>(sweep)]),
        headers_(headers),
        tables_(tables) {
    check();
    std::string why;
    std::optional<ProductEpilogue> epilogue = write_epilogue(plan_, sweep, &why);
    if (!epilogue) refuse(why);
    text_.epilogue = *std::move(epilogue);
  }

  ProductText write() {
    text_.kernels = fmt::format("namespace ingot {{\n\n{}\n}}  // namespace ingot\n\n",
                                text_.epilogue.functor_text);
    for (const char* header : {"common/pointwise.cuh", "sweeps/tensor.cuh", "standalone/product.h"})
      headers_.add_header(header);
    find_tiles();
    write_kernels(true, hopper_);
    write_kernels(false, portable_);
    const std::string shape = tables_.name_of(shape_text());
    text_.by_tile = fmt::format("{}_kernels({})", shape, text_.epilogue.kernel);
    std::vector<size_t> states;
    for (int i = 0; i < text_.epilogue.moments; ++i) {
      const bool sum = (text_.epilogue.sums >> i & 1) != 0;
      states.push_back(sum ? sizeof(Sum<float>::State) : sizeof(Moments<float>::State));
    }
    const bool by_k = binding_.most_contracted().has_value();
    text_.plan = fmt::format("plan({}, {{}}, {{{{{}}}}}, {}, {})", shape, fmt::join(states, ", "),
                             product_samples(), by_k ? "batch" : std::to_string(this->shape(1).k));
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
  std::string product_samples() const {
    const int64_t each = samples_per_entry();
    if (!batched()) return std::to_string(each);
    if (binding_.most_contracted()) return std::to_string(binding_.only_batch().value() * each);
    return each == 1 ? "batch" : fmt::format("batch * {}", each);
  }

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
    if (packs_samples_alone(plan_, sweep_)) shape.unpacked = hopper::Unpacked::whole;
    return shape;
  }

  // The plans of every number of samples that there may be: which of few tiles each takes.
  void find_tiles() {
    const bool here = arch_of(plan_.target.sm).hopper_kernels;
    const auto limits = hopper::limits_of(here ? plan_.target.units : kHopper.multiprocessors);
    // Of what is contracted a tile is for the most: what packs long rows packs short ones.
    hopper::ProductShape longest = hopper::as_split(shape(1));
    longest.k = binding_.most_contracted().value_or(longest.k);
    for (const size_t bytes : kSharedBytes) add(portable_, portable::plan_product(longest, bytes));
    const int64_t each = samples_per_entry();
    const std::optional<int64_t> only = batched() ? binding_.only_batch() : std::nullopt;
    hopper::ProductShape wanted = shape(each * only.value_or(1));
    ProductPlan last;
    const auto take = [&](int64_t extent) {
      ProductPlan plan = hopper::plan_product(wanted, limits);
      if (!ranges_.empty() && launches_alike(plan, last)) {
        ranges_.back().first = extent;
      } else {
        ranges_.emplace_back(extent, add(hopper_, plan));
        last = std::move(plan);
      }
    };
    if (const std::optional<int64_t> most = binding_.most_contracted()) {
      for (wanted.k = std::min(kLeastContracted, *most); wanted.k < *most; wanted.k *= 2) {
        take(wanted.k);
      }
      wanted.k = *most;
      take(wanted.k);
    } else {
      do {
        take(wanted.m);
        wanted.m += each;
      } while (batched() && !only && wanted.m <= kMostSamples);
    }
    ranges_.back().first = int64_t{1} << 30;
  }

  // Gives its place among the tiles.
  size_t add(std::vector<TileText>& tiles, const ProductPlan& plan) {
    if (plan.variant == Variant::unsupported) refuse(plan.reason);
    if (plan.raster_group != std::min(8, plan.raster_feature_tiles)) {
      throw std::logic_error("a standalone file knows one raster");
    }
    const bool portable = plan.variant == Variant::portable;
    std::string passes[2] = {"nullptr", "nullptr"};
    for (const SplitStep& step : plan.splits) {
      headers_.add_header(step.header);
      passes[step.operand == SplitStep::Operand::w] = fmt::format("&{}", tables_.name_of(step));
    }
    const bool unpacked = hopper::is_unpacked(plan.variant);
    const hopper::SchemeSpec& scheme =
        hopper::scheme_of(portable ? hopper::Scheme::split : plan.scheme);
    const int64_t row_bytes = unpacked ? 0 : scheme.whole_k / scheme.line_k * 128;
    const hopper::Chunk chunk = hopper::chunk_of(plan.variant);
    const int64_t partials = portable || unpacked ? 0 : plan.moment_tiles / plan.sample_tiles;
    const TileText tile = {
        plan.kernel, plan.header, plan.config,
        fmt::format("{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}",
                    plan.threads, plan.shared_bytes, plan.tile_samples, plan.raster_feature_tiles,
                    chunk.k, chunk.steps, portable ? 0 : plan.cluster, plan.slices, partials,
                    plan.tma_store, plan.w_map.eights, plan.x_map.box_rows, plan.w_map.box_rows,
                    scheme.whole_k, row_bytes, passes[0], passes[1])};
    const auto found = std::find(tiles.begin(), tiles.end(), tile);
    if (found != tiles.end()) return static_cast<size_t>(found - tiles.begin());
    tiles.push_back(tile);
    return tiles.size() - 1;
  }

  std::string kernel_of(const TileText& tile) const {
    return text_.epilogue.kernel + tile.function.substr(kProduct.size());
  }

  void write_kernels(bool hopper, const std::vector<TileText>& tiles) {
    // The framework compiles one text for all architectures: bodies are for those that have the
    // instructions.
    const char* architecture =
        hopper ? "defined(__CUDA_ARCH_FEAT_SM90_ALL)" : "!defined(__CUDA_ARCH_FEAT_SM90_ALL)";
    std::set<std::string> written;
    for (const TileText& tile : tiles) {
      const std::string name = kernel_of(tile);
      if (!written.insert(name).second) continue;
      headers_.add_header(tile.header);
      text_.kernels += fmt::format(
          "template <class Config>\n__global__ void __launch_bounds__(Config::kThreads, 1) "
          "{0}(\n{1}"
          "    const __grid_constant__ ingot::hopper::ProductArgs args,\n"
          "    const __grid_constant__ ingot::{2}::Params params) {{\n"
          "#if {3}\n  ingot::{4}::{5}<Config, ingot::{2}>({6}, args, params);\n#endif\n}}\n",
          name,
          hopper ? "    const __grid_constant__ ingot::TensorMap w,\n"
                   "    const __grid_constant__ ingot::TensorMap x,\n"
                   "    const __grid_constant__ ingot::TensorMap y,\n"
                 : "    const __grid_constant__ ingot::portable::PackedOperands operands,\n",
          text_.epilogue.functor, architecture, hopper ? "hopper" : "portable", tile.function,
          hopper ? "w, x, y" : "operands");
    }
  }

  // A text for each tile of either kind.
  template <class Text>
  std::vector<std::string> by_tile(Text&& text) const {
    std::vector<std::string> texts;
    for (const bool hopper : {false, true}) {
      for (const TileText& tile : hopper ? hopper_ : portable_) {
        texts.push_back("    " + text(tile, hopper ? "hopper" : "portable"));
      }
    }
    return texts;
  }

  // What products of the same shape share. {0}: its name.
  std::string shape_text() const {
    const hopper::ProductShape one = shape(1);
    std::string ranges = "   ";
    size_t line = ranges.size();
    for (const auto& [samples, tile] : ranges_) {
      const std::string range = fmt::format(" {{{}, {}}},", samples, tile);
      if (line + range.size() > 100) {
        ranges += "\n   ";
        line = 3;
      }
      ranges += range;
      line += range.size();
    }
    const auto tiles =
        by_tile([](const TileText& tile, const char*) { return "{" + tile.rest + "}"; });
    const auto kernels = by_tile([](const TileText& tile, const char* space) {
      const std::string ending = tile.function.substr(kProduct.size());
      return fmt::format("(void*)name##{}<{}::{}>", ending, space, tile.config);
    });
    return fmt::format(
        "#define {{0}}_kernels(name) \\\n{}\n"
        "inline const Tile {{0}}_tiles[] = {{{{\n{}}}}};\n"
        "inline const Range {{0}}_ranges[] = {{{{\n{}}}}};\n"
        "inline const Shape {{0}} = {{{{{}, {}, {{{{nullptr, {}, {}}}}}, {{{{nullptr, {}, {}}}}},\n"
        "    {{0}}_tiles, {{0}}_ranges}}}};\n\n",
        fmt::join(kernels, ", \\\n"), doubled(fmt::format("{}", fmt::join(tiles, ",\n"))),
        doubled(ranges), one.n, binding_.most_contracted().has_value(), one.x.row_stride,
        one.x.k_stride, one.w.row_stride, one.w.k_stride);
  }

  const Binding& binding_;
  const Plan& plan_;
  const Sweep& sweep_;
  Amalgamation& headers_;
  ProductTables& tables_;
  ProductText text_;
  std::vector<TileText> hopper_, portable_;
  std::vector<std::pair<int64_t, size_t>> ranges_;  // samples up to, place among Hopper's tiles
};

}  // namespace

ProductText write_product(const Binding& binding, int sweep, Amalgamation& headers,
                          ProductTables& tables) {
  return ProductWriter(binding, sweep, headers, tables).write();
}

std::string ProductTables::name_of(const std::string& shape) {
  const auto known = std::find(shapes.begin(), shapes.end(), shape);
  const auto place = known - shapes.begin();
  if (known == shapes.end()) shapes.push_back(shape);
  return fmt::format("shape{}", place);
}

std::string ProductTables::name_of(const SplitStep& step) {
  const auto known = std::find_if(packings.begin(), packings.end(), [&](const SplitStep& other) {
    return step.kernel == other.kernel && step.cluster == other.cluster;
  });
  const auto place = known - packings.begin();
  if (known == packings.end()) packings.push_back(step);
  return fmt::format("pack{}", place);
}

std::string ProductTables::text() const {
  if (shapes.empty()) return "";
  std::string kernels, table;
  std::set<std::string> written;
  for (size_t i = 0; i < packings.size(); ++i) {
    const SplitStep& step = packings[i];
    const std::string kernel = identifier(step.kernel);
    const std::string bounds = step.resident > 1
                                   ? fmt::format("{}, {}", step.threads, step.resident)
                                   : std::to_string(step.threads);
    if (written.insert(kernel).second) {
      kernels += fmt::format(
          "__global__ void __launch_bounds__({}) {}(\n"
          "    const __grid_constant__ ingot::SplitArgs args) {{\n  ingot::{}(args);\n}}\n",
          bounds, kernel, step.kernel);
    }
    table += fmt::format("inline const Packing pack{} = {{{}, {}, {}, {}, {}}};\n", i, kernel,
                         step.threads, step.block_rows, step.cluster, step.shared_bytes);
  }
  table += "\n";
  for (size_t i = 0; i < shapes.size(); ++i) {
    table += fmt::format(fmt::runtime(shapes[i]), fmt::format("shape{}", i));
  }
  return fmt::format(
      "// What packs fp32 operands into fp16.\n{}\nnamespace ingot::standalone {{\n\n{}"
      "}}  // namespace ingot::standalone\n\n",
      kernels, table);
}

}  // namespace ingot::standalone
