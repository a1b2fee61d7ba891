// Which of Ingot's own products serves which GPU, and with what configuration.
#include "cuda/product_family.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "api/program.h"
#include "cuda/compiler.h"
#include "cuda/nvrtc.h"
#include "product/hopper/candidates.h"

namespace ingot::cuda {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kLinear = R"({
  "ingot_graph": 1, "name": "linear", "values": [
    {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
    {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 384, 1, 512]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
    {"op": "relu", "args": [2]}],
  "results": [{"value": 3, "name": "y"}]})";

nlohmann::json sweep_of(const std::string& options, const std::string& graph = kLinear) {
  const auto program = abi::make_program(graph.c_str(), options);
  return program->executable->describe(100000)["sweeps"][0];
}

// kLinear with other types and extents.
std::string linear(const std::string& dtype, int features) {
  std::string text = kLinear;
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
      text.replace(at, from.size(), to);
  };
  replace("f32", dtype);
  replace("384", std::to_string(features));
  return text;
}

// Those that a Hopper kernel takes before its ProductArgs, needed or not.
TEST(OwnProduct, HaveThreeMapsOnHopper) {
  hopper::ProductShape shape;
  shape.m = shape.n = shape.k = 256;
  shape.x = shape.w = {256, 1, true};
  shape.y_stride = 256;
  std::set<hopper::Variant> seen;
  for (const hopper::TileChoice& choice : hopper::candidate_choices(shape, {})) {
    Arguments arguments;
    add_operands(hopper::plan_with(shape, choice, {}), {}, arguments);
    EXPECT_EQ(arguments.starts, (std::vector<size_t>{0, 128, 256})) << hopper::name_of(choice);
    EXPECT_EQ(arguments.bytes.size(), 384);
    seen.insert(choice.variant);
  }
  EXPECT_TRUE(seen.contains(hopper::Variant::streamed));
}

TEST(OwnProduct, AreChosenByArchitectureAndCapabilities) {
  const nlohmann::json none = nlohmann::json::object();
  EXPECT_EQ(product_family(90, none), ProductFamily::hopper);
  for (const int sm : {80, 87, 100, 103})
    EXPECT_EQ(product_family(sm, none), ProductFamily::portable);
  for (const int sm : {86, 89, 120}) {
    std::string why;
    EXPECT_EQ(product_family(sm, none, &why), ProductFamily::none);
    EXPECT_THAT(why, HasSubstr("tensor cores"));
    EXPECT_EQ(product_family(sm, {{"portable_product", true}}), ProductFamily::portable);
  }
  EXPECT_EQ(product_family(90, {{"hopper_product", false}}), ProductFamily::portable);
  EXPECT_EQ(product_family(90, {{"hopper_product", false}, {"portable_product", false}}),
            ProductFamily::none);
  EXPECT_EQ(product_family(75, {{"portable_product", true}}), ProductFamily::none);
}

TEST(OwnProduct, FitIntoTheSharedMemoryOfTheGpu) {
  hopper::ProductShape shape;
  shape.m = 1000, shape.n = 384, shape.k = 512;
  shape.x = shape.w = {512, 1, true};
  shape.y_stride = 384;
  Target target;
  target.units = 108;
  for (const auto& [bytes, threads] : {std::pair{163, 256u}, {99, 128u}, {227, 128u}}) {
    target.shared_bytes = bytes * 1024;
    const hopper::ProductPlan plan = plan_own_product(ProductFamily::portable, shape, target);
    EXPECT_EQ(plan.variant, hopper::Variant::portable) << plan.reason;
    EXPECT_EQ(plan.threads, threads);
    const size_t most = static_cast<size_t>(target.shared_bytes);
    EXPECT_LE(plan.shared_bytes, most);
    // Eight warps a multiprocessor want both halves of it; one block of four takes most of 99 KiB.
    EXPECT_GT(plan.shared_bytes, most * (bytes == 227 ? 2 : 4) / 5);
  }
  target.shared_bytes = 48 * 1024;
  EXPECT_EQ(plan_own_product(ProductFamily::portable, shape, target).variant,
            hopper::Variant::unsupported);
}

