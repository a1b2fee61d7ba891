// Sweeps on the blocks of a product: the same bits as behind it, and where they run so.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "backend/executable.h"
#include "cpu/product/own.h"
#include "graph/builder.h"
#include "support/threads.h"

namespace ingot {
namespace {

const nlohmann::json kCapabilities{{"avx2", false}};  // where no provider goes before the host's

// Our own product in the place of the host process's, which hands out no blocks.
int plain_product(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda, const void* b,
                  int64_t ldb, int transpose_b, void* c, int64_t ldc, const void*, int32_t dtype,
                  void*) {
  const cpu::ProductCall call{
      m, n, k, a, lda, b, ldb, transpose_b != 0, c, ldc, static_cast<ingot_dtype>(dtype)};
  return cpu::own_product(cpu::detect_isa(kCapabilities), true)->run(call) ? 0 : 1;
}

struct Run {
  std::vector<std::vector<float>> tensors;  // leaves, then results
  nlohmann::json sweeps;
};

Run run(const Graph& graph, int64_t batch, bool on_blocks) {
  if (!on_blocks) cpu::set_host_product("plain", plain_product, nullptr);
  ProgramOptions options;
  options.capabilities = kCapabilities;
  const auto executable =
      make_cpu_executable(make_plan(graph, cpu_target(options), Precision::fp32), options);
  Run out;
  out.sweeps = executable->describe(batch).at("sweeps");
  std::vector<ingot_tensor> views;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-1.0f, 2.0f);
  const auto add = [&](ValueId value) {
    const Shape& shape = graph[value].shape;
    out.tensors.emplace_back(static_cast<size_t>(shape.elements(batch)));
    for (float& element : out.tensors.back()) element = uniform(random);
    ingot_tensor view{};
    view.data = out.tensors.back().data();
    view.dtype = INGOT_F32;
    view.device = -1;
    int64_t stride = 1;
    for (int axis = kAxes - 1; axis >= 0; --axis) {
      view.sizes[axis] = shape.extent(static_cast<Axis>(axis), batch);
      view.strides[axis] = stride;
      stride *= view.sizes[axis];
    }
    views.push_back(view);
  };
  for (const ValueId leaf : graph.leaves()) add(leaf);
  for (const Result& result : graph.results) add(result.value);
  const size_t bytes = executable->workspace_size(batch);
  std::vector<std::byte> workspace(bytes + 256, std::byte{0xff});
  void* base = workspace.data();
  size_t space = workspace.size();
  std::align(256, bytes, base, space);
  executable->run(batch, views, base, bytes, nullptr);
  cpu::set_host_product("", nullptr, nullptr);
  return out;
}

int64_t count_on_blocks(const Run& made) {
  int64_t count = 0;
  for (const auto& sweep : made.sweeps) count += sweep.contains("on_blocks_of") ? 1 : 0;
  return count;
}

// Builds a graph from the result of a linear layer.
template <class Behind>
Graph behind_linear(int64_t k, int64_t n, Behind&& behind) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, k});
  const ValueId w = b.leaf(LeafRole::parameter, "w", DType::f32, {false, n, 1, k});
  const ValueId bias = b.leaf(LeafRole::parameter, "b", DType::f32, {false, 1, 1, n});
  behind(b, b.pointwise(PointwiseOp::add_, {b.matmul(x, w, true), bias}));
  return b.take();
}

ValueId normalised(GraphBuilder& b, ValueId y, AxisMask axes) {
  const ValueId mean = b.reduce(Finish::mean, y, axes);
  const ValueId variance = b.reduce(Finish::variance, y, axes);
  const ValueId shifted = b.pointwise(PointwiseOp::add_, {variance, b.constant(1e-5)});
  const ValueId inverse = b.pointwise(PointwiseOp::rsqrt_, {shifted});
  return b.pointwise(PointwiseOp::mul_, {b.pointwise(PointwiseOp::sub_, {y, mean}), inverse});
}

