// Whether this process may use AMX: the processor has it, the kernel saves its registers and grants
// them, and the instructions execute (a hypervisor may hide or forbid what CPUID shows).
#pragma once

#include <string>

#include "cpu/isa.h"
#include "cpu/product/amx/engine.h"

namespace ingot::cpu::amx {

// What was found, step by step; a step that was not reached is false or zero.
struct Findings {
  bool tiles = false, bf16 = false, fp16 = false;  // CPUID
  bool vectors = false;                            // AVX-512 with bf16 conversions
  bool saved = false;                              // XCR0: the kernel saves tile registers
  int refusal = 0;                                 // errno of the request for permission
  bool bf16_executes = false, fp16_executes = false;
};

struct Support {
  bool bf16 = false, fp16 = false;
  std::string state;  // for doctor(): "usable", or why not
};

Support judge(const Findings& findings);

// Asked once in a process: the first call requests the permission and tries the instructions.
// Without AMX in `isa` nothing is asked or tried.
Support support(const Isa& isa);

// Tiles emulated, everything else as fast as this processor can. For tests.
const Engine& best_emulated_engine(const Isa& isa);

}  // namespace ingot::cpu::amx