TEST(OwnProduct, LeaveFewTilesToTheLibrary) {
  hopper::ProductShape shape;
  shape.n = 1024, shape.k = 4096;
  shape.x = shape.w = {4096, 1, true};
  shape.y_stride = 1024;
  Target target;
  target.sm = 80, target.units = 108, target.shared_bytes = 163 * 1024;
  shape.m = 64;
  EXPECT_TRUE(plan_own_product(ProductFamily::portable, shape, target).library_faster);
  shape.m = 8192;
  const hopper::ProductPlan plan = plan_own_product(ProductFamily::portable, shape, target);
  EXPECT_FALSE(plan.library_faster);
  shape.weight_packed = true;
  EXPECT_LT(plan_own_product(ProductFamily::portable, shape, target).estimated_us,
            plan.estimated_us);
}

TEST(OwnProduct, TakeSixteenBitOperandsOnHopperAsTheyAre) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const std::string hopper = R"({"device": "cuda", "sm": 90})";
  for (const auto& [dtype, element] :
       {std::pair{"bf16", hopper::Element::bf16}, {"f16", hopper::Element::f16}}) {
    const nlohmann::json sweep = sweep_of(hopper, linear(dtype, 384));
    EXPECT_EQ(sweep["provider"], name_of(ProductFamily::hopper, element));
    ASSERT_EQ(sweep["kernels"].size(), 1u) << "nothing is split";
    EXPECT_THAT(sweep["kernels"][0]["text"].get<std::string>(), HasSubstr("product_half"));
    // Rows of the result that are not whole pieces of 16 bytes.
    const nlohmann::json odd = sweep_of(hopper, linear(dtype, 383));
    EXPECT_EQ(odd["provider"], name_of(ProductFamily::hopper, element));
    EXPECT_THAT(odd["kernels"][0]["text"].get<std::string>(), HasSubstr(", 2, false>"));
    EXPECT_THAT(sweep["kernels"][0]["text"].get<std::string>(), Not(HasSubstr("false>")));
    EXPECT_THAT(sweep_of(R"({"device": "cuda", "sm": 80})", linear(dtype, 384))["reason"],
                HasSubstr("16-bit"));
  }
}

TEST(OwnProduct, DescribeSixteenBitMatricesToTheCopyEngine) {
  hopper::ProductShape shape;
  shape.m = 1000, shape.n = 384, shape.k = 520;
  shape.x = shape.w = {520, 1, true};
  shape.y_stride = 384;
  shape.element = hopper::Element::bf16;
  const hopper::ProductPlan plan = hopper::plan_product(shape, {});
  ASSERT_EQ(plan.variant, hopper::Variant::half);
  EXPECT_TRUE(plan.splits.empty());
  EXPECT_EQ(plan.workspace_bytes, 0u);
  EXPECT_EQ(plan.chunks, 9);  // of 64; the last one is zero-padded
  EXPECT_LE(plan.shared_bytes, 232448u);
  for (const hopper::TensorMapSpec& map : {plan.w_map, plan.x_map, plan.y_map}) {
    EXPECT_EQ(map.element, hopper::Element::bf16);
    EXPECT_EQ(map.box_columns * 2, 128u);
    EXPECT_EQ(map.row_bytes % 16, 0u);
  }
  EXPECT_EQ(plan.x_map.columns, 520u);
  shape.x.row_stride = 521;
  EXPECT_EQ(hopper::plan_product(shape, {}).variant, hopper::Variant::unsupported);
}

