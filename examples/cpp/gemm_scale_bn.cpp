// batch_norm(linear(x) * scale) in training mode: built, compiled, run and checked with no Python
// in the process.
//
//   gemm_scale_bn [batch] [in] [out]        (default 512 1024 1024)
//
// The truth is the library's fp64 evaluator on the same data. Exit status 0 only if the result and
// the running statistics agree with it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <ingot/ingot.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

struct Sizes {
  int64_t batch = 512, in = 1024, out = 1024;
};

// The model: leaves in the order of torch.nn.Module's state_dict.
void build(ingot::Graph& graph, const Sizes& sizes) {
  const ingot::Shape by_feature = ingot::Shape::vector(sizes.out);
  const auto x = graph.input("x", ingot::Shape::batch(sizes.in));
  const auto weight = graph.parameter("gemm.weight", ingot::Shape::matrix(sizes.out, sizes.in));
  const auto bias = graph.parameter("gemm.bias", by_feature);
  const auto scale = graph.parameter("scale", by_feature);
  ingot::BatchNorm bn;
  bn.weight = graph.parameter("bn.weight", by_feature);
  bn.bias = graph.parameter("bn.bias", by_feature);
  bn.running_mean = graph.buffer("bn.running_mean", by_feature);
  bn.running_var = graph.buffer("bn.running_var", by_feature);
  bn.num_batches_tracked =
      graph.buffer("bn.num_batches_tracked", ingot::Shape::scalar(), ingot::DataType::i64);
  bn.training = true;
  graph.set_origin("gemm");
  const auto product = linear(x, weight, bias);
  graph.set_origin("bn");
  graph.result(batch_norm(product * scale, bn), "y");
}

std::vector<float> uniform(int64_t count, float low, float high, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

// The data of one model; T: of the result and the buffers, which the truth keeps in double.
template <class T>
struct State {
  std::vector<float> x, weight, bias, scale, bn_weight, bn_bias;
  std::vector<T> running_mean, running_var, y;
  std::vector<int64_t> batches_tracked = {0};

  explicit State(const Sizes& s)
      : x(uniform(s.batch * s.in, 0, 1, 1)),
        weight(uniform(s.out * s.in, -bound(s), bound(s), 2)),
        bias(uniform(s.out, -bound(s), bound(s), 3)),
        scale(uniform(s.out, -2, 2, 4)),
        bn_weight(uniform(s.out, 0.5f, 1.5f, 5)),
        bn_bias(uniform(s.out, -1, 1, 6)),
        running_mean(static_cast<size_t>(s.out), T(0)),
        running_var(static_cast<size_t>(s.out), T(1)),
        y(static_cast<size_t>(s.batch * s.out), T(NAN)) {}

  // torch.nn.Linear's initialisation.
  static float bound(const Sizes& s) { return 1 / std::sqrt(static_cast<float>(s.in)); }

  ingot::Bindings bindings(const Sizes& s) {
    const ingot::Shape by_feature = ingot::Shape::vector(s.out);
    return {{"x", ingot::host(x, ingot::Shape::batch(s.in), s.batch)},
            {"gemm.weight", ingot::host(weight, ingot::Shape::matrix(s.out, s.in))},
            {"gemm.bias", ingot::host(bias, by_feature)},
            {"scale", ingot::host(scale, by_feature)},
            {"bn.weight", ingot::host(bn_weight, by_feature)},
            {"bn.bias", ingot::host(bn_bias, by_feature)},
            {"bn.running_mean", ingot::host(running_mean, by_feature)},
            {"bn.running_var", ingot::host(running_var, by_feature)},
            {"bn.num_batches_tracked", ingot::host(batches_tracked, ingot::Shape::scalar())},
            {"y", ingot::host(y, ingot::Shape::batch(s.out), s.batch)}};
  }
};

double median_milliseconds(ingot::Program& program, const ingot::Bindings& bindings) {
  constexpr int kRuns = 9;
  std::vector<double> times;
  for (int i = 0; i < kRuns; ++i) {
    const auto start = std::chrono::steady_clock::now();
    program.run(bindings);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    times.push_back(elapsed.count());
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

// One line of the table; whether ‖result − truth‖ / ‖truth‖ is within the bound. NaN is not.
bool report(const char* what, const std::vector<double>& truth, const std::vector<float>& result,
            double bound) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    error += std::pow(result[i] - truth[i], 2);
    norm += std::pow(truth[i], 2);
  }
  const double relative = std::sqrt(error / norm);
  const bool good = relative <= bound;
  std::printf("%-14s %14.2e   %s\n", what, relative, good ? "ok" : "TOO LARGE");
  return good;
}

int run(const Sizes& sizes) {
  ingot::Graph graph("gemm_scale_bn");
  build(graph, sizes);
  ingot::Program program = ingot::compile(graph, {.device = "cpu"});
  program.prepare(sizes.batch);

  State<float> state(sizes);
  State<double> truth(sizes);
  program.run(state.bindings(sizes));
  ingot::evaluate_fp64(graph, truth.bindings(sizes));

  std::printf("gemm_scale_bn %lld x %lld -> %lld, fp32, training, host (ingot %s)\n",
              static_cast<long long>(sizes.batch), static_cast<long long>(sizes.in),
              static_cast<long long>(sizes.out), ingot_version());
  std::printf("%-14s %14s\n", "against fp64", "relative error");
  bool good = report("y", truth.y, state.y, 1e-4);
  good &= report("running_mean", truth.running_mean, state.running_mean, 1e-5);
  good &= report("running_var", truth.running_var, state.running_var, 1e-5);
  good &= state.batches_tracked[0] == 1;

  const double ms = median_milliseconds(program, state.bindings(sizes));
  const double flops = 2.0 * static_cast<double>(sizes.batch * sizes.in * sizes.out);
  std::printf("%.3f ms a call (median of 9), %.1f GFLOP/s in the product\n", ms, flops / ms / 1e6);
  if (!good) std::fprintf(stderr, "the result disagrees with fp64\n");
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

int64_t positive(const char* text) {
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  if (*end != '\0' || value < 1 || value > 1 << 20) {
    throw std::invalid_argument(std::string("not a size: '") + text + "'");
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Sizes sizes;
    if (argc > 4) throw std::invalid_argument("usage: gemm_scale_bn [batch] [in] [out]");
    if (argc > 1) sizes.batch = positive(argv[1]);
    if (argc > 2) sizes.in = positive(argv[2]);
    if (argc > 3) sizes.out = positive(argv[3]);
    return run(sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gemm_scale_bn: %s\n", error.what());
    return 2;
  }
}
