// Our own product's inner parts for one instruction set; flags.cmake gives the compiler options.
#define INGOT_ISA avx2
#define INGOT_VECTOR_BYTES 32
#define INGOT_TILE_ROWS 6
#define INGOT_TILE_VECTORS 2
#include "cpu/product/kernels.inc"