void check(const Graph& graph, int64_t batch, int64_t expected, const char* what) {
  for (const int threads : {1, 2}) {
    set_host_threads(nullptr, threads);
    const Run fused = run(graph, batch, true), plain = run(graph, batch, false);
    EXPECT_TRUE(fused.tensors == plain.tensors) << what << ", " << threads << " threads";
    EXPECT_EQ(count_on_blocks(plain), 0) << what;
    EXPECT_EQ(count_on_blocks(fused), expected) << what << "\n" << fused.sweeps.dump();
  }
  set_host_threads(nullptr, 0);
}

TEST(CpuBlocks, PointwiseChain) {
  const auto gelu = [](GraphBuilder& b, ValueId y) {
    b.result(b.pointwise(PointwiseOp::mul_, {y, b.pointwise(PointwiseOp::erf_, {y})}), "z");
  };
  check(behind_linear(300, 1024, gelu), 400, 1, "even");
  check(behind_linear(70, 1100, gelu), 333, 1, "odd");
  check(behind_linear(70, 40, gelu), 1200, 1, "narrow");
}

// Added in the product itself, where nothing else reads that.
TEST(CpuBlocks, ABiasAlone) {
  const auto alone = [](GraphBuilder& b, ValueId y) { b.result(y, "y"); };
  check(behind_linear(300, 1024, alone), 400, 1, "even");
  check(behind_linear(16, 16, alone), 1000, 1, "tall");
  check(behind_linear(200, 3, alone), 1000, 1, "few columns");
  check(behind_linear(20, 500, alone), 3, 1, "few rows");
}

TEST(CpuBlocks, BatchNormKeepsTheProductForItsSecondSweep) {
  const auto batch_norm = [](GraphBuilder& b, ValueId y) {
    b.result(normalised(b, y, axis_bit(kBatch)), "z");
  };
  check(behind_linear(100, 1024, batch_norm), 1500, 1, "batch norm");
}

void layer_norm(GraphBuilder& b, ValueId y) {
  b.result(normalised(b, y, axis_bit(kFeatures)), "z");
}

TEST(CpuBlocks, RowsThatFitInABlock) {
  check(behind_linear(40, 96, layer_norm), 1200, 1, "short rows");
}

TEST(CpuBlocks, LongRowsForWhichBWerePackedOften) {
  check(behind_linear(1200, 4096, layer_norm), 2048, 0, "long rows");
}

TEST(CpuBlocks, GroupsOfFeatures) {
  const auto group_norm = [](GraphBuilder& b, ValueId y) {
    const ValueId grouped = b.view(y, {true, 1, 32, 32});
    const ValueId z = normalised(b, grouped, axis_bit(kFeatures));
    b.result(b.view(z, {true, 1, 1, 1024}), "z");
  };
  check(behind_linear(300, 1024, group_norm), 256, 1, "groups");
}

// The product is a result too, so it is written; and a second product's operand is made on blocks.
TEST(CpuBlocks, TwoProductsAndAResultBetween) {
  const Graph graph = behind_linear(200, 512, [](GraphBuilder& b, ValueId y) {
    b.result(y, "y");
    const ValueId h = b.pointwise(PointwiseOp::relu_, {y});
    const ValueId w = b.leaf(LeafRole::parameter, "w2", DType::f32, {false, 256, 1, 512});
    const ValueId s = b.leaf(LeafRole::parameter, "s", DType::f32, {false, 1, 1, 256});
    const ValueId vector = b.pointwise(PointwiseOp::exp_, {b.pointwise(PointwiseOp::abs_, {s})});
    b.result(b.pointwise(PointwiseOp::mul_, {b.matmul(h, w, true), vector}), "z");
  });
  check(graph, 600, 2, "two products");
}

TEST(CpuBlocks, AProductThatIsAlsoAResultIsWritten) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 100});
  const ValueId w = b.leaf(LeafRole::parameter, "w", DType::f32, {false, 512, 1, 100});
  const ValueId y = b.matmul(x, w, true);
  b.result(y, "y");
  b.result(b.pointwise(PointwiseOp::tanh_, {y}), "z");
  check(b.take(), 300, 1, "result");
}

}  // namespace
}  // namespace ingot
