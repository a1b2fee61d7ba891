// The vectorised loops for one instruction set; flags.cmake gives the compiler options.
#define INGOT_ISA baseline
#include "cpu/primitives.inc"
