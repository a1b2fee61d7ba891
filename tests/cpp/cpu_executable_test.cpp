// The CPU backend against the fp64 evaluator.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/executable.h"
#include "graph/builder.h"
#include "graph/evaluate.h"
#include "graph/importer.h"
#include "support/element.h"
#include "support/threads.h"

namespace ingot {
namespace {

struct Tensor {
  std::vector<float> values;
  ingot_tensor view{};
};

Tensor make_tensor(const Shape& shape, int64_t batch) {
  Tensor t;
  t.values.resize(static_cast<size_t>(shape.elements(batch)));
  t.view.data = t.values.data();
  int64_t stride = 1;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    t.view.sizes[axis] = shape.extent(static_cast<Axis>(axis), batch);
    t.view.strides[axis] = stride;
    stride *= t.view.sizes[axis];
  }
  t.view.dtype = INGOT_F32;
  t.view.device = -1;
  return t;
}

struct DoubleTensor {
  std::vector<double> values;
  ingot_tensor view{};
};

DoubleTensor make_double(const Shape& shape, int64_t batch) {
  Tensor t = make_tensor(shape, batch);
  DoubleTensor d;
  d.values.resize(t.values.size());
  d.view = t.view;
  d.view.data = d.values.data();
  d.view.dtype = INGOT_F64;
  return d;
}

struct Outcome {
  std::vector<Tensor> results, buffers;  // buffers: leaves after the run
};

Outcome run_on_cpu(const Graph& graph, int64_t batch, std::vector<Tensor> leaves,
                   const nlohmann::json& capabilities = nlohmann::json::object()) {
  ProgramOptions options;
  options.capabilities = capabilities;
  auto executable =
      make_cpu_executable(make_plan(graph, cpu_target(options), Precision::fp32), options);
  Outcome out;
  std::vector<ingot_tensor> views;
  for (Tensor& leaf : leaves) {
    leaf.view.data = leaf.values.data();
    views.push_back(leaf.view);
  }
  for (const Result& result : graph.results) {
    out.results.push_back(make_tensor(graph[result.value].shape, batch));
    std::fill(out.results.back().values.begin(), out.results.back().values.end(), -12345.0f);
  }
  for (Tensor& result : out.results) {
    result.view.data = result.values.data();
    views.push_back(result.view);
  }
  std::vector<std::max_align_t> workspace(
      executable->workspace_size(batch) / sizeof(std::max_align_t) + 64);
  void* base = workspace.data();
  size_t space = workspace.size() * sizeof(std::max_align_t);
  std::align(256, executable->workspace_size(batch), base, space);
  std::memset(base, 0xff, executable->workspace_size(batch));
  executable->run(batch, views, base, executable->workspace_size(batch), nullptr);
  out.buffers = std::move(leaves);
  return out;
}

struct Truth {
  std::vector<DoubleTensor> results;
  std::vector<Tensor> buffers;
};

Truth run_in_fp64(const Graph& graph, int64_t batch, std::vector<Tensor> leaves) {
  Truth truth;
  std::vector<ingot_tensor> views;
  for (Tensor& leaf : leaves) {
    leaf.view.data = leaf.values.data();
    views.push_back(leaf.view);
  }
  for (const Result& result : graph.results) {
    truth.results.push_back(make_double(graph[result.value].shape, batch));
  }
  for (DoubleTensor& result : truth.results) {
    result.view.data = result.values.data();
    views.push_back(result.view);
  }
  evaluate(graph, batch, views);
  truth.buffers = std::move(leaves);
  return truth;
}

std::vector<Tensor> random_leaves(const Graph& graph, int64_t batch, unsigned seed,
                                  float low = -2.0f, float high = 2.0f) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<Tensor> leaves;
  for (const ValueId leaf : graph.leaves()) {
    leaves.push_back(make_tensor(graph[leaf].shape, batch));
    for (float& value : leaves.back().values) value = uniform(generator);
  }
  return leaves;
}

