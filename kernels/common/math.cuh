// Elementary functions by one name for float and double, host and device. On the device the
// accurate library functions are meant (no fast-math intrinsics): results must stand beside fp64.
#pragma once

#include "common/types.cuh"

#if !defined(__CUDACC_RTC__) && !defined(__CUDA_ARCH__)
#include <cmath>
#endif

namespace ingot::math {

template <class T>
INGOT_HD T infinity() {
#if defined(__CUDACC_RTC__)
  return T(__int_as_float(0x7f800000));  // NVRTC has no __builtin_huge_val
#else
  return T(__builtin_huge_val());
#endif
}

#define INGOT_MATH_UNARY(name)     \
  INGOT_HD float name(float a) {   \
    return ::name##f(a);           \
  }                                \
  INGOT_HD double name(double a) { \
    return ::name(a);              \
  }

INGOT_MATH_UNARY(exp)
INGOT_MATH_UNARY(expm1)
INGOT_MATH_UNARY(log1p)
INGOT_MATH_UNARY(sqrt)
INGOT_MATH_UNARY(sin)
INGOT_MATH_UNARY(cos)
INGOT_MATH_UNARY(tanh)
INGOT_MATH_UNARY(erf)
INGOT_MATH_UNARY(floor)
INGOT_MATH_UNARY(ceil)
INGOT_MATH_UNARY(trunc)
INGOT_MATH_UNARY(rint)
INGOT_MATH_UNARY(fabs)
#undef INGOT_MATH_UNARY

INGOT_HD double log(double a) {
  return ::log(a);
}
#if !defined(__CUDA_ARCH__) && !defined(__CUDACC_RTC__)
INGOT_HD float log(float a) {
  return ::logf(a);
}
#endif

INGOT_HD float pow(float a, float b) {
  return ::powf(a, b);
}
INGOT_HD double pow(double a, double b) {
  return ::pow(a, b);
}

// The larger and the smaller; NaN if either is.
template <class T>
INGOT_HD T maximum(T a, T b) {
  return (a != a || a > b) ? a : b;
}
template <class T>
INGOT_HD T minimum(T a, T b) {
  return (a != a || a < b) ? a : b;
}
template <class T>
INGOT_HD T relu(T a) {
  return a <= T(0) ? T(0) : a;
}

// a / b; the other two may assume something of their operands, NaN excepted:
// divide_by_normal   |b| ≥ 2^-60; infinity is allowed
// divide_moderate    2^-60 ≤ |b| ≤ 2^60 and |a| ≤ 2^60
template <class T>
INGOT_HD T divide(T a, T b) {
  return a / b;
}
template <class T>
INGOT_HD T divide_by_normal(T a, T b) {
  return a / b;
}
template <class T>
INGOT_HD T divide_moderate(T a, T b) {
  return a / b;
}

#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)
// One instruction where comparisons and a selection take three, and divisions without a branch: the
// compiler's leaves its fast path by one, and what a branch separates cannot overlap, so that
// an epilogue waits for one value after the other.

INGOT_D float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
INGOT_D float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
INGOT_D float relu(float a) {
  return maximum(a, 0.f);
}

// Within one unit in the last place, for 2^-126 ≤ |b| ≤ 2^126.
INGOT_D float reciprocal_estimate(float b) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(b));
  return result;
}

