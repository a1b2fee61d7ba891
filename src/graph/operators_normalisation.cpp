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

// y·γ + β, for statistics that γ and β do not line up with.
Expression with_affine(Expression y, std::optional<Expression> gamma,
                       std::optional<Expression> beta) {
  if (gamma) y = y * gamma->widened();
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

// The extents that a reduction over `axes` runs through.
Shape spanned_shape(const Shape& shape, AxisMask axes) {
  if (axes & axis_bit(kBatch)) {
    fail(INGOT_UNSUPPORTED, "the batch cannot be among the normalised axes");
  }
  return shape.only(axes);
}

double spacing_at_one(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return std::numeric_limits<double>::epsilon();
    case DType::f16:
      return 0x1p-10;
    case DType::bf16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
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
  const Shape statistics = x.shape().without(axes);
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

// Arguments: x, weight, bias (each with as many elements as the axes span). PyTorch's layer_norm.
ValueId layer_norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = args.axes(axis_bit(kFeatures));
  const Shape affine = spanned_shape(x.shape(), axes);
  const Expression y = normalise_by_own(x, axes, args.number("eps", 1e-5),
                                        fitted(args.optional(1), affine, "weight"),
                                        fitted(args.optional(2), affine, "bias"));
  return y.cast(args[0].dtype()).id();
}

// x / √(mean(x²) + eps) · weight. Without eps: the spacing of x's dtype at 1, as in PyTorch.
ValueId rms_norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = args.axes(axis_bit(kFeatures));
  const Shape affine = spanned_shape(x.shape(), axes);
  const auto count = static_cast<double>(affine.static_elements());
  const Expression mean_square = square(x).reduce(Finish::sum, axes) / count;
  const Expression rstd = rsqrt(mean_square + args.number("eps", spacing_at_one(args[0].dtype())));
  const auto gamma = fitted(args.optional(1), affine, "weight");
  const Expression y = x * rstd;
  return (gamma ? y * gamma->widened() : y).cast(args[0].dtype()).id();
}

void check_groups(int64_t channels, int64_t groups) {
  if (groups < 1 || channels % groups != 0) {
    fail(INGOT_INVALID_ARGUMENT, "{} channels do not divide into {} groups", channels, groups);
  }
}

// [N, C]: the features factor into groups, and weight and bias with them.
Expression group_norm_of_features(const OperatorArguments& args, Expression x, int64_t groups) {
  const Shape shape = x.shape();
  if (shape.rows * shape.groups != 1) {
    fail(INGOT_INVALID_ARGUMENT,
         "with channels on the features, x has one row and one group, "
         "not {}",
         to_string(shape));
  }
  check_groups(shape.features, groups);
  const Shape grouped{shape.batched, 1, groups, shape.features / groups};
  return normalise_by_own(x.view(grouped), axis_bit(kFeatures), args.number("eps", 1e-5),
                          fitted(args.optional(1), grouped, "weight"),
                          fitted(args.optional(2), grouped, "bias"))
      .view(shape);
}

// [N, C, L]: a group is a run of rows, normalised as one; weight and bias by row.
Expression group_norm_of_rows(const OperatorArguments& args, Expression x, int64_t groups) {
  const Shape shape = x.shape();
  check_groups(shape.rows, groups);
  const Shape grouped{shape.batched, groups, 1, shape.static_elements() / groups};
  const Shape affine{false, shape.rows, 1, 1};
  const Expression y = normalise_by_own(x.view(grouped), axis_bit(kFeatures),
                                        args.number("eps", 1e-5), std::nullopt, std::nullopt);
  return with_affine(y.view(shape), fitted(args.optional(1), affine, "weight"),
                     fitted(args.optional(2), affine, "bias"));
}

// Statistics over each of `groups` equal runs of channels and all that a channel holds. `channels`:
// the axis that they lie on, "features" for [N, C] (default), "rows" for [N, C, L].
ValueId group_norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const int64_t groups = args.integer("groups");
  const std::string channels = args.text("channels", "features");
  if (channels != "features" && channels != "rows") {
    fail(INGOT_INVALID_ARGUMENT, "attribute 'channels' must be \"features\" or \"rows\"");
  }
  const Expression y = channels == "features" ? group_norm_of_features(args, x, groups)
                                              : group_norm_of_rows(args, x, groups);
  return y.cast(args[0].dtype()).id();
}

// Each channel of each batch entry by its own statistics over the features; [N, C, L] has its
// channels on the rows. Arguments: x, weight, bias, running_mean, running_var (by channel). The
// running statistics move by the batch's average of the instances' statistics, as in PyTorch.
ValueId instance_norm(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = args[0].widened();
  const AxisMask axes = axis_bit(kFeatures);
  const double eps = args.number("eps", 1e-5);
  const Shape channels{false, x.shape().rows, x.shape().groups, 1};
  const auto gamma = fitted(args.optional(1), channels, "weight");
  const auto beta = fitted(args.optional(2), channels, "bias");
  const auto running = running_statistics(args, channels);
  const bool training = args.boolean("training", !running);
  const Expression y = running && !training
                           ? normalise_by_running(builder, x, *running, channels, eps, gamma, beta)
                           : normalise_by_own(x, axes, eps, gamma, beta);
  if (running && training) {
    const Averaging moving = fixed_averaging(x, args.number("momentum", 0.1));
    const auto over_batch = [&](Finish finish) {
      return x.reduce(finish, axes).reduce(Finish::mean, axis_bit(kBatch));
    };
    move_running(builder, running->mean, over_batch(Finish::mean), moving);
    move_running(builder, running->variance, over_batch(Finish::variance_unbiased), moving);
  }
  return y.cast(args[0].dtype()).id();
}

}  // namespace

const std::vector<Operator>& normalisation_operators() {
  static const std::vector<Operator> rows = {
      {"batch_norm", 1, 6, {"training", "momentum", "eps", "axes"}, batch_norm},
      {"layer_norm", 1, 3, {"eps", "axes"}, layer_norm},
      {"rms_norm", 1, 2, {"eps", "axes"}, rms_norm},
      {"group_norm", 1, 3, {"groups", "channels", "eps"}, group_norm},
      {"instance_norm", 1, 5, {"training", "momentum", "eps"}, instance_norm},
  };
  return rows;
}

}  // namespace ingot