// |candidate − truth| within `tolerance` of the largest |truth|; NaN and Inf at the same places.
template <class T>
void expect_close(const std::vector<float>& candidate, const std::vector<T>& truth,
                  double tolerance, const std::string& what) {
  ASSERT_EQ(candidate.size(), truth.size()) << what;
  double scale = 0;
  for (const T value : truth) {
    if (std::isfinite(value)) scale = std::max(scale, std::abs(static_cast<double>(value)));
  }
  for (size_t i = 0; i < truth.size(); ++i) {
    const double t = static_cast<double>(static_cast<float>(truth[i]));
    const double c = static_cast<double>(candidate[i]);
    if (std::isnan(t)) {
      ASSERT_TRUE(std::isnan(c)) << what << " at " << i << ": " << c << " for NaN";
    } else if (std::isinf(t)) {
      ASSERT_EQ(c, t) << what << " at " << i;
    } else {
      ASSERT_NEAR(c, t, tolerance * scale + 1e-37) << what << " at " << i;
    }
  }
}

void compare(const Graph& graph, int64_t batch, const std::vector<Tensor>& leaves,
             double tolerance = 2e-6) {
  const Truth truth = run_in_fp64(graph, batch, leaves);
  for (const bool avx2 : {true, false}) {
    for (const bool avx512 : {true, false}) {
      if (!avx2 && avx512) continue;
      const Outcome out = run_on_cpu(graph, batch, leaves, {{"avx2", avx2}, {"avx512", avx512}});
      for (size_t i = 0; i < out.results.size(); ++i) {
        expect_close(out.results[i].values, truth.results[i].values, tolerance,
                     graph.name + " result " + std::to_string(i));
        if (testing::Test::HasFatalFailure()) return;
      }
      for (size_t i = 0; i < out.buffers.size(); ++i) {
        expect_close(out.buffers[i].values, truth.buffers[i].values, tolerance,
                     graph.name + " leaf " + std::to_string(i));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

Graph gemm_scale_bn(int64_t k, int64_t n) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, k});
  const ValueId w = b.leaf(LeafRole::parameter, "w", DType::f32, {false, n, 1, k});
  const ValueId bias = b.leaf(LeafRole::parameter, "b", DType::f32, {false, 1, 1, n});
  const ValueId scale = b.leaf(LeafRole::parameter, "s", DType::f32, {false, 1, 1, n});
  const ValueId running = b.leaf(LeafRole::buffer, "rm", DType::f32, {false, 1, 1, n});
  const ValueId y = b.pointwise(PointwiseOp::add_, {b.matmul(x, w, true), bias});
  const ValueId z = b.pointwise(PointwiseOp::mul_, {y, scale});
  const AxisMask axes = axis_bit(kBatch);
  const ValueId mean = b.reduce(Finish::mean, z, axes);
  const ValueId variance = b.reduce(Finish::variance, z, axes);
  const ValueId unbiased = b.reduce(Finish::variance_unbiased, z, axes);
  const ValueId shifted = b.pointwise(PointwiseOp::add_, {variance, b.constant(1e-5)});
  const ValueId inverse = b.pointwise(PointwiseOp::rsqrt_, {shifted});
  const ValueId centred = b.pointwise(PointwiseOp::sub_, {z, mean});
  b.result(b.pointwise(PointwiseOp::mul_, {centred, inverse}), "y");
  const ValueId part = b.pointwise(PointwiseOp::mul_, {unbiased, b.constant(0.1)});
  const ValueId kept = b.pointwise(PointwiseOp::mul_, {running, b.constant(0.9)});
  b.update(b.pointwise(PointwiseOp::add_, {kept, part}), running);
  Graph graph = b.take();
  graph.name = "gemm_scale_bn";
  return graph;
}

TEST(CpuExecutable, GemmScaleBatchNorm) {
  for (const auto& [batch, k, n] :
       {std::array<int64_t, 3>{7, 33, 17}, {600, 64, 1100}, {2, 1, 1}}) {
    const Graph graph = gemm_scale_bn(k, n);
    compare(graph, batch, random_leaves(graph, batch, 1), 5e-5);
  }
}

TEST(CpuExecutable, SoftmaxOverFeatures) {
  for (const int64_t n : {1, 5, 64, 1000, 20000}) {
    GraphBuilder b;
    const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, n});
    const AxisMask axes = axis_bit(kFeatures);
    const ValueId top = b.reduce(Finish::max_exponent, x, axes);
    const ValueId sum = b.reduce(Finish::sum_exp, x, axes);
    const ValueId e = b.pointwise(PointwiseOp::exp_, {b.pointwise(PointwiseOp::sub_, {x, top})});
    b.result(b.pointwise(PointwiseOp::div_, {e, sum}), "y");
    b.result(b.reduce(Finish::log_sum_exp, x, axes), "lse");
    const Graph graph = b.take();
    compare(graph, 9, random_leaves(graph, 9, 2));
  }
}

