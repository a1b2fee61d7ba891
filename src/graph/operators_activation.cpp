// Activations, with PyTorch's defaults, its formulas at infinities and NaN, and its side of each
// comparison (NaN fails every comparison, which decides where it goes).
#include <limits>
#include <numbers>

#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Expression clamped(Expression x, double low, double high) {
  if (low != -kInfinity) x = maximum(x, low);
  return high != kInfinity ? minimum(x, high) : x;
}

Expression clamp(Expression x, const OperatorArguments& args) {
  return clamped(x, args.number("min", -kInfinity), args.number("max", kInfinity));
}

Expression hardtanh(Expression x, const OperatorArguments& args) {
  return clamped(x, args.number("min", -1), args.number("max", 1));
}

Expression relu6(Expression x, const OperatorArguments&) {
  return clamped(x, 0, 6);
}

Expression gelu(Expression x, const OperatorArguments& args) {
  const std::string approximate = args.text("approximate", "none");
  if (approximate == "none") return x * 0.5 * (1.0 + erf(x * (1 / std::numbers::sqrt2)));
  if (approximate != "tanh") {
    fail(INGOT_INVALID_ARGUMENT, "attribute 'approximate' must be \"none\" or \"tanh\", not \"{}\"",
         approximate);
  }
  const double beta = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // √(2/π)
  // x/2·(1 + tanh u) = x / (1 + exp(−2u)): cheaper, and nothing cancels where tanh u is near −1.
  return x / (1.0 + exp(-2 * beta * (x + 0.044715 * (x * x * x))));
}

// x / (1 + exp(−x)): one rounding fewer than x·sigmoid(x).
Expression silu(Expression x, const OperatorArguments&) {
  return x / (1.0 + exp(-x));
}

// x·tanh(log(1 + e)) = x·n / (n + 2) with e = exp(x), n = e·(e + 2): one exponential and one
// division instead of three functions. Above 20 the quotient is 1 in double precision, too.
Expression mish(Expression x, const OperatorArguments&) {
  const Expression e = exp(minimum(x, 20.0));
  const Expression n = e * (e + 2.0);
  return x * (n / (n + 2.0));
}

Expression softplus(Expression x, const OperatorArguments& args) {
  const double beta = args.number("beta", 1);
  const Expression scaled = x * beta;
  return (scaled > args.number("threshold", 20)).select(x, log1p(exp(scaled)) / beta);
}

Expression elu_of(Expression x, double alpha, double scale, double input_scale) {
  return (x < 0.0).select(expm1(x * input_scale) * (alpha * scale), x * scale);
}

Expression elu(Expression x, const OperatorArguments& args) {
  return elu_of(x, args.number("alpha", 1), 1, 1);
}

// Klambauer et al. (2017); the constants as in PyTorch.
Expression selu(Expression x, const OperatorArguments&) {
  return elu_of(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1);
}

Expression celu(Expression x, const OperatorArguments& args) {
  const double alpha = args.number("alpha", 1);
  if (alpha == 0) fail(INGOT_INVALID_ARGUMENT, "attribute 'alpha' must not be 0");
  return elu_of(x, alpha, 1, 1 / alpha);
}

Expression leaky_relu(Expression x, const OperatorArguments& args) {
  return (x > 0.0).select(x, x * args.number("negative_slope", 0.01));
}

Expression prelu(Expression x, const OperatorArguments& args) {
  return (x > 0.0).select(x, x * args[1].widened());
}

Expression hardsigmoid(Expression x, const OperatorArguments&) {
  return clamped(x + 3.0, 0, 6) / 6.0;
}

Expression hardswish(Expression x, const OperatorArguments&) {
  return x * clamped(x + 3.0, 0, 6) / 6.0;
}

Expression hardshrink(Expression x, const OperatorArguments& args) {
  const double bound = args.number("lambda", 0.5);
  return (x >= -bound && x <= x.number(bound)).select(x.number(0), x);
}

