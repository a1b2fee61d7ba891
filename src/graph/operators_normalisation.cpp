// Normalisations: statistics by the moments' monoid, then (x − μ)·(rstd·γ) + β. Computed in f32
// where x is f16 or bf16 (f64 where it is f64), and rounded to x's dtype at the end.
#include <limits>

#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

// (x − μ)·(rstd·γ) + β, with γ and β optional.
Expression normalise(Expression x, Expression mean, Expression rstd,
                     std::optional<Expression> gamma, std::optional<Expression> beta) {
  const Expression scale = gamma ? rstd * gamma->widened() : rstd;
  const Expression y = (x - mean) * scale;
  return beta ? y + beta->widened() : y;
}

// Statistics of x over `axes`, used at once.
Expression normalise_by_own(Expression x, AxisMask axes, double eps,
                            std::optional<Expression> gamma, std::optional<Expression> beta) {
  const Expression mean = x.reduce(Finish::mean, axes);
  const Expression rstd = rsqrt(x.reduce(Finish::variance, axes) + eps);
  return normalise(x, mean, rstd, gamma, beta);
}

// A parameter with as many elements as `shape` has, in any arrangement ([C] for [1, C, 1, 1]).
std::optional<Expression> fitted(std::optional<Expression> parameter, Shape shape,
                                 std::string_view what) {
  if (!parameter) return parameter;
  shape.batched = false;
  const Shape own = parameter->shape();
  if (own.batched || own.static_elements() != shape.static_elements()) {
    fail(INGOT_INVALID_ARGUMENT, "{} has shape {}, expected {}", what, to_string(own),
         to_string(shape));
  }
  return parameter->view(shape);
}

// running ← keep·running + factor·observed
struct Averaging {
  Expression keep, factor;
};

Averaging fixed_averaging(Expression x, double momentum) {
  return {x.number(1 - momentum), x.number(momentum)};
}

// Momentum as a number, or the cumulative average's 1 / (calls so far): computed in the graph,
// since the count lives on the device. Counts the call.
Averaging averaging(GraphBuilder& builder, const OperatorArguments& args) {
  const std::optional<double> momentum = args.number("momentum");
  const std::optional<Expression> counter = args.optional(5);
  const Expression x = args[0];
  // As the module has it: without a count, the cumulative average moves nothing.
  if (!counter) return fixed_averaging(x, momentum.value_or(0));
  const Expression count = Expression(builder, builder.current(counter->id())) + 1.0;
  builder.update(count.id(), counter->id());
  if (momentum) return fixed_averaging(x, *momentum);
  const Expression factor = reciprocal(count.cast(x.widened().dtype()));
  return {1.0 - factor, factor};
}

void move_running(GraphBuilder& builder, Expression buffer, Expression observed,
                  Averaging averaging) {
  const Expression old = Expression(builder, builder.current(buffer.id())).widened();
  const Expression moved = averaging.keep * old + averaging.factor * observed.view(old.shape());
  builder.update(moved.cast(buffer.dtype()).id(), buffer.id());
}

// The buffers of running statistics, each with as many elements as `statistics` has.
struct RunningStatistics {
  Expression mean, variance;
};

std::optional<RunningStatistics> running_statistics(const OperatorArguments& args,
                                                    const Shape& statistics) {
  const std::optional<Expression> mean = args.optional(3), variance = args.optional(4);
  if (!mean && !variance) return std::nullopt;
  if (!mean || !variance) {
    fail(INGOT_INVALID_ARGUMENT, "takes both running statistics or neither");
  }
  fitted(mean, statistics, "running_mean");  // for its check
  fitted(variance, statistics, "running_var");
  return RunningStatistics{*mean, *variance};
}

Shape statistics_shape(Shape shape, AxisMask axes) {
  shape.batched = shape.batched && !(axes & axis_bit(kBatch));
  if (axes & axis_bit(kRows)) shape.rows = 1;
  if (axes & axis_bit(kGroups)) shape.groups = 1;
  if (axes & axis_bit(kFeatures)) shape.features = 1;
  return shape;
}

Expression normalise_by_running(GraphBuilder& builder, Expression x, RunningStatistics running,
                                const Shape& statistics, double eps,
                                std::optional<Expression> gamma, std::optional<Expression> beta) {
  const auto read = [&](Expression buffer) {
    return Expression(builder, builder.current(buffer.id())).view(statistics).widened();
  };
  return normalise(x, read(running.mean), rsqrt(read(running.variance) + eps), gamma, beta);
}

// torch.nn.functional.batch_norm with the module's bookkeeping. Arguments: x, weight, bias,
// running_mean, running_var, num_batches_tracked. Statistics run over `axes` (default: the batch);
// the running variance is the unbiased one.
ValueId batch_norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = args.axes(axis_bit(kBatch));
  const double eps = args.number("eps", 1e-5);
  const Shape statistics = statistics_shape(x.shape(), axes);
  const auto gamma = fitted(args.optional(1), statistics, "weight");
  const auto beta = fitted(args.optional(2), statistics, "bias");
  const auto running = running_statistics(args, statistics);
  if (!args.boolean("training", false)) {
    const Expression y =
        running ? normalise_by_running(builder, x, *running, statistics, eps, gamma, beta)
                : normalise_by_own(x, axes, eps, gamma, beta);
    return y.cast(args[0].dtype()).id();
  }
  const Expression y = normalise_by_own(x, axes, eps, gamma, beta);
  const Averaging moving = averaging(builder, args);
  if (running) {
    move_running(builder, running->mean, x.reduce(Finish::mean, axes), moving);
    move_running(builder, running->variance, x.reduce(Finish::variance_unbiased, axes), moving);
  }
  return y.cast(args[0].dtype()).id();
}

}  // namespace

const std::vector<Operator>& normalisation_operators() {
  static const std::vector<Operator> rows = {
      {"batch_norm", 1, 6, {"training", "momentum", "eps", "axes"}, batch_norm},
  };
  return rows;
}

}  // namespace ingot