// cuBLAS has slow kernels for those; its estimate says so.
TEST(OwnProduct, StoreSixteenBitRowsOfAnyAlignment) {
  hopper::ProductShape shape;
  shape.m = 4096, shape.n = 50257, shape.k = 768;
  shape.x = shape.w = {768, 1, true};
  shape.element = hopper::Element::bf16;
  const auto planned = [&](int64_t stride, bool aligned) {
    shape.y_stride = stride, shape.y_aligned = aligned;
    return hopper::plan_product(shape, {});
  };
  const hopper::ProductPlan whole = planned(50264, true);
  EXPECT_TRUE(whole.tma_store);
  for (const hopper::ProductPlan& plan :
       {planned(50257, true), planned(50258, true), planned(50264, false)}) {
    EXPECT_EQ(plan.variant, hopper::Variant::half);
    EXPECT_FALSE(plan.tma_store);
    EXPECT_EQ(plan.shared_bytes, whole.shared_bytes) << "rows are put together there all the same";
    EXPECT_GT(plan.estimated_us, whole.estimated_us);
  }
  EXPECT_GT(planned(50257, true).library_us, 5 * whole.library_us);
  EXPECT_GT(planned(50258, true).library_us, 3 * whole.library_us);
}

hopper::ProductShape scaled_shape(int64_t m, int64_t n, int64_t k) {
  hopper::ProductShape shape;
  shape.m = m, shape.n = n, shape.k = k;
  shape.x = shape.w = {k, 1, true};
  shape.y_stride = n;
  shape.scheme = hopper::Scheme::scaled;
  return shape;
}

TEST(OwnProduct, PacksOneValueAnElementForTf32) {
  for (const int64_t k : {1, 63, 64, 65, 1000, 8192}) {
    const int64_t lines = (k + 63) / 64;
    EXPECT_EQ(hopper::packed_bytes(hopper::Scheme::scaled, 10, k),
              static_cast<size_t>(10 * lines * 128));
  }
  hopper::ProductShape shape = scaled_shape(1024, 8192, 8192);
  const hopper::ProductPlan fused = hopper::plan_product(shape, {});
  ASSERT_EQ(fused.variant, hopper::Variant::fused_scaled) << fused.reason;
  EXPECT_EQ(fused.chunks % 2, 0) << "its pipeline takes chunks of 64 in pairs";
  ASSERT_EQ(fused.splits.size(), 1u) << "the weight is rounded inside the product";
  EXPECT_STREQ(fused.splits[0].header, "product/scaled_rows.cuh");
  EXPECT_EQ(fused.workspace_bytes, 1024u * 8192 * 2 + 1024 * 4);
  EXPECT_EQ(fused.x_map.columns, 8192u);
  EXPECT_EQ(fused.w_map.element, hopper::Element::f32);
  shape.weight_packed = true;
  const hopper::ProductPlan frozen = hopper::plan_product(shape, {});
  EXPECT_EQ(frozen.variant, hopper::Variant::scaled);
  EXPECT_EQ(frozen.splits.size(), 1u);
  EXPECT_LT(frozen.estimated_us, fused.estimated_us);
  const hopper::ProductPlan large = hopper::plan_product(scaled_shape(16384, 4096, 4096), {});
  EXPECT_EQ(large.variant, hopper::Variant::scaled);
  EXPECT_EQ(large.splits.size(), 2u) << "both operands are packed once for many tiles";
}

TEST(OwnProduct, LeavesLongSumsOfTf32ToTheLibrary) {
  EXPECT_NE(hopper::plan_product(scaled_shape(512, 512, 32768), {}).variant,
            hopper::Variant::unsupported);
  const hopper::ProductPlan plan = hopper::plan_product(scaled_shape(512, 512, 32769), {});
  EXPECT_EQ(plan.variant, hopper::Variant::unsupported);
  EXPECT_THAT(plan.reason, HasSubstr("32768"));
}

