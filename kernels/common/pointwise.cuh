// The pointwise operators: one row an operator, read by everyone who needs to know what exists.
//
//   X(name, arity, expression in a, b, c of type T)
//
// From this table come the operator names of the graph format, the device functions that generated
// kernels call, the vectorised host primitives and the fp64 reference. To add an operator, add a
// row. Comparisons give 1 or 0 of T. NaN and infinities go where PyTorch's operator sends them.
// Operators that are compositions of these (gelu, softplus, ...) are defined in graph/operators.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

#define INGOT_POINTWISE_OPERATORS(X)                     \
  X(add, 2, a + b)                                       \
  X(sub, 2, a - b)                                       \
  X(mul, 2, a* b)                                        \
  X(div, 2, math::divide(a, b))                          \
  X(neg, 1, -a)                                          \
  X(abs, 1, math::fabs(a))                               \
  X(square, 1, a* a)                                     \
  X(sqrt, 1, math::sqrt(a))                              \
  X(rsqrt, 1, math::divide(T(1), math::sqrt(a)))         \
  X(reciprocal, 1, math::divide(T(1), a))                \
  X(exp, 1, math::exp(a))                                \
  X(expm1, 1, math::expm1(a))                            \
  X(log, 1, math::log(a))                                \
  X(log1p, 1, math::log1p(a))                            \
  X(sin, 1, math::sin(a))                                \
  X(cos, 1, math::cos(a))                                \
  X(tanh, 1, math::tanh(a))                              \
  X(erf, 1, math::erf(a))                                \
  X(sigmoid, 1, math::sigmoid(a))                        \
  X(pow, 2, math::pow(a, b))                             \
  X(floor, 1, math::floor(a))                            \
  X(ceil, 1, math::ceil(a))                              \
  X(trunc, 1, math::trunc(a))                            \
  X(round, 1, math::rint(a))                             \
  X(sign, 1, a != a ? T(0) : T((a > T(0)) - (a < T(0)))) \
  X(relu, 1, math::relu(a))                              \
  X(maximum, 2, math::maximum(a, b))                     \
  X(minimum, 2, math::minimum(a, b))                     \
  X(lt, 2, T(a < b))                                     \
  X(le, 2, T(a <= b))                                    \
  X(gt, 2, T(a > b))                                     \
  X(ge, 2, T(a >= b))                                    \
  X(eq, 2, T(a == b))                                    \
  X(ne, 2, T(a != b))                                    \
  X(logical_and, 2, T((a != T(0)) & (b != T(0))))        \
  X(logical_or, 2, T((a != T(0)) | (b != T(0))))         \
  X(logical_not, 1, T(a == T(0)))                        \
  X(select, 3, a != T(0) ? b : c)

namespace ingot::pointwise {

#define INGOT_POINTWISE_PARAMS_1 T a
#define INGOT_POINTWISE_PARAMS_2 T a, T b
#define INGOT_POINTWISE_PARAMS_3 T a, T b, T c
#define INGOT_DEFINE_POINTWISE(name, arity, expression) \
  template <class T>                                    \
  INGOT_HD T name(INGOT_POINTWISE_PARAMS_##arity) {     \
    return expression;                                  \
  }
INGOT_POINTWISE_OPERATORS(INGOT_DEFINE_POINTWISE)
#undef INGOT_DEFINE_POINTWISE

}  // namespace ingot::pointwise
