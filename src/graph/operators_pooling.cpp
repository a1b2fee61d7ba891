// One-dimensional pooling over the features: windows that tile them become a reduction over a
// finer factoring of the features.
#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

// [B, R, G, F] as [B, R·G, F / kernel, kernel].
Expression windows(const OperatorArguments& args, Expression x) {
  const int64_t kernel = args.integer("kernel");
  const Shape shape = x.shape();
  if (kernel < 1) fail(INGOT_INVALID_ARGUMENT, "attribute 'kernel' must be at least 1");
  if (shape.features % kernel != 0) {
    fail(INGOT_UNSUPPORTED, "windows of {} leave a rest of {} features; they must tile them",
         kernel, shape.features % kernel);
  }
  return x.view({shape.batched, shape.rows * shape.groups, shape.features / kernel, kernel});
}

Expression pooled(const OperatorArguments& args, Expression reduced) {
  Shape shape = args[0].shape();
  shape.features /= args.integer("kernel");
  return reduced.view(shape);
}

ValueId max_pool(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression x = windows(args, args[0]);
  return pooled(args, x.reduce(Finish::max, axis_bit(kFeatures))).id();
}

ValueId avg_pool(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  if (!is_floating(args[0].dtype())) {
    fail(INGOT_INVALID_ARGUMENT, "needs a floating dtype, got {}", name_of(args[0].dtype()));
  }
  const Expression x = windows(args, args[0].widened());
  const Expression sum = x.reduce(Finish::sum, axis_bit(kFeatures));
  const auto kernel = static_cast<double>(args.integer("kernel"));
  return pooled(args, sum / kernel).cast(args[0].dtype()).id();
}

}  // namespace

const std::vector<Operator>& pooling_operators() {
  static const std::vector<Operator> rows = {
      {"max_pool", 1, 1, {"kernel"}, max_pool},
      {"avg_pool", 1, 1, {"kernel"}, avg_pool},
  };
  return rows;
}

}  // namespace ingot
