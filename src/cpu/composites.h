// Compositions of pointwise operators that are done in one loop, from registers: the same
// operations in the same order, so the same bits, without a pass over the block for each.
//
// A composition is a type: the primitives evaluate it on vectors, and composites.cpp looks for it
// among a phase's steps. To add one, add a row. Larger ones first: the first that fits is taken.
#pragma once

#include <stdint.h>

#include "common/pointwise.cuh"

namespace ingot::cpu {

// Numbered as PointwiseOp, whose header brings more than the primitives may see.
enum class Pointwise : uint8_t {
#define INGOT_POINTWISE_ENUM(name, arity, ...) name##_,
  INGOT_POINTWISE_OPERATORS(INGOT_POINTWISE_ENUM)
#undef INGOT_POINTWISE_ENUM
};

namespace composite {

template <int index>
struct Arg {};
template <double value>
struct Number {};
template <Pointwise op, class... Args>
struct Apply {};

template <class A, class B>
using Add = Apply<Pointwise::add_, A, B>;
template <class A, class B>
using Sub = Apply<Pointwise::sub_, A, B>;
template <class A, class B>
using Mul = Apply<Pointwise::mul_, A, B>;
template <class A, class B>
using Div = Apply<Pointwise::div_, A, B>;
template <class A>
using Neg = Apply<Pointwise::neg_, A>;
template <class A>
using Exp = Apply<Pointwise::exp_, A>;
template <class A>
using Erf = Apply<Pointwise::erf_, A>;
template <class A>
using Relu = Apply<Pointwise::relu_, A>;

using A = Arg<0>;
using B = Arg<1>;
using C = Arg<2>;
using D = Arg<3>;
using E = Arg<4>;

using Silu = Div<A, Add<Number<1.0>, Exp<Neg<A>>>>;
using Gelu =
    Mul<Mul<A, Number<0.5>>, Add<Number<1.0>, Erf<Mul<A, Number<1 / 1.41421356237309504880>>>>>;
using Centred = Sub<A, B>;
using Affine = Add<Mul<Centred, C>, D>;           // a norm over the batch
using Affine2 = Add<Mul<Centred, Mul<C, D>>, E>;  // a norm over features

}  // namespace composite

#define INGOT_COMPOSITES(X)                     \
  X(silu_times, Mul<Silu, B>)                   \
  X(silu, Silu)                                 \
  X(gelu_times, Mul<Gelu, B>)                   \
  X(gelu_plus, Add<Gelu, B>)                    \
  X(gelu, Gelu)                                 \
  X(affine2_relu, Relu<Affine2>)                \
  X(affine2, Affine2)                           \
  X(affine_relu, Relu<Affine>)                  \
  X(affine, Affine)                             \
  X(multiply_add_relu, Relu<Add<Mul<A, B>, C>>) \
  X(subtract_multiply, Mul<Centred, C>)         \
  X(subtract_twice, Sub<Centred, C>)            \
  X(subtract_exp, Exp<Centred>)                 \
  X(multiply_add, Add<Mul<A, B>, C>)            \
  X(multiply_twice, Mul<Mul<A, B>, C>)          \
  X(add_relu, Relu<Add<A, B>>)

enum class Composite : int8_t {
  none = -1,
#define INGOT_COMPOSITE_ENUM(name, ...) name,
  INGOT_COMPOSITES(INGOT_COMPOSITE_ENUM)
#undef INGOT_COMPOSITE_ENUM
      count_
};
inline constexpr int kCompositeArity = 5;

}  // namespace ingot::cpu