// Whatever the alignment, an odd product is packed and fits a block's shared memory.
TEST(OwnProduct, HasATileOfTf32ForEveryShape) {
  for (const int64_t m : {1, 100, 5000}) {
    for (const int64_t n : {1, 127, 4099}) {
      for (const int64_t k : {1, 33, 4100}) {
        for (const bool aligned : {true, false}) {
          hopper::ProductShape shape = scaled_shape(m, n, k);
          shape.x.aligned = shape.w.aligned = shape.y_aligned = aligned;
          const hopper::ProductPlan plan = hopper::plan_product(shape, {});
          ASSERT_NE(plan.variant, hopper::Variant::unsupported) << plan.reason;
          EXPECT_LE(plan.shared_bytes, 232448u) << plan.config;
          EXPECT_GE(plan.chunks * 64, k);
          EXPECT_EQ(plan.tma_store,
                    aligned && n % 4 == 0 && plan.config.find("false") == std::string::npos);
          if (!aligned || k % 4 != 0) {
            EXPECT_EQ(plan.variant, hopper::Variant::scaled);
          }
        }
      }
    }
  }
}

TEST(OwnProduct, ServeTf32OnHopperWhereTheyAreFaster) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto tf32 = [](int sm, int64_t batch, int features) {
    const std::string options =
        R"({"device": "cuda", "precision": "tf32", "sm": )" + std::to_string(sm) + "}";
    const auto program = abi::make_program(linear("f32", features), options);
    return program->executable->describe(batch)["sweeps"][0];
  };
  const nlohmann::json own = tf32(90, 16384, 4096);
  EXPECT_EQ(own["provider"],
            name_of(ProductFamily::hopper, hopper::Element::f32, hopper::Scheme::scaled));
  EXPECT_THAT(own["tuning"]["key"].get<std::string>(), HasSubstr("| f32 by tf32 |"));
  for (const nlohmann::json& kernel : own["kernels"]) {
    EXPECT_THAT(kernel["text"].get<std::string>(), Not(HasSubstr("product/split.cuh")));
  }
  EXPECT_EQ(tf32(90, 256, 384)["provider"], "cuBLASLt (tf32)") << "small";
  for (const int sm : {80, 86, 100}) {
    EXPECT_EQ(tf32(sm, 16384, 4096)["provider"], "cuBLASLt (tf32)");
  }
  EXPECT_THAT(tf32(80, 16384, 4096)["reason"], HasSubstr("TF32"));
  // 16-bit operands are what they are under every policy.
  EXPECT_EQ(sweep_of(R"({"device": "cuda", "sm": 90, "precision": "tf32"})",
                     linear("bf16", 384))["provider"],
            name_of(ProductFamily::hopper, hopper::Element::bf16));
}

TEST(OwnProduct, TakeTheProductSweepsOfAPlan) {
  // Where a GPU is present, programs are planned for it and not for the "sm" given here.
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  for (const int sm : {80, 100}) {
    const nlohmann::json sweep =
        sweep_of(R"({"device": "cuda", "sm": )" + std::to_string(sm) + "}");
    EXPECT_EQ(sweep["provider"], name_of(ProductFamily::portable, hopper::Element::f32));
  }
  EXPECT_EQ(sweep_of(R"({"device": "cuda", "sm": 90})")["provider"],
            name_of(ProductFamily::hopper, hopper::Element::f32));
  EXPECT_EQ(sweep_of(R"({"device": "cuda", "sm": 90,
                         "capabilities": {"hopper_product": false}})")["provider"],
            name_of(ProductFamily::portable, hopper::Element::f32));
  const nlohmann::json library = sweep_of(R"({"device": "cuda", "sm": 86})");
  EXPECT_EQ(library["provider"], "cuBLASLt (ieee fp32)");
  EXPECT_THAT(library["reason"], HasSubstr("8.6"));
}