TEST(CpuExecutable, EveryOperator) {
#define INGOT_NAME(name, arity, ...) PointwiseOp::name##_,
  for (const PointwiseOp op : {INGOT_POINTWISE_OPERATORS(INGOT_NAME)}) {
#undef INGOT_NAME
    for (const int64_t n : {3, 700}) {
      GraphBuilder b;
      std::vector<ValueId> args;
      const bool three = arity_of(op) == 3;
      const Shape shapes[] = {{true, 1, 1, n}, {false, 1, 1, n}, {true, 1, 1, 1}};
      for (int i = 0; i < arity_of(op); ++i) {
        args.push_back(b.leaf(LeafRole::input, "x", DType::f32, shapes[i]));
      }
      if (three) args[0] = b.pointwise(PointwiseOp::gt_, {args[0], b.constant(0)});
      ValueId out = b.pointwise(op, args);
      if (b.graph()[out].dtype != DType::f32) out = b.cast(out, DType::f32);
      b.result(out, "y");
      Graph graph = b.take();
      graph.name = std::string(name_of(op));
      auto leaves = random_leaves(graph, 21, 3);
      const float special[] = {0.0f,
                               -0.0f,
                               1.0f,
                               -1.0f,
                               1e-40f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               90.0f,
                               -110.0f,
                               2.5f};
      for (size_t i = 0; i < std::size(special) && i < leaves[0].values.size(); ++i) {
        leaves[0].values[i] = special[i];
      }
      compare(graph, 21, leaves);
    }
  }
}

// Random chains of smooth operators, norms and reductions over random factorings.
Graph random_graph(std::mt19937& random) {
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  GraphBuilder b;
  const int64_t extents[] = {1, 1, 2, 3, 5, 16, 40};
  Shape full{true, extents[pick(5)], extents[pick(5)], extents[pick(7)] * extents[pick(4)]};
  std::vector<ValueId> values{b.leaf(LeafRole::input, "x", DType::f32, full)};
  const auto operand = [&] {
    Shape s = full;
    if (pick(2) != 0) s.batched = false;
    if (pick(2) != 0) s.rows = 1;
    if (pick(3) == 0) s.groups = 1;
    if (pick(3) == 0) s.features = 1;
    if (pick(4) == 0) return b.constant(0.5 + pick(3));
    return b.leaf(LeafRole::parameter, "p", DType::f32, s);
  };
  const int steps = 3 + pick(8);
  for (int i = 0; i < steps; ++i) {
    const ValueId x = values[static_cast<size_t>(pick(static_cast<int>(values.size())))];
    const auto unary = [&](PointwiseOp op) { return b.pointwise(op, {x}); };
    ValueId y = x;
    switch (pick(8)) {
      case 0:
        y = b.pointwise(PointwiseOp::add_, {x, operand()});
        break;
      case 1:
        y = b.pointwise(PointwiseOp::mul_, {x, operand()});
        break;
      case 2:
        y = unary(PointwiseOp::tanh_);
        break;
      case 3:
        y = unary(PointwiseOp::sigmoid_);
        break;
      case 4:
        y = b.pointwise(PointwiseOp::maximum_, {operand(), x});
        break;
      case 5: {
        const AxisMask axes = static_cast<AxisMask>(1 + pick(15));
        const Finish finishes[] = {Finish::mean, Finish::max, Finish::variance, Finish::sum_exp};
        const ValueId r = b.reduce(finishes[pick(4)], x, axes);
        y = b.pointwise(PointwiseOp::sub_,
                        {unary(PointwiseOp::sigmoid_), b.pointwise(PointwiseOp::tanh_, {r})});
        break;
      }
      case 6:
        y = b.pointwise(PointwiseOp::add_, {x, values[0]});
        break;
      default:
        y = unary(PointwiseOp::erf_);
        break;
    }
    if (b.graph()[y].shape == full) values.push_back(y);
  }
  b.result(values.back(), "y");
  if (pick(2) != 0) b.result(b.reduce(Finish::mean, values.back(), axis_bit(kFeatures)), "m");
  Graph graph = b.take();
  return graph;
}

