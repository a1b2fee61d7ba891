// What calls do on the host, as data, and that doing it is right where a provider changes its mind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "backend/executable.h"
#include "cpu/lowering.h"
#include "cpu/product/own.h"
#include "graph/builder.h"

namespace ingot::cpu {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

const json kMasks{{"avx2", false}};  // where no provider goes before the host's
constexpr AxisMask kOverBatch = axis_bit(kBatch);

struct Layer {
  GraphBuilder b;
  ValueId y;
};

Layer linear(int64_t k, int64_t n, bool bias = true) {
  Layer l;
  const ValueId x = l.b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, k});
  const ValueId w = l.b.leaf(LeafRole::parameter, "w", DType::f32, {false, n, 1, k});
  l.y = l.b.matmul(x, w, true);
  if (!bias) return l;
  const ValueId row = l.b.leaf(LeafRole::parameter, "b", DType::f32, {false, 1, 1, n});
  l.y = l.b.pointwise(PointwiseOp::add_, {l.y, row});
  return l;
}

Graph with_result(Layer layer, PointwiseOp op) {
  layer.b.result(layer.b.pointwise(op, {layer.y}), "z");
  return layer.b.take();
}

// gemm, scale, batch norm with a running mean.
Graph gemm_scale_bn(int64_t k, int64_t n) {
  Layer l = linear(k, n);
  GraphBuilder& b = l.b;
  const ValueId scale = b.leaf(LeafRole::parameter, "s", DType::f32, {false, 1, 1, n});
  const ValueId running = b.leaf(LeafRole::buffer, "rm", DType::f32, {false, 1, 1, n});
  const ValueId z = b.pointwise(PointwiseOp::mul_, {l.y, scale});
  const ValueId mean = b.reduce(Finish::mean, z, kOverBatch);
  const ValueId variance = b.reduce(Finish::variance, z, kOverBatch);
  const ValueId inverse = b.pointwise(PointwiseOp::rsqrt_, {variance});
  b.result(b.pointwise(PointwiseOp::mul_, {b.pointwise(PointwiseOp::sub_, {z, mean}), inverse}),
           "y");
  b.update(b.pointwise(PointwiseOp::add_, {running, mean}), running);
  return b.take();
}

Plan plan_of(const Graph& graph) {
  ProgramOptions options;
  options.capabilities = kMasks;
  return make_plan(graph, cpu_target(options), Precision::fp32);
}

json program_of(const Graph& graph, int64_t batch) {
  ProgramOptions options;
  options.capabilities = kMasks;
  return make_cpu_executable(plan_of(graph), options)->describe(batch)["program"];
}

std::vector<std::string> kinds(const HostProgram& program) {
  std::vector<std::string> names;
  for (const HostStep& step : program.steps) names.emplace_back(name_of(step.kind()));
  return names;
}

std::vector<std::string> kinds(const json& program) {
  std::vector<std::string> names;
  for (const json& step : program["steps"]) names.push_back(step["kind"]);
  return names;
}

// Tensors of a call with memory behind them: dense ones, unless changed before bind().
struct Call {
  Call(const HostPlan& host, int64_t rows)
      : batch(rows), tensors(dense_tensors(host.plan.graph, rows)) {}

  ingot_tensor& operator[](size_t i) { return tensors[i]; }

  // Elements that repeat from call to call, whatever their layout.
  void bind() {
    std::uniform_real_distribution<float> uniform(-1.0f, 2.0f);
    for (ingot_tensor& t : tensors) {
      std::mt19937 random(static_cast<unsigned>(memory.size()));
      int64_t reach = 1;
      for (int a = 0; a < kAxes; ++a) reach += (t.sizes[a] - 1) * t.strides[a];
      std::vector<float>& own = memory.emplace_back(static_cast<size_t>(reach), -7.0f);
      t.data = own.data();
      each(t, [&](float& element) { element = uniform(random); });
    }
  }

  std::vector<float> elements(size_t i) {
    std::vector<float> found;
    each(tensors[i], [&](float& element) { found.push_back(element); });
    return found;
  }

  void run(const HostProgram& program, std::byte* frozen = nullptr) {
    std::vector<std::byte> workspace(program.workspace_bytes + 512, std::byte{0xff});
    void* base = workspace.data();
    size_t space = workspace.size();
    std::align(256, program.workspace_bytes, base, space);
    auto* const begin = static_cast<std::byte*>(base);
    cpu::run(program, {tensors, begin, frozen});
    const std::byte* const end = begin + program.workspace_bytes;
    for (int i = 0; i < 64; ++i) ASSERT_EQ(end[i], std::byte{0xff}) << "written behind it";
  }

  int64_t batch;
  std::vector<ingot_tensor> tensors;
  std::deque<std::vector<float>> memory;

