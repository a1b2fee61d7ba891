// Operands of the sweeps: a base pointer and strides, in elements, over the axes
// [batch, rows, groups, features]; a stride of 0 broadcasts.
//
// Vector accesses move V consecutive features. The host launches a kernel of width V > 1 only where
// every such operand has feature stride 1 and 16-byte (or V·sizeof(T), if smaller) alignment.
#pragma once

#include "common/ptx.cuh"
#include "common/scalar.cuh"
#include "common/types.cuh"

#define INGOT_UNROLL _Pragma("unroll")

namespace ingot {

struct Tensor {
  void* data;
  i64 strides[4];

  template <class T>
  INGOT_D T* at(i64 b, i64 r, i64 g, i64 f) const {
    return static_cast<T*>(data) +
           (b * strides[0] + r * strides[1] + g * strides[2] + f * strides[3]);
  }
  // Of vectors of V features: these lie side by side.
  template <class T, int V>
  INGOT_D T* vector_at(i64 b, i64 r, i64 g, i64 f) const {
    return at<T>(b, r, g, 0) + (V > 1 ? f : f * strides[3]);
  }
};

template <class T, int V>
struct alignas(sizeof(T) * V > 16 ? 16 : sizeof(T) * V) Pack {
  T lanes[V];
};

template <class T, int V>
INGOT_D Pack<T, V> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T, V>*>(address);
}
template <class T, int V, class C>
INGOT_D void load(const T* address, C (&values)[V]) {
  const auto pack = load_pack<T, V>(address);
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) values[i] = widen(pack.lanes[i]);
}

// Elements `stride` apart: all of them before the first is converted.
template <class T, int V, class C>
INGOT_D void load_apart(const T* address, i64 stride, C (&values)[V]) {
  T lanes[V];
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) lanes[i] = address[i * stride];
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) values[i] = widen(lanes[i]);
}
template <class T, int V, class C>
INGOT_D void store_apart(T* address, i64 stride, const C (&values)[V]) {
  INGOT_UNROLL
  for (int i = 0; i < V; ++i) address[i * stride] = narrow<T>(values[i]);
}

template <class T>
inline constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<f16> = true;
template <>
inline constexpr bool kIsHalf<bf16> = true;

template <class T, int V, class C>
INGOT_D auto narrowed(const C (&values)[V]) {
  if constexpr (kIsHalf<T> && V % 2 == 0) {
    Pack<u32, V / 2> pack;
    INGOT_UNROLL
    for (int i = 0; i < V; i += 2) {
      pack.lanes[i / 2] =
          narrow_pair(T(), static_cast<float>(values[i]), static_cast<float>(values[i + 1]));
    }
    return pack;
  } else {
    Pack<T, V> pack;
    INGOT_UNROLL
    for (int i = 0; i < V; ++i) pack.lanes[i] = narrow<T>(values[i]);
    return pack;
  }
}

template <class T, int V, class C>
INGOT_D void store(T* address, const C (&values)[V]) {
  auto pack = narrowed<T>(values);
  *reinterpret_cast<decltype(pack)*>(address) = pack;
}
// Results that are to leave the cache to what the kernel reads again.
template <class T, int V, class C>
INGOT_D void store_streamed(T* address, const C (&values)[V]) {
  auto pack = narrowed<T>(values);
  ptx::store_streamed(address, pack);
}

}  // namespace ingot
