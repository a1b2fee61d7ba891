// Arithmetic on values being built, so that an operator's definition reads like its formula.
#pragma once

#include <cmath>

#include "graph/builder.h"

namespace ingot {

// A value of the graph under construction. Valid as long as its builder.
class Expression {
 public:
  Expression(GraphBuilder& builder, ValueId id) : builder_(&builder), id_(id) {}

  ValueId id() const { return id_; }
  const Shape& shape() const { return builder_->graph()[id_].shape; }
  DType dtype() const { return builder_->graph()[id_].dtype; }

  Expression number(double value) const { return {*builder_, builder_->constant(value)}; }
  Expression apply(PointwiseOp op) const { return {*builder_, builder_->pointwise(op, {id_})}; }
  Expression apply(PointwiseOp op, Expression b) const {
    return {*builder_, builder_->pointwise(op, {id_, b.id_})};
  }
  // b where this is true, else c.
  Expression select(Expression b, Expression c) const {
    return {*builder_, builder_->pointwise(PointwiseOp::select_, {id_, b.id_, c.id_})};
  }
  Expression cast(DType dtype) const {
    if (dtype == this->dtype()) return *this;
    return {*builder_, builder_->cast(id_, dtype)};
  }
  // The dtype that PyTorch computes in: halves in f32.
  Expression widened() const {
    const bool half = dtype() == DType::f16 || dtype() == DType::bf16;
    return half || !is_floating(dtype()) ? cast(DType::f32) : *this;
  }
  Expression reduce(Finish finish, AxisMask axes) const {
    return {*builder_, builder_->reduce(finish, id_, axes)};
  }
  Expression view(Shape shape) const {
    return shape == this->shape() ? *this : Expression{*builder_, builder_->view(id_, shape)};
  }

 private:
  GraphBuilder* builder_;
  ValueId id_;
};

#define INGOT_EXPRESSION_BINARY(name, op)              \
  inline Expression name(Expression a, Expression b) { \
    return a.apply(PointwiseOp::op, b);                \
  }                                                    \
  inline Expression name(Expression a, double b) {     \
    return name(a, a.number(b));                       \
  }                                                    \
  inline Expression name(double a, Expression b) {     \
    return name(b.number(a), b);                       \
  }
INGOT_EXPRESSION_BINARY(operator+, add_)
INGOT_EXPRESSION_BINARY(operator-, sub_)
INGOT_EXPRESSION_BINARY(operator*, mul_)
INGOT_EXPRESSION_BINARY(operator/, div_)
INGOT_EXPRESSION_BINARY(operator<, lt_)
INGOT_EXPRESSION_BINARY(operator<=, le_)
INGOT_EXPRESSION_BINARY(operator>, gt_)
INGOT_EXPRESSION_BINARY(operator>=, ge_)
INGOT_EXPRESSION_BINARY(operator&&, logical_and_)
INGOT_EXPRESSION_BINARY(maximum, maximum_)
INGOT_EXPRESSION_BINARY(minimum, minimum_)
INGOT_EXPRESSION_BINARY(pow, pow_)
#undef INGOT_EXPRESSION_BINARY

#define INGOT_EXPRESSION_UNARY(name, op) \
  inline Expression name(Expression a) { \
    return a.apply(PointwiseOp::op);     \
  }
INGOT_EXPRESSION_UNARY(operator-, neg_)
INGOT_EXPRESSION_UNARY(abs, abs_)
INGOT_EXPRESSION_UNARY(square, square_)
INGOT_EXPRESSION_UNARY(sqrt, sqrt_)
INGOT_EXPRESSION_UNARY(rsqrt, rsqrt_)
INGOT_EXPRESSION_UNARY(reciprocal, reciprocal_)
INGOT_EXPRESSION_UNARY(exp, exp_)
INGOT_EXPRESSION_UNARY(expm1, expm1_)
INGOT_EXPRESSION_UNARY(log, log_)
INGOT_EXPRESSION_UNARY(log1p, log1p_)
INGOT_EXPRESSION_UNARY(sin, sin_)
INGOT_EXPRESSION_UNARY(cos, cos_)
INGOT_EXPRESSION_UNARY(tanh, tanh_)
INGOT_EXPRESSION_UNARY(erf, erf_)
INGOT_EXPRESSION_UNARY(sigmoid, sigmoid_)
#undef INGOT_EXPRESSION_UNARY

}  // namespace ingot
