// The IR's own nodes under their names in the graph format, and thin wrappers of them.
#include "graph/operator_arguments.h"
#include "support/error.h"

namespace ingot {
namespace {

ValueId matmul(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return builder.matmul(args[0].id(), args[1].id(), args.boolean("transpose_b", false));
}

// x · weightᵀ + bias. Arguments: x, weight [1, out, 1, in], bias.
ValueId linear(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  const Expression product(builder, builder.matmul(args[0].id(), args[1].id(), true));
  const std::optional<Expression> bias = args.optional(2);
  return bias ? (product + *bias).id() : product.id();
}

ValueId reduce(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return builder.reduce(finish_from(args.text("finish", "")), args[0].id(), args.axes(0));
}

ValueId cast(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return builder.cast(args[0].id(), dtype_from(args.text("dtype", "")));
}

ValueId view(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return args[0].view(args.shape()).id();
}

ValueId scan(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  return builder.scan(args[0].id());
}

// Nothing to do in eval mode; in training mode it draws random numbers, which a graph cannot.
ValueId dropout(GraphBuilder& builder, const OperatorCall& call) {
  const OperatorArguments args(builder, call);
  if (args.boolean("training", false) && args.number("p", 0.5) != 0) {
    fail(INGOT_UNSUPPORTED, "dropout in training mode draws random numbers; use eval mode");
  }
  return args[0].id();
}

}  // namespace

const std::vector<Operator>& primitive_operators() {
  static const std::vector<Operator> rows = {
      {"matmul", 2, 2, {"transpose_b"}, matmul},
      {"linear", 2, 3, {}, linear},
      {"reduce", 1, 1, {"finish", "axes"}, reduce},
      {"cast", 1, 1, {"dtype"}, cast},
      {"view", 1, 1, {"shape"}, view},
      {"scan", 1, 1, {}, scan},
      {"dropout", 1, 1, {"p", "training"}, dropout},
  };
  return rows;
}

}  // namespace ingot
