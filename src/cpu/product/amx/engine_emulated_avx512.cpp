// Tiles emulated, everything else as on processors with AMX; flags.cmake gives the compiler
// options. For tests.
#include "cpu/product/amx/engine.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define INGOT_INLINE inline __attribute__((always_inline))
#define INGOT_ENGINE_NAME "AMX, emulated with AVX-512"

namespace ingot::cpu::amx {
namespace {
#include "cpu/half.inc"
//
#include "cpu/product/amx/vectors_avx512.inc"
//
#include "cpu/product/amx/tiles_emulated.inc"
//
#include "cpu/product/amx/pack.inc"
//
#include "cpu/product/amx/multiply.inc"
}  // namespace

const Engine* emulated_avx512_engine() {
  return &kEngine;
}

}  // namespace ingot::cpu::amx
#else
namespace ingot::cpu::amx {
const Engine* emulated_avx512_engine() {
  return nullptr;
}
}  // namespace ingot::cpu::amx
#endif