// The quotient from an estimate of 1/b: one step by the exact remainder (Markstein 1990), after
// which it is off by hardly more than half a unit in the last place; by two units where a, and
// with it the remainder, is so small (below 2^-100) that fp32 does not hold it.
INGOT_D float divide_moderate(float a, float b) {
  const float inverse = reciprocal_estimate(b), quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// Where infinities or zeros meet there is no remainder, and the estimate is the quotient already.
INGOT_D float divide_by_estimate(float a, float b, float inverse) {
  const float quotient = a * inverse;
  const float corrected = fmaf(fmaf(-quotient, b, a), inverse, quotient);
  return corrected == corrected ? corrected : quotient;
}

INGOT_D float divide_by_normal(float a, float b) {
  return divide_by_estimate(a, b, 0.25f * reciprocal_estimate(0.25f * b));
}

// 2^a within two units in the last place; 0 below 2^-126.
INGOT_D float exp2_estimate(float a) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// Scaling both by the same power of two keeps the estimate of 1/b a normal number.
INGOT_D float divide(float a, float b) {
  constexpr float kSmallest = 1.17549435e-38f, kLarge = 8.50705917e37f;  // 2^-126, 2^126
  const float size = fabs(b);
  const float scale = size > kLarge ? 0.25f : size < kSmallest ? 16777216.f : 1.f;
  return divide_by_estimate(a * scale, b * scale, reciprocal_estimate(b * scale));
}
#endif

// a - b of a and b as they were rounded. Where a is a product that is the largest of its row and b
// that largest, a fused multiply-subtract would leave the product's rounding error in the place of
// 0: of numbers above 2^24 more than 1, whose exponential then is no probability.
template <class T>
INGOT_HD T difference(T a, T b) {
#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)
  if constexpr (sizeof(T) == sizeof(double)) {
    return __dsub_rn(a, b);
  } else {
    return __fsub_rn(a, b);
  }
#else
  return a - b;
#endif
}

template <class T>
INGOT_HD T rsqrt(T a) {
  return divide(T(1), sqrt(a));
}

template <class T>
INGOT_HD T sigmoid(T a) {
  return divide_by_normal(T(1), T(1) + exp(-a));
}

// What GELU and its derivative are made of: 1 + erf(u), 1 + tanh(u) and e^(-u²). On a GPU the
// former two are computed as erfc(-u) and as 2 / (1 + e^(-2u)): off by less than 2.5e-7, and by
// less than 5e-7 + 2e-7·u² of themselves down to 1e-19, where a sum of 1 and almost -1 keeps
// nothing.
template <class T>
INGOT_HD T one_plus_erf(T u) {
  return T(1) + erf(u);
}
template <class T>
INGOT_HD T one_plus_tanh(T u) {
  return T(1) + tanh(u);
}
template <class T>
INGOT_HD T exp_of_minus_square(T u) {
  return exp(-(u * u));
}

// The same functions where the result is rounded to 16 bits in the end: relative errors below 1e-5
// (tanh: 2^-11, a quarter of what rounding to bf16 adds), in a half to a quarter of the
// instructions.
namespace coarse {

template <class T>
INGOT_HD T exp(T a) {
  return math::exp(a);
}
template <class T>
INGOT_HD T tanh(T a) {
  return math::tanh(a);
}
template <class T>
INGOT_HD T sigmoid(T a) {
  return math::sigmoid(a);
}
template <class T>
INGOT_HD T one_plus_erf(T u) {
  return math::one_plus_erf(u);
}
// 2^-60 ≤ |b|; infinity is allowed.
template <class T>
INGOT_HD T divide_by_normal(T a, T b) {
  return a / b;
}

}  // namespace coarse

#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)
constexpr float kLog2E = 1.44269504f;

// log₂ a: the logarithms of 0, infinities, negative numbers and NaN; subnormals count as zeros.
INGOT_D float log2_estimate(float a) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// Within 1.3 units in the last place, 2.7 of subnormals. a = m·2^e with 2/3 ≤ m < 4/3, and
// log m = 2·atanh s with s = (m - 1) / (m + 1), a minimax fit; 2s = f - s·f, f = m - 1, which is
// exact, keeps the rounding errors of s out of it. What is no positive normal number has its own
// branch-free way.
INGOT_D float log(float a) {
  constexpr float kLn2 = 0.693147181f, kScale = 16777216.f;  // 2^24
  const int bits = __float_as_int(a);
  const int exponent = (bits - 0x3f2aaaab) & static_cast<int>(0xff800000);
  const float m = __int_as_float(bits - exponent), f = m - 1.f;
  const float s = f * reciprocal_estimate(m + 1.f), z = s * s;
  const float p = fmaf(fmaf(0.304349251f, z, 0.399526732f), z, 0.666670484f);
  const float of_m = fmaf(s, fmaf(p, z, -f), f);
  const float result = fmaf(static_cast<float>(exponent), kLn2 / 8388608.f, of_m);
  const bool is_normal = static_cast<u32>(bits) - 0x00800000u < 0x7f000000u;
  return is_normal ? result : fmaf(log2_estimate(kScale * a), kLn2, -24.f * kLn2);
}

// As PyTorch's on a GPU: off by 2^-22.9 of itself at most, by PTX's description.
INGOT_D float rsqrt(float a) {
  float result;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

INGOT_D float exp_of_minus_square(float u) {
  return exp2_estimate(-kLog2E * (u * u));
}

INGOT_D float one_plus_tanh(float u) {
  return 2.f * reciprocal_estimate(1.f + exp2_estimate(-2 * kLog2E * u));
}

// a · b, 1 at most; 0 where it would be negative or NaN.
INGOT_D float multiply_saturated(float a, float b) {
  float result;
  asm("mul.sat.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// c₀ + c₁·v + c₂·v² + …
template <class... Higher>
INGOT_D float polynomial(float v, float c, Higher... higher) {
  if constexpr (sizeof...(Higher) == 0) {
    return c;
  } else {
    return fmaf(polynomial(v, higher...), v, c);
  }
}

// erfc(|u|) = e^(-u²) · P(v), v = s·|u| / (1 + s·|u|), with P(0) = 1: minimax fits of erfcx over
// 0 ≤ |u| ≤ 6.6, behind which e^(-u²) is below 1e-19 (at infinity v is 0). A polynomial in v
// instead of 1/(1 + s·|u|) (Abramowitz and Stegun 7.1.26) loses nothing near 0.
template <class... Coefficients>
INGOT_D float one_plus_erf_by(float u, float s, Coefficients... coefficients) {
  const float scaled = s * fabs(u);
  const float v = multiply_saturated(scaled, reciprocal_estimate(1.f + scaled));
  const float tail = exp_of_minus_square(u) * polynomial(v, 1.f, coefficients...);
  return u > 0.f ? 2.f - tail : tail;
}

INGOT_D float one_plus_erf(float u) {
  return one_plus_erf_by(u, 0.35f, -3.223937511f, 4.939173698f, -4.440200806f, 1.930582643f,
                         0.2239964604f, -0.640576959f, 0.2117679864f);
}

namespace coarse {

INGOT_D float exp(float a) {
  return exp2_estimate(kLog2E * a);
}
INGOT_D float tanh(float a) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
INGOT_D float sigmoid(float a) {
  return reciprocal_estimate(1.f + exp(-a));
}
INGOT_D float one_plus_erf(float u) {
  return one_plus_erf_by(u, 0.5f, -2.256327391f, 1.735236168f, -0.2237743586f, -0.4585081637f,
                         0.2040876448f);
}
INGOT_D float divide_by_normal(float a, float b) {
  return a * (0.25f * reciprocal_estimate(0.25f * b));
}

}  // namespace coarse
#endif

}  // namespace ingot::math
