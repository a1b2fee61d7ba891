// The vectorised loops that host sweeps are made of, compiled once for each instruction set. Each
// works on a block that fits in cache; what the block is, src/cpu/sweep decides.
//
// Values are computed as float (f32, f16, bf16, boolean) or double (f64, i64: exact to 2⁵³).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/pointwise.cuh"
#include "cpu/composites.h"
#include "cpu/isa.h"

namespace ingot::cpu {

inline constexpr int kMaxArity = 3;
inline constexpr int kMaxInputs = kCompositeArity;
#define INGOT_COUNT_POINTWISE(name, arity, ...) +1
inline constexpr int kPointwiseOperators = INGOT_POINTWISE_OPERATORS(INGOT_COUNT_POINTWISE);
#undef INGOT_COUNT_POINTWISE

// out[i, j] = op(in0[i, j], …) for i < rows, j < columns. Along j, out is dense and each operand is
// dense or constant: the variant, or `constants`, has bit o set where operand o is constant.
template <class T>
struct MapBlock {
  T* out;
  int64_t out_stride;
  const T* in[kMaxInputs];
  int64_t in_stride[kMaxInputs];
  int64_t rows, columns;
  unsigned constants = 0;  // compositions and round only
};

// What is still to be merged into the states (first, second: as the monoid has them; see
// state_of). `count` elements have been merged into each so far; the block's index along the
// reduced axis starts at `index` (argmax).
struct StateBlock {
  double* first;
  double* second;
  double count;
  int64_t index;
};

// Longer rows are reduced in pieces, one row after the other.
inline constexpr int64_t kLongestRow = 4096;

enum class ReduceMonoid : int { sum, max, min, argmax, moments, log_sum_exp, count_ };

// What is read off the two numbers of a state.
enum class Reading : int {
  first,
  second,
  mean,
  variance,
  variance_unbiased,
  sum_exp,
  log_sum_exp,
  count_
};

template <class T>
struct Primitives {
  using Map = void (*)(const MapBlock<T>&);
  // By PointwiseOp, then by variant; nullptr for variants in which every operand is constant.
  Map map[kPointwiseOperators][1 << kMaxArity];
  // By Composite; single precision only.
  Map composite[static_cast<int>(Composite::count_)];

  // Merges `rows` rows of `columns` values into as many states.
  using ReduceColumns = void (*)(const T* x, int64_t row_stride, int64_t rows, int64_t columns,
                                 StateBlock states);
  ReduceColumns reduce_columns[static_cast<int>(ReduceMonoid::count_)];
  // Merges `n` adjacent values into one state.
  using ReduceRun = void (*)(const T* x, int64_t n, StateBlock state);
  ReduceRun reduce_run[static_cast<int>(ReduceMonoid::count_)];

  // Merges each of `rows` rows of `columns` values into a state of its own; nullptr where there is
  // only reduce_run. For up to kLongestRow values.
  using ReduceRows = void (*)(const T* x, int64_t row_stride, int64_t rows, int64_t columns,
                              StateBlock states);
  ReduceRows reduce_rows[static_cast<int>(ReduceMonoid::count_)];

  // Reads `n` states of `count` elements each.
  using Read = void (*)(const double* first, const double* second, double count, T* out, int64_t n);
  Read read[static_cast<int>(Reading::count_)];

  // out[j, i] = in[i, j] for i < rows, j < columns; T in memory, at any address.
  using Transpose = void (*)(void* out, int64_t out_stride, const void* in, int64_t in_stride,
                             int64_t rows, int64_t columns);
  Transpose transpose;

  // By ingot_dtype: n elements at `stride` (elements) from or to memory. A store rounds to nearest
  // (integers: toward zero; boolean: whether nonzero).
  using Load = void (*)(T* out, const void* in, int64_t stride, int64_t n);
  using Store = void (*)(void* out, int64_t stride, const T* in, int64_t n);
  Load load[6];
  Store store[6];
  // What would be loaded after a store, without either; nullptr but for fp16 and bf16.
  Map round[6];
};

template <class T>
const Primitives<T>& primitives(Level level);

}  // namespace ingot::cpu
