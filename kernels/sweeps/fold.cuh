// Folding values into monoid states (common/monoid.cuh): several values in one thread, several
// monoids side by side, and the states of a team of threads. Every order is fixed.
#pragma once

#include "common/math.cuh"
#include "common/monoid.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

// A number as a type, to choose an overload by.
template <int N>
struct Index {};

// Lifts N values of one thread into one state. They stand along the reduced extent (for ArgMax) in
// runs of Run neighbours: the first at `index`, the next runs `step` apart.
template <class M>
struct Fold {
  template <int Run, class T, int N>
  INGOT_D static typename M::State lift(const T (&x)[N], i64, i64) {
    typename M::State state = M::lift(x[0]);
    INGOT_UNROLL
    for (int i = 1; i < N; ++i) state = M::merge(state, M::lift(x[i]));
    return state;
  }
};

template <class C>
struct Fold<Average<C>> {
  template <int Run, class T, int N>
  INGOT_D static typename Average<C>::State lift(const T (&x)[N], i64, i64) {
    C sum = x[0];
    INGOT_UNROLL
    for (int i = 1; i < N; ++i) sum += x[i];
    return {sum, C(N)};
  }
};

// The maximum first, or NaN, then the first that is it.
template <class C>
struct Fold<ArgMax<C>> {
  template <int Run, class T, int N>
  INGOT_D static typename ArgMax<C>::State lift(const T (&x)[N], i64 index, i64 step) {
    typename Max<C>::State top = Max<C>::lift(x[0]);
    INGOT_UNROLL
    for (int i = 1; i < N; ++i) top = Max<C>::merge(top, Max<C>::lift(x[i]));
    int first = 0;
    if (top.value == top.value) {
      INGOT_UNROLL
      for (int i = N - 1; i >= 0; --i) first = x[i] == top.value ? i : first;
    } else {
      INGOT_UNROLL
      for (int i = N - 1; i >= 0; --i) first = x[i] != x[i] ? i : first;
    }
    return {top.value, index + first / Run * step + first % Run};
  }
};

// Two passes over registers: the mean, then the squares around it. No division by a variable.
template <class C>
struct Fold<Moments<C>> {
  template <int Run, class T, int N>
  INGOT_D static typename Moments<C>::State lift(const T (&x)[N], i64, i64) {
    C sum = C(0);
    INGOT_UNROLL
    for (int i = 1; i < N; ++i) sum += x[i] - x[0];
    C mean = x[0] + sum * (C(1) / C(N));
    if (!(sum - sum == C(0))) {
      // Inf among the values, or an overflow of a difference: the mean is Σx/N.
      mean = x[0] * (C(1) / C(N));
      INGOT_UNROLL
      for (int i = 1; i < N; ++i) mean += x[i] * (C(1) / C(N));
    }
    C m2 = C(0);
    INGOT_UNROLL
    for (int i = 0; i < N; ++i) m2 += (x[i] - mean) * (x[i] - mean);
    return {C(N), mean, m2};
  }
};

// The maximum first, then one exponential a value.
template <class C, bool Coarse>
struct Fold<LogSumExp<C, Coarse>> {
  using M = LogSumExp<C, Coarse>;
  template <int Run, class T, int N>
  INGOT_D static typename M::State lift(const T (&x)[N], i64, i64) {
    typename Max<C>::State top = Max<C>::lift(x[0]);
    INGOT_UNROLL
    for (int i = 1; i < N; ++i) top = Max<C>::merge(top, Max<C>::lift(x[i]));
    C sum = C(0);
    if (top.value - top.value == C(0)) {  // or some difference is that of infinities
      INGOT_UNROLL
      for (int i = 0; i < N; ++i) sum += M::exp(x[i] - top.value);
    } else {
      INGOT_UNROLL
      for (int i = 0; i < N; ++i) sum += M::exp(M::below(x[i], top.value));
    }
    return {top.value, sum};
  }
};

