// The vectorised loops for one instruction set; flags.cmake gives the compiler options.
#if defined(__x86_64__)
#define INGOT_ISA avx512
#include "cpu/primitives.inc"
#endif
