// Softmax and its kin, and the plain reductions under PyTorch's names.
#include <cmath>

#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr AxisMask kFeatureAxis = axis_bit(kFeatures);

// exp(x − max) · (1 / Σ exp(x − max)): no exponential exceeds 1. The sum lies between 1 and the
// number of terms, so its reciprocal, one a row instead of a division an element, is always normal.
ValueId softmax(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = args.axes(kFeatureAxis);
  const Expression top = x.reduce(Finish::max_exponent, axes);
  const Expression share = reciprocal(x.reduce(Finish::sum_exp, axes));
  return (exp(x - top) * share).cast(args[0].dtype()).id();
}

// (x − max) − log Σ exp(x − max)
ValueId log_softmax(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = args.axes(kFeatureAxis);
  const Expression top = x.reduce(Finish::max_exponent, axes);
  return (x - top - log(x.reduce(Finish::sum_exp, axes))).cast(args[0].dtype()).id();
}

ValueId logsumexp(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  return x.reduce(Finish::log_sum_exp, args.axes(kFeatureAxis)).cast(args[0].dtype()).id();
}

ValueId sum(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const AxisMask axes = args.axes(kFeatureAxis);
  if (!is_floating(args[0].dtype())) return args[0].reduce(Finish::sum, axes).id();
  return args[0].widened().reduce(Finish::sum, axes).cast(args[0].dtype()).id();
}

ValueId max(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return args[0].reduce(Finish::max, args.axes(kFeatureAxis)).id();
}

ValueId min(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return args[0].reduce(Finish::min, args.axes(kFeatureAxis)).id();
}

ValueId argmax(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return args[0].reduce(Finish::argmax, args.axes(kFeatureAxis)).id();
}

// How many elements a reduction merges, where that does not depend on the batch size.
std::optional<double> static_count(const Shape& shape, AxisMask axes) {
  if ((axes & axis_bit(kBatch)) && shape.batched) return std::nullopt;
  return static_cast<double>(shape.only(axes).static_elements());
}

Expression require_floating(const OperatorArguments& args) {
  const Expression x = args[0];
  if (!is_floating(x.dtype())) {
    fail(INGOT_INVALID_ARGUMENT, "needs a floating dtype, got {}: cast first", name_of(x.dtype()));
  }
  return x;
}

// Σ x / n, as PyTorch has it; where n is the batch size, the mean of the moments.
ValueId mean(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = require_floating(args).widened();
  const AxisMask axes = args.axes(kFeatureAxis);
  const std::optional<double> count = static_count(x.shape(), axes);
  const Expression result =
      count ? x.reduce(Finish::sum, axes) / *count : x.reduce(Finish::mean, axes);
  return result.cast(args[0].dtype()).id();
}

Expression variance(const OperatorArguments& args) {
  const Expression x = require_floating(args).widened();
  const Finish finish =
      args.boolean("unbiased", true) ? Finish::variance_unbiased : Finish::variance;
  return x.reduce(finish, args.axes(kFeatureAxis));
}

ValueId var(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return variance(args).cast(args[0].dtype()).id();
}

ValueId std_deviation(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return sqrt(variance(args)).cast(args[0].dtype()).id();
}

Expression p_norm(Expression x, double p, AxisMask axes) {
  if (p == 2) return sqrt(square(x).reduce(Finish::sum, axes));
  if (p == 1) return abs(x).reduce(Finish::sum, axes);
  if (std::isinf(p) && p > 0) return abs(x).reduce(Finish::max, axes);
  fail(INGOT_UNSUPPORTED, "the norm of order {} is not supported; 1, 2 and inf are", p);
}

// Sums of an element and those before it along the features.
ValueId cumsum(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return builder.scan(require_floating(args).id());
}

ValueId norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = require_floating(args).widened();
  return p_norm(x, args.number("p", 2), args.axes(kFeatureAxis)).cast(args[0].dtype()).id();
}

// x / max(‖x‖, eps)
ValueId normalize(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = require_floating(args).widened();
  const Expression length = p_norm(x, args.number("p", 2), args.axes(kFeatureAxis));
  return (x / maximum(length, args.number("eps", 1e-12))).cast(args[0].dtype()).id();
}

}  // namespace

const std::vector<Operator>& reduction_operators() {
  static const std::vector<Operator> rows = {
      {"softmax", 1, 1, {"axes"}, softmax},
      {"log_softmax", 1, 1, {"axes"}, log_softmax},
      {"logsumexp", 1, 1, {"axes"}, logsumexp},
      {"sum", 1, 1, {"axes"}, sum},
      {"mean", 1, 1, {"axes"}, mean},
      {"cumsum", 1, 1, {}, cumsum},
      {"max", 1, 1, {"axes"}, max},
      {"min", 1, 1, {"axes"}, min},
      {"argmax", 1, 1, {"axes"}, argmax},
      {"var", 1, 1, {"axes", "unbiased"}, var},
      {"std", 1, 1, {"axes", "unbiased"}, std_deviation},
      {"norm", 1, 1, {"axes", "p"}, norm},
      {"normalize", 1, 1, {"axes", "p", "eps"}, normalize},
  };
  return rows;
}

}  // namespace ingot