 private:
  template <class Act>
  static void each(const ingot_tensor& t, Act&& act) {
    auto* const data = static_cast<float*>(t.data);
    for (int64_t b = 0; b < t.sizes[0]; ++b) {
      for (int64_t r = 0; r < t.sizes[1]; ++r) {
        for (int64_t g = 0; g < t.sizes[2]; ++g) {
          for (int64_t f = 0; f < t.sizes[3]; ++f) {
            act(data[b * t.strides[0] + r * t.strides[1] + g * t.strides[2] + f * t.strides[3]]);
          }
        }
      }
    }
  }
};

std::vector<float> result_of(const HostPlan& host, Call call) {
  call.bind();
  call.run(lower(host, call.batch, call.tensors, {}));
  return call.elements(call.tensors.size() - 1);
}

TEST(HostProgram, OfGemmScaleBatchNorm) {
  const json program = program_of(gemm_scale_bn(300, 1024), 400);
  ASSERT_THAT(kinds(program), ElementsAre("product", "merge", "sweep", "sweep", "copy"));
  const json& steps = program["steps"];
  EXPECT_EQ(steps[0]["m"], 400);
  EXPECT_EQ(steps[0]["n"], 1024);
  EXPECT_EQ(steps[0]["k"], 300);
  EXPECT_EQ(steps[0]["with"], steps[1]["sweep"]);
  EXPECT_EQ(steps[0]["how"], "on its blocks");
  EXPECT_EQ(steps[1]["chunks"], 2) << "of 256 rows";
  EXPECT_EQ(steps[2]["part"], "tail");
  EXPECT_EQ(steps[3]["part"], "body");
  EXPECT_EQ(steps[4]["why"], "update of 'rm'");
  const std::vector<std::string> read = steps[0]["memory"], copied = steps[4]["memory"];
  for (const char* name : {"x", "w", "b", "s", "partial states"}) EXPECT_THAT(read, Contains(name));
  EXPECT_THAT(copied, ElementsAre("rm to come", "rm"));
}

TEST(HostProgram, AProductAloneThenABodyWhereItsLibraryHandsOutNoBlocks) {
  const auto refuse = [](int64_t, int64_t, int64_t, const void*, int64_t, const void*, int64_t, int,
                         void*, int64_t, const void*, int32_t, void*) { return 1; };
  const Graph graph = with_result(linear(300, 1024), PointwiseOp::erf_);
  ProgramOptions options;
  options.capabilities = kMasks;
  const auto executable = make_cpu_executable(plan_of(graph), options);
  EXPECT_THAT(kinds(executable->describe(400)["program"]), ElementsAre("product"));
  set_host_product("mine", refuse, nullptr);
  const json program = executable->describe(400)["program"];
  set_host_product("", nullptr, nullptr);
  EXPECT_THAT(kinds(program), ElementsAre("product", "sweep"));
  EXPECT_EQ(program["steps"][0]["kernel"], "mine");
  EXPECT_THAT(kinds(executable->describe(400)["program"]), ElementsAre("product"))
      << "none of a product that is gone";
}

TEST(HostProgram, CopiesOperandsThatDoNotLieAsAProductReadsThem) {
  const HostPlan host(plan_of(with_result(linear(24, 40, false), PointwiseOp::tanh_)),
                      detect_isa(kMasks));
  Call dense(host, 6), every_second(host, 6), turned(host, 6);
  const std::vector<float> expected = result_of(host, dense);
  const HostProgram plain = lower(host, 6, dense.tensors, {});
  EXPECT_THAT(kinds(plain), Not(Contains("copy")));

  every_second[0].strides[3] = 2, every_second[0].strides[0] = 48;
  const HostProgram copying = lower(host, 6, every_second.tensors, {});
  EXPECT_THAT(kinds(copying), ElementsAre("copy", "product", "sweep"));
  const auto& copy = std::get<CopyStep>(copying.steps[0].what);
  const auto& product = std::get<ProductStep>(copying.steps[1].what);
  EXPECT_EQ(copy.to.address, product.a);
  EXPECT_EQ(product.a.base, Address::Base::workspace);
  EXPECT_EQ(product.call.lda, 24);
  EXPECT_EQ(copying.workspace_bytes, plain.workspace_bytes + 768) << "6 × 24 floats, by 256 bytes";
  EXPECT_EQ(copying.steps[0].why, "it does not lie as the product reads it");
  EXPECT_EQ(result_of(host, every_second), expected);

  // A weight that lies turned is read where it is.
  turned[1].strides[1] = 1, turned[1].strides[3] = 40;
  const HostProgram reading = lower(host, 6, turned.tensors, {});
  EXPECT_THAT(kinds(reading), Not(Contains("copy")));
  EXPECT_FALSE(std::get<ProductStep>(reading.steps[0].what).call.transpose_b);
  EXPECT_EQ(reading.workspace_bytes, plain.workspace_bytes);
}