TEST(CpuExecutable, RandomGraphs) {
  int ran = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    Graph graph = random_graph(random);
    graph.name = "random graph " + std::to_string(seed);
    const int64_t batches[] = {1, 2, 13, 300};
    const int64_t batch = batches[random() % 4];
    try {
      compare(graph, batch, random_leaves(graph, batch, seed), 1e-5);
      ++ran;
    } catch (const std::exception& error) {
      // What no sweep can do is refused by the plan, by name.
      EXPECT_NE(std::string(error.what()).find("unsupported"), std::string::npos) << error.what();
    }
    if (HasFatalFailure()) {
      ADD_FAILURE() << to_string(graph) << "\nbatch " << batch;
      return;
    }
  }
  EXPECT_GT(ran, 200);
}

TEST(CpuExecutable, BitsDoNotDependOnThreads) {
  const Graph graph = gemm_scale_bn(100, 700);
  const auto leaves = random_leaves(graph, 1500, 5);
  set_host_threads(nullptr, 1);
  const Outcome one = run_on_cpu(graph, 1500, leaves);
  for (const int threads : {0, 2, 3}) {
    set_host_threads(nullptr, threads);
    const Outcome many = run_on_cpu(graph, 1500, leaves);
    EXPECT_EQ(one.results[0].values, many.results[0].values) << threads;
    for (size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_EQ(one.buffers[i].values, many.buffers[i].values) << threads;
    }
  }
  set_host_threads(nullptr, 0);
}

TEST(CpuExecutable, LargeMeanTinyVariance) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 300});
  b.result(b.reduce(Finish::variance, x, axis_bit(kBatch)), "v");
  b.result(b.reduce(Finish::variance, x, axis_bit(kFeatures)), "r");
  const Graph graph = b.take();
  auto leaves = random_leaves(graph, 5000, 6, 1000.0f, 1000.01f);
  compare(graph, 5000, leaves, 1e-6);
}

TEST(CpuExecutable, EmptyBatch) {
  const Graph graph = gemm_scale_bn(8, 8);
  const Outcome out = run_on_cpu(graph, 0, random_leaves(graph, 0, 7));
  EXPECT_TRUE(out.results[0].values.empty());
}

// A tensor of any dtype and strides, with room before its first element.
struct Buffer {
  std::vector<std::byte> bytes;
  ingot_tensor view{};
};

Buffer make_buffer(const Shape& shape, int64_t batch, ingot_dtype dtype,
                   const std::array<int, kAxes>& order, int64_t step, size_t offset,
                   std::mt19937& random) {
  Buffer b;
  int64_t stride = step;
  for (size_t i = kAxes; i-- > 0;) {
    const int axis = order[i];
    b.view.sizes[axis] = shape.extent(static_cast<Axis>(axis), batch);
    b.view.strides[axis] = stride;
    stride *= b.view.sizes[axis];
  }
  b.bytes.resize(static_cast<size_t>(stride * element_size(dtype)) + offset);
  b.view.data = b.bytes.data() + offset;
  b.view.dtype = dtype;
  b.view.device = -1;
  std::uniform_real_distribution<double> uniform(-2, 2);
  for (int64_t i = 0; i < stride; ++i) {
    store_element(b.view.data, dtype, i, dtype == INGOT_I64 ? 3 : uniform(random));
  }
  return b;
}

