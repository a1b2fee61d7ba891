// The inner parts of the product on AMX tiles: packing of operands and the product of two packed
// panels. One table of them is compiled for processors with the instructions, others for any
// machine with the tiles emulated, so that everything but the instructions themselves is tested
// everywhere.
//
// Both operands are cut into panels of 32 rows (of a, or columns of b) and blocks of 256 of k. A
// row's block is multiplied by a power of two and split into slices of half precision; what is
// packed lies in tile order: [step of 32 k][slice][upper, lower 16 rows][16 rows × 64 bytes], for
// the right side with pairs of k interleaved as the instructions ask.
//
//   f3  two fp16 slices, products hi·hi + hi·lo + lo·hi: 22 bits of every element down to 2⁻¹⁷ of
//       its row block's maximum, an absolute floor of 2⁻³⁹ of that maximum below
//   b6  three bf16 slices, the six largest products: 24 bits over the whole exponent range
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot::cpu::amx {

enum class Scheme : int { f3 = 0, b6 = 1 };

inline constexpr int kPanelRows = 32;
inline constexpr int kTileRows = 16;
inline constexpr int kStep = 32;  // of k, in one tile
inline constexpr int kBlockK = 256;
inline constexpr int kTileBytes = 1024;
inline constexpr int kSteps = kBlockK / kStep;
inline constexpr int kSlices[2] = {2, 3};  // by scheme
inline constexpr int kPanelBytes[2] = {kSteps * 2 * 2 * kTileBytes, kSteps * 3 * 2 * kTileBytes};

// F3's guard, for each row of a panel: as many of its nonzero elements may be smaller than 2⁻¹⁷ of
// the maximum's power of two, none smaller than 2⁻²² (which keeps 2⁻¹⁷ of its own value).
inline constexpr int kSmallAllowed = 2;
inline constexpr int kSmallExponent = 17;
inline constexpr int kTinyExponent = 22;

// Element (row, k) of a panel's block is data[row · ld + k], or data[k · ld + row] where across.
struct PanelSource {
  const float* data;
  int64_t ld;
  int rows, depth;  // ≤ kPanelRows, ≤ kBlockK; the rest of the panel is filled with zeros
  bool across;
  bool right;  // packed as b
};

struct PanelReport {
  Scheme scheme;       // b6 where f3 was asked for and its guard refused
  uint32_t nonfinite;  // rows with an Inf or a NaN: packed as zeros
};

// The result of a pair of panels on its way into the partial sums of its 32×32 block of c (tile
// order, contiguous) or, at the last block of k, to c itself.
struct Update {
  const float* sums = nullptr;           // nullptr: nothing to do
  const float* row_exponents = nullptr;  // powers of two to undo, 32 of each
  const float* column_exponents = nullptr;
  float* partial = nullptr;
  float* c = nullptr;
  int64_t ldc = 0;
  int rows = 0, columns = 0;  // of c's block
  int next = 0;               // rows below are done
  bool first = false, last = false;
};

// Brought to L2 while a pair is multiplied: what comes next.
struct Ahead {
  const std::byte* packed = nullptr;  // a share of the next packed panel of a,
  int lines = 0;                      // so many cache lines at each step
  const std::byte* source = nullptr;  // rows of the next slab of b, one at each step
  int64_t source_stride = 0;          // bytes
  int source_rows = 0, source_lines = 0;
};

struct Pair {
  const std::byte* a;
  const std::byte* b;
  int steps;
  float* sums;  // 32×32, tile order, 64-byte aligned
  Ahead ahead;
};

struct Engine {
  const char* name;
  void (*begin)();  // in each thread before the first pair, and
  void (*end)();    // after the last
  // Packs for `wanted`, or for b6 where f3's guard refuses. packed: kPanelBytes of b6, 64-byte
  // aligned; exponents: 32.
  PanelReport (*pack)(Scheme wanted, const PanelSource& source, std::byte* packed,
                      float* exponents);
  // sums = a·b, and the pending update, of the pair before, in between. By scheme.
  void (*multiply[2])(const Pair& pair, Update* pending);
  void (*finish)(Update* pending);
};

// nullptr where this build has none. Whoever takes one of the first two knows that the processor
// has what it is compiled for: AVX-512 with bf16 conversions, and tiles for the first (support.h).
const Engine* instruction_engine();
const Engine* emulated_avx512_engine();
const Engine* emulated_engine();

}  // namespace ingot::cpu::amx