TEST(OwnProduct, KeepWeightsThatAreParameters) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  const auto size = [](const std::string& graph, const char* options) {
    return abi::make_program(graph, options)->executable->frozen_size();
  };
  // A line of 128 bytes for 32 of K, an exponent a row, both in multiples of 256 bytes.
  constexpr size_t kKept = 384 * 16 * 128 + 384 * 4;
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 90})"), kKept);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 80})"), kKept);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 86})"), 0u);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 90, "precision": "ieee"})"), 0u);
  // One value an element, not two.
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 90, "precision": "tf32"})"),
            384 * 8 * 128 + 384 * 4);
  EXPECT_EQ(size(kLinear, R"({"device": "cuda", "sm": 80, "precision": "tf32"})"), 0u);
  std::string weight_is_input = kLinear;
  weight_is_input.replace(weight_is_input.find("parameter"), 9, "input");
  EXPECT_EQ(size(weight_is_input, R"({"device": "cuda", "sm": 90})"), 0u);
}

// y = x · W of `k` and `n`, W row-major.
hopper::ProductShape times_rows(int64_t m, int64_t n, int64_t k) {
  hopper::ProductShape shape;
  shape.m = m, shape.n = n, shape.k = k;
  shape.x = {k, 1, true};
  shape.w = {1, n, true};
  shape.y_stride = n;
  return shape;
}

TEST(OwnProduct, SplitsAWeightThatIsContiguousInNInsideTheKernel) {
  const hopper::ProductPlan plan = hopper::plan_product(times_rows(1024, 8192, 8192), {});
  ASSERT_EQ(plan.variant, hopper::Variant::fused_split) << plan.reason;
  EXPECT_EQ(plan.config, "FusedSplitConfig<128, 3, 4, true, 2, 1, false, false>");
  ASSERT_EQ(plan.splits.size(), 1u) << "the weight is read as it lies";
  EXPECT_EQ(plan.splits[0].operand, hopper::SplitStep::Operand::x);
  EXPECT_EQ(plan.workspace_bytes, 1024u * 8192 * 4 + 1024 * 4);
  const hopper::ProductPlan sliced = hopper::plan_product(times_rows(16, 1024, 8192), {});
  EXPECT_GT(sliced.cluster, 1u);
  EXPECT_EQ(sliced.splits.size(), 1u);
}

TEST(OwnProduct, PacksAWeightThatTheCopyEngineCannotReadInEights) {
  const auto packs_both = [](const hopper::ProductShape& shape) {
    return hopper::plan_product(shape, {}).splits.size() == 2;
  };
  hopper::ProductShape shape = times_rows(1024, 8192, 8192);
  EXPECT_FALSE(packs_both(shape));
  shape.w.aligned = false;
  EXPECT_TRUE(packs_both(shape));
  EXPECT_TRUE(packs_both(times_rows(1024, 8192, 8188))) << "k is not a multiple of eight";
  EXPECT_TRUE(packs_both(times_rows(1024, 8190, 8192))) << "rows are not whole pieces";
  shape = times_rows(256, 512, 512);
  shape.batches = 4;
  shape.x.batch_stride = 256 * 512, shape.w.batch_stride = 512 * 512;
  EXPECT_TRUE(packs_both(shape)) << "a weight for every entry";
}

// The line of a box in shared memory, which the copy engine fills dimension by dimension.
TEST(OwnProduct, SpreadsEightsOverTheBanks) {
  const hopper::ProductPlan plan = hopper::plan_product(times_rows(1024, 8192, 8192), {});
  const hopper::TensorMapExtents of = hopper::extents_of(plan.w_map);
  ASSERT_EQ(of.rank, 4);
  EXPECT_EQ(of.extents[0], 8192u);
  EXPECT_EQ(of.extents[1] * of.extents[2] * of.extents[3], 8192u);
  EXPECT_EQ(of.box[0] * 4, 128u) << "a line of the swizzle";
  EXPECT_EQ(of.box[1] * of.box[2] * of.box[3], 32u);
  constexpr uint64_t kRow = 8192 * 4;
  for (uint32_t line = 0; line < 32; ++line) {
    const uint32_t j = line % of.box[1], c = line / of.box[1] % of.box[2],
                   i = line / of.box[1] / of.box[2];
    EXPECT_EQ(j * of.strides[0] + c * of.strides[1] + i * of.strides[2],
              (8 * c + 4 * j + i) * kRow);
  }
  const hopper::TensorMapExtents x = hopper::extents_of(plan.x_map);
  EXPECT_EQ(x.rank, 2);
  EXPECT_EQ(x.strides[0], plan.x_map.row_bytes);
}