// Runs leaves as they lie on the CPU and in fp64; results and buffers must agree.
void compare_buffers(const Graph& graph, int64_t batch, std::vector<Buffer> leaves,
                     int64_t result_step, double tolerance) {
  std::vector<Buffer> copies = leaves;
  std::mt19937 random(1);
  ProgramOptions options;
  auto executable =
      make_cpu_executable(make_plan(graph, cpu_target(options), Precision::fp32), options);
  std::vector<ingot_tensor> on_cpu, in_fp64;
  const auto bind = [](Buffer& buffer, size_t offset) {
    buffer.view.data = buffer.bytes.data() + offset;
    return buffer.view;
  };
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto offset =
        static_cast<size_t>(static_cast<std::byte*>(leaves[i].view.data) - leaves[i].bytes.data());
    on_cpu.push_back(bind(leaves[i], offset));
    in_fp64.push_back(bind(copies[i], offset));
  }
  std::vector<Buffer> results;
  std::vector<DoubleTensor> truths;
  for (const Result& result : graph.results) {
    const Node& node = graph[result.value];
    results.push_back(make_buffer(node.shape, batch, static_cast<ingot_dtype>(node.dtype),
                                  {0, 1, 2, 3}, result_step, 0, random));
    truths.push_back(make_double(node.shape, batch));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    on_cpu.push_back(bind(results[i], 0));
    truths[i].view.data = truths[i].values.data();
    in_fp64.push_back(truths[i].view);
  }
  const size_t bytes = executable->prepare_call(batch, on_cpu);
  std::vector<std::byte> workspace(bytes + 256);
  void* base = workspace.data();
  size_t space = workspace.size();
  std::align(256, bytes, base, space);
  executable->run(batch, on_cpu, base, bytes, nullptr);
  evaluate(graph, batch, in_fp64);
  for (size_t r = 0; r < results.size(); ++r) {
    for (size_t i = 0; i < truths[r].values.size(); ++i) {
      const double found = load_element(results[r].view.data, results[r].view.dtype,
                                        static_cast<int64_t>(i) * result_step);
      const double truth = truths[r].values[i];
      if (std::isnan(truth)) {
        ASSERT_TRUE(std::isnan(found)) << graph.name << " result " << r << " at " << i;
      } else if (std::isinf(truth)) {
        ASSERT_EQ(found, truth) << graph.name << " result " << r << " at " << i;
      } else {
        ASSERT_NEAR(found, truth, tolerance) << graph.name << " result " << r << " at " << i;
      }
    }
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_EQ(leaves[i].view.dtype, copies[i].view.dtype);
    const auto elements =
        static_cast<int64_t>(leaves[i].bytes.size()) / element_size(leaves[i].view.dtype);
    for (int64_t e = 0; e + 1 < elements; ++e) {
      ASSERT_NEAR(load_element(leaves[i].view.data, leaves[i].view.dtype, e),
                  load_element(copies[i].view.data, copies[i].view.dtype, e), tolerance)
          << graph.name << " leaf " << i << " at " << e;
    }
  }
}

Graph from_json(const nlohmann::json& values, const std::string& name) {
  const nlohmann::json json{{"ingot_graph", 1},
                            {"name", name},
                            {"values", values},
                            {"results", {{{"value", values.size() - 1}, {"name", "y"}}}},
                            {"updates", nlohmann::json::array()}};
  return import_graph(json.dump());
}

nlohmann::json leaf(const char* op, const char* dtype, const nlohmann::json& shape) {
  static int count = 0;
  return {{"op", op}, {"name", "v" + std::to_string(count++)}, {"dtype", dtype}, {"shape", shape}};
}

