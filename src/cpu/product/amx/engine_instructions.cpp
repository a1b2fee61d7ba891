// The engine for processors with AMX; flags.cmake gives the compiler options. Like all that is
// compiled for wider instruction sets, it includes nothing that emits shared inline functions.
#include "cpu/product/amx/engine.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define INGOT_INLINE inline __attribute__((always_inline))
#define INGOT_ENGINE_NAME "AMX"

namespace ingot::cpu::amx {
namespace {
#include "cpu/product/amx/vectors_avx512.inc"
// tiles before what uses them
#include "cpu/product/amx/tiles_instructions.inc"
//
#include "cpu/product/amx/pack.inc"
//
#include "cpu/product/amx/multiply.inc"
}  // namespace

const Engine* instruction_engine() {
  return &kEngine;
}

}  // namespace ingot::cpu::amx
#else
namespace ingot::cpu::amx {
const Engine* instruction_engine() {
  return nullptr;
}
}  // namespace ingot::cpu::amx
#endif