// Of a packing of transposed rows: what its kernel's name and its launch say.
struct Columns {
  int warps = 0, registers = 0, shared = 0;
  int64_t lines = 0;  // that all blocks of a strip keep
};

Columns columns_of(const hopper::SplitStep& step) {
  Columns c;
  const size_t at = step.kernel.find('<');
  EXPECT_EQ(
      std::sscanf(step.kernel.c_str() + at, "<%d, %d, %d>", &c.warps, &c.registers, &c.shared), 3)
      << step.kernel;
  c.lines = int64_t{c.warps} * (c.registers + c.shared) * std::max(step.cluster, 1u);
  return c;
}

TEST(OwnProduct, KeepTransposedOperandsOnChipUntilTheirMaximaAreKnown) {
  using Operand = hopper::SplitStep::Operand;
  for (const hopper::Scheme scheme :
       {hopper::Scheme::split, hopper::Scheme::scaled, hopper::Scheme::high}) {
    const int line_k = hopper::scheme_of(scheme).line_k;
    for (const bool clusters : {false, true}) {
      for (const int64_t rows : {1, 33, 1024, 8192, 20000}) {
        for (const int64_t k : {1, 33, 512, 1024, 1025, 2048, 4096, 7168, 8192, 16384, 16385}) {
          SCOPED_TRACE(fmt::format("rows {}, k {}, lines of {}, {}", rows, k, line_k, clusters));
          const hopper::SplitStep step =
              hopper::plan_split(Operand::w, rows, k, {1, rows + 1, true}, scheme, clusters);
          const Columns c = columns_of(step);
          const unsigned blocks = std::max(step.cluster, 1u);
          EXPECT_EQ(step.threads, unsigned(c.warps) * 32);
          EXPECT_EQ(step.grid, unsigned(hopper::divide_up(rows, 32)) * blocks);
          EXPECT_TRUE(blocks == 1 || (clusters && (blocks == 2 || blocks == 4 || blocks == 8)));
          EXPECT_EQ(step.shared_bytes,
                    size_t(pack_columns_bytes(c.warps, line_k / 32, c.registers, c.shared)));
          EXPECT_LE((step.shared_bytes + 5120) * step.resident, 228u * 1024);
          const int64_t most = clusters ? 16384 : 2048;
          EXPECT_EQ(c.registers > 0, k <= most) << "read once where it fits";
          if (c.registers > 0) {
            EXPECT_GE(c.lines, hopper::packed_lines(hopper::scheme_of(scheme), k));
          }
        }
      }
    }
  }
}

TEST(OwnProduct, SpreadFewTransposedRowsOverTheGpu) {
  using Operand = hopper::SplitStep::Operand;
  const auto step = [](int64_t rows, int64_t k) {
    return hopper::plan_split(Operand::x, rows, k, {1, rows, true}, hopper::Scheme::split, true);
  };
  EXPECT_EQ(step(8192, 1024).cluster, 0u) << "a block keeps a strip, and there are enough";
  EXPECT_EQ(step(8192, 8192).cluster, 8u);
  EXPECT_EQ(step(1024, 1024).cluster, 4u) << "a line a warp";
  EXPECT_EQ(step(1024, 2048).cluster, 8u);
  EXPECT_EQ(step(64, 32).cluster, 0u) << "one line";
}