// Bytes of an array of `count` states of M, up to the next 16-byte boundary; what follows it.
template <class M>
INGOT_D i64 bytes_of_states(i64 count) {
  return (count * static_cast<i64>(sizeof(typename M::State)) + 15) / 16 * 16;
}
template <class M>
INGOT_D unsigned char* after_states(const void* states, i64 count) {
  return static_cast<unsigned char*>(const_cast<void*>(states)) + bytes_of_states<M>(count);
}

// Monoids side by side, each over its own values: x[0] for the first, x[1] for the second, ...
// In memory the states of each are an array of their own: `count` of them, at the given index.
template <class M, class... Rest>
struct Together {
  using Others = Together<Rest...>;
  static constexpr int kCount = 1 + Others::kCount;
  struct State {
    typename M::State first;
    typename Others::State others;
  };
  INGOT_D static State identity() { return {M::identity(), Others::identity()}; }
  INGOT_D static State merge(const State& a, const State& b) {
    return {M::merge(a.first, b.first), Others::merge(a.others, b.others)};
  }
  template <int Run = 1, class T, int N>
  INGOT_D static State lift(const T (*x)[N], i64 index, i64 step) {
    return {Fold<M>::template lift<Run>(x[0], index, step),
            Others::template lift<Run>(x + 1, index, step)};
  }
  INGOT_D static i64 bytes(i64 count) { return bytes_of_states<M>(count) + Others::bytes(count); }
  INGOT_D static void write(void* memory, i64 count, i64 index, const State& state) {
    static_cast<typename M::State*>(memory)[index] = state.first;
    Others::write(after_states<M>(memory, count), count, index, state.others);
  }
  INGOT_D static State read(const void* memory, i64 count, i64 index) {
    return {static_cast<const typename M::State*>(memory)[index],
            Others::read(after_states<M>(memory, count), count, index)};
  }
};
template <class M>
struct Together<M> {
  static constexpr int kCount = 1;
  struct State {
    typename M::State first;
  };
  INGOT_D static State identity() { return {M::identity()}; }
  INGOT_D static State merge(const State& a, const State& b) {
    return {M::merge(a.first, b.first)};
  }
  template <int Run = 1, class T, int N>
  INGOT_D static State lift(const T (*x)[N], i64 index, i64 step) {
    return {Fold<M>::template lift<Run>(x[0], index, step)};
  }
  INGOT_D static i64 bytes(i64 count) { return bytes_of_states<M>(count); }
  INGOT_D static void write(void* memory, i64, i64 index, const State& state) {
    static_cast<typename M::State*>(memory)[index] = state.first;
  }
  INGOT_D static State read(const void* memory, i64, i64 index) {
    return {static_cast<const typename M::State*>(memory)[index]};
  }
};

// The state that the lane `mask` away holds; all 32 lanes take part.
template <class State>
INGOT_D State shuffle_xor(const State& state, int mask) {
  constexpr int kWords = (sizeof(State) + 3) / 4;
  union Words {
    State state;
    u32 word[kWords];
    INGOT_D Words() {}
  };
  Words from, to;
  from.state = state;
  INGOT_UNROLL
  for (int i = 0; i < kWords; ++i) to.word[i] = __shfl_xor_sync(0xffffffffu, from.word[i], mask);
  return to.state;
}

// Merges over aligned sub-warps of `Lanes` lanes, lower lanes first, so all lanes get equal bits.
template <class M, int Lanes>
struct LaneMerge {
  INGOT_D static typename M::State run(typename M::State state) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    INGOT_UNROLL
    for (int mask = 1; mask < Lanes; mask *= 2) {
      const typename M::State other = shuffle_xor(state, mask);
      state = (lane & mask) != 0 ? M::merge(other, state) : M::merge(state, other);
    }
    return state;
  }
};

// The maximum of all lanes first, then one exponential instead of two a step.
template <class C, bool Coarse, int Lanes>
struct LaneMerge<LogSumExp<C, Coarse>, Lanes> {
  using State = typename LogSumExp<C, Coarse>::State;
  INGOT_D static State run(State state) {
    const C top = LaneMerge<Max<C>, Lanes>::run({state.max}).value;
    const C sum = LogSumExp<C, Coarse>::sum_relative_to(state, top);
    return {top, LaneMerge<Sum<C>, Lanes>::run({sum}).value};
  }
};

