// Our own product's inner parts for one instruction set; flags.cmake gives the compiler options.
#if defined(__x86_64__)
#define INGOT_ISA avx512
#define INGOT_VECTOR_BYTES 64
#define INGOT_TILE_ROWS 14
#define INGOT_TILE_VECTORS 2
#include "cpu/product/kernels.inc"
#endif
