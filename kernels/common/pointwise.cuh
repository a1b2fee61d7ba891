// The pointwise operators: one row an operator, read by everyone who needs to know what exists.
//
//   X(name, arity, dtype, cost, range, expression in a, b, c of type T)
//
// dtype: what the arguments' dtypes make of the result's. cost: of an element, in multiplications.
// range: where its values lie, given where the arguments' do. src/graph/pointwise.h and .cpp say
// what their words mean.
//
// From this table come the operator names of the graph format, the device functions that generated
// kernels call, the vectorised host primitives, the fp64 reference, and what type inference, cost
// model and interval arithmetic know of an operator. To add one, add a row. Comparisons give 1 or 0
// of T. NaN and infinities go where PyTorch's operator sends them. Operators that are compositions
// of these (gelu, softplus, ...) are defined in graph/operators.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

#define INGOT_POINTWISE_OPERATORS(X)                                          \
  X(add, 2, numeric, 1, sum, a + b)                                           \
  X(sub, 2, numeric, 1, difference, a - b)                                    \
  X(mul, 2, same, 1, product, a* b)                                           \
  X(div, 2, real, 10, unknown, math::divide(a, b))                            \
  X(neg, 1, numeric, 1, negated, -a)                                          \
  X(abs, 1, numeric, 1, not_negative, math::fabs(a))                          \
  X(square, 1, numeric, 1, not_negative, a* a)                                \
  X(sqrt, 1, real, 10, not_negative, math::sqrt(a))                           \
  X(rsqrt, 1, real, 10, unknown, math::rsqrt(a))                              \
  X(reciprocal, 1, real, 10, unknown, math::divide(T(1), a))                  \
  X(exp, 1, real, 20, exponential, math::exp(a))                              \
  X(expm1, 1, real, 20, unknown, math::expm1(a))                              \
  X(log, 1, real, 20, unknown, math::log(a))                                  \
  X(log1p, 1, real, 20, unknown, math::log1p(a))                              \
  X(sin, 1, real, 20, unknown, math::sin(a))                                  \
  X(cos, 1, real, 20, unknown, math::cos(a))                                  \
  X(tanh, 1, real, 20, within_one, math::tanh(a))                             \
  X(erf, 1, real, 20, within_one, math::erf(a))                               \
  X(sigmoid, 1, real, 20, zero_to_one, math::sigmoid(a))                      \
  X(pow, 2, numeric, 50, unknown, math::pow(a, b))                            \
  X(floor, 1, numeric, 1, unknown, math::floor(a))                            \
  X(ceil, 1, numeric, 1, unknown, math::ceil(a))                              \
  X(trunc, 1, numeric, 1, unknown, math::trunc(a))                            \
  X(round, 1, numeric, 1, unknown, math::rint(a))                             \
  X(sign, 1, numeric, 1, unknown, a != a ? T(0) : T((a > T(0)) - (a < T(0)))) \
  X(relu, 1, numeric, 1, rectified, math::relu(a))                            \
  X(maximum, 2, same, 1, larger, math::maximum(a, b))                         \
  X(minimum, 2, same, 1, smaller, math::minimum(a, b))                        \
  X(lt, 2, truth, 1, unknown, T(a < b))                                       \
  X(le, 2, truth, 1, unknown, T(a <= b))                                      \
  X(gt, 2, truth, 1, unknown, T(a > b))                                       \
  X(ge, 2, truth, 1, unknown, T(a >= b))                                      \
  X(eq, 2, truth, 1, unknown, T(a == b))                                      \
  X(ne, 2, truth, 1, unknown, T(a != b))                                      \
  X(logical_and, 2, truth, 1, unknown, T((a != T(0)) & (b != T(0))))          \
  X(logical_or, 2, truth, 1, unknown, T((a != T(0)) | (b != T(0))))           \
  X(logical_not, 1, truth, 1, unknown, T(a == T(0)))                          \
  X(select, 3, chosen, 1, unknown, a != T(0) ? b : c)

namespace ingot::pointwise {

#define INGOT_POINTWISE_PARAMS_1 T a
#define INGOT_POINTWISE_PARAMS_2 T a, T b
#define INGOT_POINTWISE_PARAMS_3 T a, T b, T c
#define INGOT_DEFINE_POINTWISE(name, arity, dtype, cost, range, expression) \
  template <class T>                                                        \
  INGOT_HD T name(INGOT_POINTWISE_PARAMS_##arity) {                         \
    return expression;                                                      \
  }
INGOT_POINTWISE_OPERATORS(INGOT_DEFINE_POINTWISE)
#undef INGOT_DEFINE_POINTWISE

}  // namespace ingot::pointwise
