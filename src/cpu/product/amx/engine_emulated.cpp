// Everything in plain C++, the tiles emulated: the same bits as on processors with AMX, on any
// machine. For tests.
#include "cpu/product/amx/engine.h"

#define INGOT_INLINE inline __attribute__((always_inline))
#define INGOT_ENGINE_NAME "AMX, emulated in plain C++"

namespace ingot::cpu::amx {
namespace {
#include "cpu/half.inc"
//
#include "cpu/product/amx/vectors_portable.inc"
//
#include "cpu/product/amx/tiles_emulated.inc"
//
#include "cpu/product/amx/pack.inc"
//
#include "cpu/product/amx/multiply.inc"
}  // namespace

const Engine* emulated_engine() {
  return &kEngine;
}

}  // namespace ingot::cpu::amx
