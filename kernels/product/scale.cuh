// Exact power-of-two scaling and the fp16 split of fp32 values.
//
// A row with largest magnitude amax is multiplied by 2^-e, e = exponent(amax) − kTarget, so that
// its largest element lies in [2^kTarget, 2^(kTarget+1)); then v·2^-e = hi + lo with hi =
// fp16(v·2^-e) and lo = fp16(v·2^-e − hi) keeps 22 bits of every element down to 2^-(kTarget+3) of
// amax and an absolute floor of 2^-(kTarget+25) of it below. e ≥ −126 keeps the factor a normal
// number; rows that this leaves smaller than the target (amax < 2^(kTarget−126), denormals too)
// lose nothing, since fp16's smallest step 2^-24 then stands for 2^-150. (Ootomo and Yokota 2022
// split the same way, without the scaling.)
#pragma once

#include "common/ptx.cuh"

namespace ingot {

inline constexpr i32 kMinExponent = -126;
// Rows whose true maximum is known: fp16 overflows at 2^16.
inline constexpr i32 kExactTarget = 14;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// For exponents of normal numbers, −126 … 127.
INGOT_D float pow2(i32 exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Infinity and NaN count as exponent 128: the factor stays finite and they survive the split.
INGOT_D i32 scale_exponent(float amax, i32 target) {
  const i32 exponent = static_cast<i32>(__float_as_uint(amax) >> 23) - 127 - target;
  return exponent < kMinExponent ? kMinExponent : exponent;
}

INGOT_D void split_pair(float first, float second, float scale, u32& hi, u32& lo) {
  const float a = first * scale, b = second * scale;
  hi = ptx::pack_half2(a, b);
  float hi_a, hi_b;
  ptx::unpack_half2(hi, hi_a, hi_b);
  lo = ptx::pack_half2(a - hi_a, b - hi_b);
}

// NaN loses in the maximum and need not win: it survives any scale, and infinity wins.
INGOT_D float max_magnitude(float m, const float4& v) {
  return fmaxf(fmaxf(fmaxf(m, fabsf(v.x)), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

#endif

}  // namespace ingot