// The mean of all lanes first, as a shift from the first lane's, then the squares around it: one
// division instead of two a step.
template <class C, int Lanes>
struct LaneMerge<Moments<C>, Lanes> {
  using State = typename Moments<C>::State;
  INGOT_D static C sum(C x) { return LaneMerge<Sum<C>, Lanes>::run({x}).value; }
  INGOT_D static State run(State state) {
    const C count = sum(state.count);
    const C pivot = __shfl_sync(0xffffffffu, state.mean, 0, Lanes);
    C mean = pivot + sum(state.count * (state.mean - pivot)) / count;
    // Inf among the values, or an overflow on the way: the mean is Σx/n. A whole warp takes the
    // branch, since shuffles need all of its lanes; those that merge with each other agree.
    const bool finite = mean - mean == C(0);
    if (Lanes == 32 ? !finite : __any_sync(0xffffffffu, !finite)) {
      const C again = sum(state.mean * (state.count / count));
      if (!finite) mean = again;
    }
    const C delta = state.count == C(0) ? C(0) : state.mean - mean;
    const C m2 = sum(state.m2 + state.count * delta * delta);
    return count == C(0) ? Moments<C>::identity() : State{count, mean, m2};
  }
};

// The maximum of all lanes first, or NaN, then the first place of it.
template <class C, int Lanes>
struct LaneMerge<ArgMax<C>, Lanes> {
  using State = typename ArgMax<C>::State;
  INGOT_D static State run(State state) {
    const C top = LaneMerge<Max<C>, Lanes>::run({state.value}).value;
    const bool is_top = state.value == top || state.value != state.value;
    i64 index = is_top ? state.index : ArgMax<C>::kNowhere;
    INGOT_UNROLL
    for (int mask = 1; mask < Lanes; mask *= 2) {
      const i64 other = shuffle_xor(index, mask);
      index = other < index ? other : index;
    }
    return {top, index};
  }
};

template <class M, int Lanes>
struct LaneMerge<Together<M>, Lanes> {
  INGOT_D static typename Together<M>::State run(const typename Together<M>::State& state) {
    return {LaneMerge<M, Lanes>::run(state.first)};
  }
};
template <class M, class Next, class... Rest, int Lanes>
struct LaneMerge<Together<M, Next, Rest...>, Lanes> {
  using State = typename Together<M, Next, Rest...>::State;
  INGOT_D static State run(const State& state) {
    return {LaneMerge<M, Lanes>::run(state.first),
            LaneMerge<Together<Next, Rest...>, Lanes>::run(state.others)};
  }
};

// One state a warp, for merge_team; each reduction of a kernel has its own.
template <class M, int Team, int Teams = 1>
struct TeamStorage {
  typename M::State warps[Team > 32 ? Team / 32 * Teams : 1];
};

// Merges over a team: a sub-warp, or one of `Teams` of a block's, of `Team` threads (powers of
// two), which all call it, once per storage. Several teams of several warps meet at barriers of
// their own.
template <class M, int Team, int Teams>
INGOT_D typename M::State merge_team(typename M::State state,
                                     TeamStorage<M, Team, Teams>& storage) {
  state = LaneMerge<M, (Team < 32 ? Team : 32)>::run(state);
  if constexpr (Team > 32) {
    constexpr int kWarps = Team / 32;
    const int team = Teams > 1 ? static_cast<int>(threadIdx.x) / Team : 0;
    if ((threadIdx.x & 31) == 0) storage.warps[threadIdx.x / 32] = state;
    if constexpr (Teams > 1) {
      ptx::barrier_sync(1 + team, Team);
    } else {
      __syncthreads();
    }
    state = LaneMerge<M, kWarps>::run(storage.warps[team * kWarps + (threadIdx.x & (kWarps - 1))]);
  }
  return state;
}

}  // namespace ingot
