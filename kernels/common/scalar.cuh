// Storage types of tensors, and conversions between them and the types that kernels compute in.
//
// f16, bf16 and boolean exist in memory only: arithmetic is float (double for f64, i64 for i64).
// Conversions are single instructions of cc 8.0+ and round to nearest even.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace ingot {

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
struct boolean {
  unsigned char byte;
};
using f32 = float;
using f64 = double;

INGOT_D float widen(f32 x) {
  return x;
}
INGOT_D double widen(f64 x) {
  return x;
}
INGOT_D i64 widen(i64 x) {
  return x;
}
INGOT_D float widen(boolean x) {
  return x.byte != 0 ? 1.0f : 0.0f;
}
INGOT_D float widen(f16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
INGOT_D float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

// narrow<T>(x): x as it is stored in a tensor of T.
template <class T>
struct Narrow {
  template <class C>
  INGOT_D static T from(C x) {
    return static_cast<T>(x);
  }
};
template <>
struct Narrow<f16> {
  template <class C>
  INGOT_D static f16 from(C x) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(static_cast<float>(x)));
    return result;
  }
};
template <>
struct Narrow<bf16> {
  template <class C>
  INGOT_D static bf16 from(C x) {
    // As one of a pair: converting single numbers runs at a quarter of the rate.
    return {static_cast<u16>(ptx::pack_bf16_pair(static_cast<float>(x), 0.f))};
  }
};
template <>
struct Narrow<boolean> {
  template <class C>
  INGOT_D static boolean from(C x) {
    return {static_cast<unsigned char>(x != C(0))};
  }
};
template <class T, class C>
INGOT_D T narrow(C x) {
  return Narrow<T>::from(x);
}

// Two numbers as they are stored side by side.
INGOT_D u32 narrow_pair(f16, float first, float second) {
  return ptx::pack_half2(first, second);
}
INGOT_D u32 narrow_pair(bf16, float first, float second) {
  return ptx::pack_bf16_pair(first, second);
}

}  // namespace ingot
