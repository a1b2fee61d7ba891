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
INGOT_MATH_UNARY(log)
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

INGOT_HD float pow(float a, float b) {
  return ::powf(a, b);
}
INGOT_HD double pow(double a, double b) {
  return ::pow(a, b);
}

}  // namespace ingot::math