// x·0 rather than 0 in the middle: NaN stays NaN.
Expression softshrink(Expression x, const OperatorArguments& args) {
  const double bound = args.number("lambda", 0.5);
  return (x > bound).select(x - bound, (x < -bound).select(x + bound, x * 0.0));
}

Expression softsign(Expression x, const OperatorArguments&) {
  return x / (1.0 + abs(x));
}

Expression tanhshrink(Expression x, const OperatorArguments&) {
  return x - tanh(x);
}

Expression logsigmoid(Expression x, const OperatorArguments&) {
  return minimum(x, 0.0) - log1p(exp(-abs(x)));
}

Expression threshold(Expression x, const OperatorArguments& args) {
  const std::optional<double> bound = args.number("threshold"), value = args.number("value");
  if (!bound || !value) {
    fail(INGOT_INVALID_ARGUMENT, "needs the attributes 'threshold' and 'value'");
  }
  return (x <= *bound).select(x.number(*value), x);
}

Expression exp2(Expression x, const OperatorArguments&) {
  return pow(2.0, x);
}
Expression log2(Expression x, const OperatorArguments&) {
  return log(x) / std::numbers::ln2;
}
Expression log10(Expression x, const OperatorArguments&) {
  return log(x) / std::numbers::ln10;
}
Expression tan(Expression x, const OperatorArguments&) {
  return sin(x) / cos(x);
}

// Integers stay integers in what only compares and copies; the rest is a function of real numbers.
template <Expression (*formula)(Expression, const OperatorArguments&)>
ValueId comparing(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return formula(args[0], args).id();
}

// Computed in f32 where x is f16 or bf16, and rounded once.
template <Expression (*formula)(Expression, const OperatorArguments&)>
ValueId computing(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const DType dtype = args[0].dtype();
  const Expression y = formula(args[0].widened(), args);
  return is_floating(dtype) ? y.cast(dtype).id() : y.id();
}

}  // namespace

const std::vector<Operator>& activation_operators() {
  static const std::vector<Operator> rows = {
      {"clamp", 1, 1, {"min", "max"}, comparing<clamp>},
      {"hardtanh", 1, 1, {"min", "max"}, comparing<hardtanh>},
      {"relu6", 1, 1, {}, comparing<relu6>},
      {"threshold", 1, 1, {"threshold", "value"}, comparing<threshold>},
      {"hardshrink", 1, 1, {"lambda"}, comparing<hardshrink>},
      {"gelu", 1, 1, {"approximate"}, computing<gelu>},
      {"silu", 1, 1, {}, computing<silu>},
      {"mish", 1, 1, {}, computing<mish>},
      {"softplus", 1, 1, {"beta", "threshold"}, computing<softplus>},
      {"elu", 1, 1, {"alpha"}, computing<elu>},
      {"selu", 1, 1, {}, computing<selu>},
      {"celu", 1, 1, {"alpha"}, computing<celu>},
      {"leaky_relu", 1, 1, {"negative_slope"}, computing<leaky_relu>},
      {"prelu", 2, 2, {}, computing<prelu>},
      {"hardsigmoid", 1, 1, {}, computing<hardsigmoid>},
      {"hardswish", 1, 1, {}, computing<hardswish>},
      {"softshrink", 1, 1, {"lambda"}, computing<softshrink>},
      {"softsign", 1, 1, {}, computing<softsign>},
      {"tanhshrink", 1, 1, {}, computing<tanhshrink>},
      {"logsigmoid", 1, 1, {}, computing<logsigmoid>},
      {"exp2", 1, 1, {}, computing<exp2>},
      {"log2", 1, 1, {}, computing<log2>},
      {"log10", 1, 1, {}, computing<log10>},
      {"tan", 1, 1, {}, computing<tan>},
  };
  return rows;
}

}  // namespace ingot
