// Our own product's inner parts for one instruction set; flags.cmake gives the compiler options.
#define INGOT_ISA baseline
#define INGOT_VECTOR_BYTES 16
#define INGOT_TILE_ROWS 4
#define INGOT_TILE_VECTORS 2
#include "cpu/product/kernels.inc"