TEST(HostProgram, CopiesAProductToWhereItCannotBeWritten) {
  Layer layer = linear(24, 40, false);
  layer.b.result(layer.y, "z");
  const HostPlan host(plan_of(layer.b.take()), detect_isa(kMasks));
  Call dense(host, 6), turned(host, 6);
  turned[2].strides[0] = 1, turned[2].strides[3] = 6;
  const HostProgram program = lower(host, 6, turned.tensors, {});
  EXPECT_THAT(kinds(program), ElementsAre("product", "copy"));
  EXPECT_EQ(result_of(host, turned), result_of(host, dense));
}

TEST(HostProgram, HashesAllThatIsDone) {
  const auto hash = [](PointwiseOp op, int64_t k, int64_t batch) {
    return program_of(with_result(linear(k, 40), op), batch)["hash"].get<std::string>();
  };
  const std::string first = hash(PointwiseOp::tanh_, 24, 6);
  EXPECT_EQ(first.size(), 16u);
  EXPECT_EQ(hash(PointwiseOp::tanh_, 24, 6), first);
  EXPECT_NE(hash(PointwiseOp::erf_, 24, 6), first);
  EXPECT_NE(hash(PointwiseOp::tanh_, 25, 6), first);
  EXPECT_NE(hash(PointwiseOp::tanh_, 24, 7), first);
}

// Names of what lies in the workspace at one place, one after the other.
TEST(HostProgram, NamesMemoryByWhatIsThereThen) {
  GraphBuilder b;
  const ValueId x = b.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 70});
  const ValueId first = b.reduce(Finish::mean, x, kOverBatch);
  const ValueId centred = b.pointwise(PointwiseOp::sub_, {x, first});
  const ValueId top = b.reduce(Finish::max, b.pointwise(PointwiseOp::abs_, {centred}), kOverBatch);
  b.result(b.pointwise(PointwiseOp::div_, {centred, top}), "y");
  const json program = program_of(b.take(), 300);
  std::vector<json> merges;
  for (const json& step : program["steps"]) {
    if (step["kind"] == "merge") merges.push_back(step["memory"]);
  }
  ASSERT_EQ(merges.size(), 2u);
  EXPECT_NE(merges[0].back(), merges[1].back()) << "two statistics";
}

TEST(HostProgram, PacksFrozenWeightsInAProgramOfItsOwn) {
  const HostPlan host(plan_of(with_result(linear(64, 256), PointwiseOp::tanh_)),
                      detect_isa(kMasks));
  const std::vector<size_t> frozen = frozen_bytes(host);
  Call call(host, 80);
  call.bind();
  const HostProgram packing = lower_packing(host, 80, call.tensors, frozen);
  ASSERT_THAT(kinds(packing), ElementsAre("pack"));
  std::vector<std::byte> memory(frozen[0] + 256);
  void* kept = memory.data();
  size_t space = memory.size();
  std::align(256, frozen[0], kept, space);
  call.run(packing, static_cast<std::byte*>(kept));
  const HostProgram program = lower(host, 80, call.tensors, frozen);
  const auto& product = std::get<ProductStep>(program.steps[0].what);
  EXPECT_EQ(product.packed_b.base, Address::Base::frozen);
  call.run(program, static_cast<std::byte*>(kept));
  const size_t result = call.tensors.size() - 1;
  const std::vector<float> found = call.elements(result);
  call.run(lower(host, 80, call.tensors, {}));
  EXPECT_EQ(found, call.elements(result));
}

// Says that it does what is behind a product, and then finds that it cannot.
class Reluctant final : public ProductProvider {
 public:
  explicit Reluctant(std::shared_ptr<const ProductProvider> able) : able_(std::move(able)) {}
  std::string name() const override { return "reluctant"; }
  bool takes(const ProductCall&) const override { return true; }
  bool run(const ProductCall& call) const override {
    return call.consumer == nullptr && call.row == nullptr && able_->run(call);
  }

 private:
  std::shared_ptr<const ProductProvider> able_;
};

TEST(HostProgram, DoesWhatIsBehindAProductItselfWhereItsProviderCannot) {
  const Isa isa = detect_isa(kMasks);
  Layer alone = linear(300, 1024);
  alone.b.result(alone.y, "y");
  const Graph row = alone.b.take();
  const Graph blocks = with_result(linear(300, 1024), PointwiseOp::erf_);
  for (const Graph& graph : {row, blocks, gemm_scale_bn(300, 1024)}) {
    const HostPlan host(plan_of(graph), isa);
    Call able(host, 400), reluctant(host, 400);
    able.bind(), reluctant.bind();
    HostProgram program = lower(host, 400, able.tensors, {});
    auto& product = std::get<ProductStep>(program.steps[0].what);
    ASSERT_TRUE(product.behind);
    able.run(program);
    product.providers = {std::make_shared<Reluctant>(own_product(isa, true))};
    reluctant.run(program);
    for (size_t i = 0; i < able.tensors.size(); ++i) {
      EXPECT_EQ(able.elements(i), reluctant.elements(i)) << "tensor " << i;
    }
  }
}

}  // namespace
}  // namespace ingot::cpu