void compare_layouts(const Graph& graph, int64_t batch, double tolerance) {
  const std::array<int, kAxes> orders[] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 0, 3, 2}};
  std::mt19937 random(9);
  for (const auto& order : orders) {
    for (const int64_t step : {1, 2}) {
      for (const size_t offset : {size_t{0}, size_t{1}}) {
        std::vector<Buffer> leaves;
        for (const ValueId id : graph.leaves()) {
          leaves.push_back(make_buffer(graph[id].shape, batch,
                                       static_cast<ingot_dtype>(graph[id].dtype), order, step,
                                       graph[id].role == LeafRole::buffer ? 0 : offset, random));
        }
        compare_buffers(graph, batch, std::move(leaves), step, tolerance);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(CpuExecutable, AnyStridesAlignmentAndDtype) {
  for (const auto& [dtype, tolerance] :
       {std::pair{"f32", 2e-4}, {"f64", 1e-10}, {"f16", 6e-2}, {"bf16", 4e-1}}) {
    const Graph graph = from_json(
        {leaf("input", dtype, {"B", 1, 1, 30}),
         leaf("parameter", dtype, {1, 24, 1, 30}),
         leaf("parameter", dtype, {1, 1, 1, 24}),
         {{"op", "linear"}, {"args", {0, 1, 2}}, {"attributes", nlohmann::json::object()}},
         {{"op", "tanh"}, {"args", {3}}},
         {{"op", "softmax"}, {"args", {4}}, {"attributes", nlohmann::json::object()}}},
        dtype);
    compare_layouts(graph, 19, tolerance);
    if (HasFatalFailure()) return;
  }
}

TEST(CpuExecutable, CountersAndCumulativeAverage) {
  const nlohmann::json f{1, 1, 1, 20};
  const Graph graph = from_json({leaf("input", "f32", {"B", 1, 1, 20}),
                                 leaf("buffer", "f32", f),
                                 leaf("buffer", "f32", f),
                                 leaf("buffer", "i64", {1, 1, 1, 1}),
                                 {{"op", "batch_norm"},
                                  {"args", {0, -1, -1, 1, 2, 3}},
                                  {"attributes", {{"training", true}, {"eps", 1e-5}}}}},
                                "cumulative");
  compare_layouts(graph, 70, 1e-4);
}

TEST(CpuExecutable, NormsAndPoolsOverGroups) {
  const nlohmann::json empty = nlohmann::json::object();
  const auto one = [&](const char* op, const nlohmann::json& attributes) {
    const Graph graph = from_json({leaf("input", "f32", {"B", 6, 1, 24}),
                                   {{"op", op}, {"args", {0}}, {"attributes", attributes}}},
                                  op);
    compare_layouts(graph, 11, 1e-4);
  };
  one("layer_norm", {{"eps", 1e-5}});
  one("rms_norm", {{"eps", 1e-5}});
  one("instance_norm", {{"eps", 1e-5}});
  one("group_norm", {{"groups", 3}, {"eps", 1e-5}, {"channels", "rows"}});
  one("max_pool", {{"kernel", 4}});
  one("avg_pool", {{"kernel", 3}});
  one("log_softmax", empty);
  one("softmax", {{"axes", {"rows"}}});
  one("argmax", {{"axes", {"features"}}});
  one("argmax", {{"axes", {"rows"}}});
  one("argmax", {{"axes", {"batch"}}});
  one("logsumexp", {{"axes", {"batch"}}});
}

TEST(CpuExecutable, MatricesOfEveryLayout) {
  for (const bool transpose : {true, false}) {
    for (const char* batched : {"B", ""}) {
      const nlohmann::json first = *batched != 0 ? nlohmann::json("B") : nlohmann::json(1);
      const nlohmann::json b =
          transpose ? nlohmann::json{first, 13, 1, 9} : nlohmann::json{first, 9, 1, 13};
      const Graph graph = from_json(
          {leaf("input", "f32", {"B", 5, 1, 9}),
           leaf("input", "f32", b),
           {{"op", "matmul"}, {"args", {0, 1}}, {"attributes", {{"transpose_b", transpose}}}}},
          "matmul");
      compare_layouts(graph, 4, 1e-5);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CpuExecutable, NaNAndInfinityGoWhereTheyShould) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 90});
  for (const AxisMask axes : {axis_bit(kBatch), axis_bit(kFeatures)}) {
    for (const Finish finish :
         {Finish::sum, Finish::max, Finish::min, Finish::mean, Finish::variance,
          Finish::log_sum_exp, Finish::sum_exp, Finish::max_exponent}) {
      b.result(b.reduce(finish, x, axes), "r");
    }
    b.result(b.cast(b.reduce(Finish::argmax, x, axes), DType::f32), "a");
  }
  const Graph graph = b.take();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  auto leaves = random_leaves(graph, 400, 8);
  auto& values = leaves[0].values;
  values[5 * 90 + 7] = kInfinity;
  values[7 * 90 + 9] = -kInfinity;
  values[9 * 90 + 9] = kInfinity;
  values[399 * 90 + 60] = std::numeric_limits<float>::quiet_NaN();
  for (int j = 0; j < 90; ++j) values[static_cast<size_t>(20 * 90 + j)] = -kInfinity;
  compare(graph, 400, leaves, 1e-5);
}

}  // namespace
}  // namespace ingot