// With the epilogue that the generator writes, for the large and the small shared memory.
TEST(OwnProduct, CompileWithoutSpills) {
  if (try_driver(nullptr) != nullptr) GTEST_SKIP() << "there is a GPU";
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  for (const int sm : {80, 86}) {
    const nlohmann::json sweep = sweep_of(R"({"device": "cuda", "sm": )" + std::to_string(sm) +
                                          R"(, "capabilities": {"portable_product": true}})");
    ASSERT_EQ(sweep["provider"], name_of(ProductFamily::portable, hopper::Element::f32));
    for (const nlohmann::json& kernel : sweep["kernels"]) {
      const std::string text = kernel["text"];
      std::vector<std::string> options = compile_options(nvrtc_architecture(sm));
      options.emplace_back("--ptxas-options=-v");
      const Compilation result = nvrtc_compile(kernel["name"], text, headers_of(text), options);
      EXPECT_THAT(result.log, Not(HasSubstr("warning")));
      EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << kernel["name"];
      EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame")));
    }
  }
}

TEST(OwnProduct, CompileWithoutSpillsWhereOperandsAreReadAsTheyAre) {
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  const json tuning = sweep_of(R"({"device": "cuda", "sm": 90})")["tuning"];
  int compiled = 0;
  for (const std::string name : tuning["candidates"]) {
    if (!name.starts_with("StreamedConfig")) continue;
    const json options = {
        {"device", "cuda"}, {"sm", 90}, {"product_choices", {{tuning["key"], name}}}};
    const json sweep = sweep_of(options.dump());
    ASSERT_THAT(name, HasSubstr(sweep["config"].get<std::string>()));
    for (const json& kernel : sweep["kernels"]) {
      const std::string text = kernel["text"];
      std::vector<std::string> flags = compile_options(nvrtc_architecture(90));
      flags.emplace_back("--ptxas-options=-v");
      const Compilation result = nvrtc_compile(kernel["name"], text, headers_of(text), flags);
      EXPECT_THAT(result.log, Not(HasSubstr("warning")));
      EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << name;
      ++compiled;
    }
  }
  EXPECT_GE(compiled, 10);
}

// The longest rows take the most registers.
TEST(OwnProduct, PackTransposedOperandsWithoutSpills) {
  if (!nvrtc_info().available) GTEST_SKIP() << nvrtc_info().why;
  using Operand = hopper::SplitStep::Operand;
  for (const int sm : {80, 90}) {
    for (const hopper::Scheme scheme :
         {hopper::Scheme::split, hopper::Scheme::scaled, hopper::Scheme::high}) {
      if (sm < 89 && scheme == hopper::Scheme::high) continue;
      for (const int64_t k : {1024, 2048, 8192, 16384, 20000}) {
        const hopper::SplitStep step =
            hopper::plan_split(Operand::w, 4096, k, {1, 4096, true}, scheme, sm == 90);
        const std::string text = fmt::format(
            "#include \"{}\"\nextern \"C\" __global__ void __launch_bounds__({}, {}) pack(\n"
            "    const __grid_constant__ ingot::SplitArgs args) {{ ingot::{}(args); }}\n",
            step.header, step.threads, step.resident, step.kernel);
        std::vector<std::string> options = compile_options(nvrtc_architecture(sm));
        options.emplace_back("--ptxas-options=-v");
        const Compilation result = nvrtc_compile("pack", text, headers_of(text), options);
        EXPECT_THAT(result.log, Not(HasSubstr("warning")));
        EXPECT_THAT(result.log, HasSubstr(" 0 bytes spill stores")) << step.kernel;
        EXPECT_THAT(result.log, Not(::testing::ContainsRegex("[1-9][0-9]* bytes stack frame")));
      }
    }
  }
}

}  // namespace
}  // namespace ingot::cuda
