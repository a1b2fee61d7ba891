// Reductions as monoids: (identity, lift, merge, finish), one definition for host and device.
//
// A tile, a lane or a thread lifts its elements into states and merges them; partial states of
// tiles merge the same way wherever they are. Every merge order used by a kernel is fixed, so equal
// input gives equal bits. T is float on the fast paths and double in the reference evaluator.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

namespace ingot {

template <class T>
struct Sum {
  struct State {
    T value;
  };
  INGOT_HD static State identity() { return {T(0)}; }
  INGOT_HD static State lift(T x) { return {x}; }
  INGOT_HD static State merge(State a, State b) { return {a.value + b.value}; }
  INGOT_HD static T value(State s) { return s.value; }
};

// Sum and count, where both the sum and the mean are asked for, and no variance.
template <class T>
struct Average {
  struct State {
    T value, count;
  };
  INGOT_HD static State identity() { return {T(0), T(0)}; }
  INGOT_HD static State lift(T x) { return {x, T(1)}; }
  INGOT_HD static State merge(State a, State b) { return {a.value + b.value, a.count + b.count}; }
  INGOT_HD static T value(State s) { return s.value; }
  INGOT_HD static T mean(State s) { return s.value / s.count; }
};

// Maximum and minimum let NaN through, as PyTorch's do.
template <class T>
struct Max {
  struct State {
    T value;
  };
  INGOT_HD static State identity() { return {-math::infinity<T>()}; }
  INGOT_HD static State lift(T x) { return {x}; }
  INGOT_HD static State merge(State a, State b) { return {math::maximum(a.value, b.value)}; }
  INGOT_HD static T value(State s) { return s.value; }
};

template <class T>
struct Min {
  struct State {
    T value;
  };
  INGOT_HD static State identity() { return {math::infinity<T>()}; }
  INGOT_HD static State lift(T x) { return {x}; }
  INGOT_HD static State merge(State a, State b) { return {math::minimum(a.value, b.value)}; }
  INGOT_HD static T value(State s) { return s.value; }
};

// Count, mean and centred sum of squares. Merging follows Chan, Golub and LeVeque (1979), eq. 2.1;
// E[x²] − E[x]² is never formed, since it cancels where the mean is large against the deviation.
template <class T>
struct Moments {
  struct State {
    T count, mean, m2;
  };
  INGOT_HD static State identity() { return {T(0), T(0), T(0)}; }
  // x − x is 0, or NaN where x is not finite: infinite elements have a mean but no variance.
  INGOT_HD static State lift(T x) { return {T(1), x, x - x}; }
  INGOT_HD static State merge(State a, State b) {
    // An empty side must leave the other untouched even where its mean is not finite.
    if (a.count == T(0)) return b;
    if (b.count == T(0)) return a;
    const T count = a.count + b.count;
    const T weight = b.count / count;
    const T delta = b.mean - a.mean;
    // Without a finite difference (Inf, or an overflow) the mean is the weighted sum, as Σx/n is.
    const T mean = delta - delta == T(0) ? a.mean + delta * weight
                                         : a.mean * (a.count / count) + b.mean * weight;
    return {count, mean, a.m2 + b.m2 + delta * delta * (a.count * weight)};
  }
  INGOT_HD static T mean(State s) { return s.mean; }
  INGOT_HD static T variance(State s) { return s.m2 / s.count; }
  // Bessel's correction; one sample gives 0/0 = NaN, as PyTorch does.
  INGOT_HD static T variance_unbiased(State s) { return s.m2 / (s.count - T(1)); }
};

// log Σ exp(x) held as (max, Σ exp(x − max)): the online softmax of Milakov and Gimelshein (2018).
// Coarse: where all that follows from the sum is rounded to 16 bits.
template <class T, bool Coarse = false>
struct LogSumExp {
  struct State {
    T max, sum;
  };
  INGOT_HD static State identity() { return {-math::infinity<T>(), T(0)}; }
  INGOT_HD static State lift(T x) { return {x, T(1)}; }
  INGOT_HD static State merge(State a, State b) {
    const T top = Max<T>::merge({a.max}, {b.max}).value;
    return {top, sum_relative_to(a, top) + sum_relative_to(b, top)};
  }
  INGOT_HD static T exp(T x) {
    if constexpr (Coarse) {
      return math::coarse::exp(x);
    } else {
      return math::exp(x);
    }
  }
  // Σ exp(x − top) for a top that is the state's own maximum or lies above it.
  INGOT_HD static T sum_relative_to(State s, T top) { return s.sum * exp(below(s.max, top)); }
  // x − top, but 0 where they are equal: −inf − −inf is NaN, and an empty state contributes
  // nothing. A selection, so that exp() follows without a branch.
  INGOT_HD static T below(T x, T top) { return x == top ? T(0) : x - top; }
  INGOT_HD static T maximum(State s) { return s.max; }
  // Literally Σ exp(x − max): NaN where the maximum is infinite, as in PyTorch's softmax.
  INGOT_HD static T sum_exp(State s) { return s.sum + (s.max - s.max); }
  INGOT_HD static T value(State s) { return s.max + math::log(s.sum); }
};

// Position of the maximum; the first of equals, and NaN above everything, as PyTorch has it.
template <class T>
struct ArgMax {
  struct State {
    T value;
    i64 index;
  };
  static constexpr i64 kNowhere = i64(1) << 62;  // behind every place
  INGOT_HD static State identity() { return {-math::infinity<T>(), kNowhere}; }
  INGOT_HD static State lift(T x, i64 index) { return {x, index}; }
  INGOT_HD static State merge(State a, State b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool equal = a_nan ? b_nan : a.value == b.value;
    const bool above = !a_nan && !(a.value >= b.value);
    return above || (equal && b.index < a.index) ? b : a;
  }
  INGOT_HD static i64 index(State s) { return s.index; }
};

}  // namespace ingot
