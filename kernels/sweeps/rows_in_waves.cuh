// The rows sweep where a cluster would keep little of a row on chip: all blocks go through the rows
// in one order, and a piece that is read again is still in the L2 cache.
//
// A row is cut into kPieces pieces. What is done with a piece is done in stages: stage s < kPhases
// folds it into the states of phase s, stage kPhases writes its results. A block does a task, which
// is every stage once, each of another piece, kLag pieces apart:
//
//   task 0             folds piece 0
//   task 1             folds piece 1
//   ...
//   task kLag          folds piece kLag        finishes piece 0        (of one phase)
//   task kLag + 1      folds piece kLag + 1    finishes piece 1
//
// so that reads of new pieces, second reads from L2 and writes of results are always mixed. kLag is
// longer than a row: when a block asks for a row's states, the last of its pieces was begun
// by earlier tasks, and as a rule is done.
//
// The states of a row's pieces lie in memory. The block that brings the last one merges all, in
// their order, and raises the row's flag, for which later stages wait. Blocks draw tasks by a
// ticket: a block waits for such as run already, and none need be resident beside another.
//
// The body is that of rows.cuh.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"
#include "sweeps/waves.cuh"

namespace ingot {

// What tasks meet in: the ticket; a flag a row and phase, which counts the pieces that came, and
// one more when they are merged; states of pieces and of rows, each phase's in room of its own.
template <class Body, i64 Pieces>
struct WaveMemory {
  static constexpr u32 kMerged = static_cast<u32>(Pieces) + 1;
  u32* counters;
  unsigned char* states;
  i64 rows;
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));

  INGOT_D WaveMemory(void* memory, i64 all_rows)
      : counters(static_cast<u32*>(memory)),
        states(static_cast<unsigned char*>(memory) + wave_counter_bytes(all_rows, Body::kPhases)),
        rows(all_rows) {}

  INGOT_D u32* ticket() const { return counters; }
  template <int P>
  INGOT_D u32* flag(i64 row) const {
    return counters + 1 + P * rows + row;
  }
  // Of a phase: `Pieces` states a row, then one a row.
  template <int P>
  INGOT_D unsigned char* pieces() const {
    if constexpr (P == 0) {
      return states;
    } else {
      return merged<P - 1>() + Monoid<P - 1>::bytes(rows);
    }
  }
  template <int P>
  INGOT_D unsigned char* merged() const {
    return pieces<P>() + Monoid<P>::bytes(rows * Pieces);
  }
};

template <class Body, int V, int Threads>
struct RowsInWaves {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));
  static constexpr int kVectors = wave_vectors(V);
  static constexpr int kStages = Body::kPhases + 1;
  static constexpr i64 kPiece = static_cast<i64>(Threads) * V * kVectors;
  static constexpr i64 kPieces = wave_pieces(Body::kRow, V, Threads);
  static constexpr i64 kLag = wave_lag(kPieces);
  using Memory = WaveMemory<Body, kPieces>;

  // Where a piece lies. What blocks agree on is computed when it is asked for, not held.
  struct Piece {
    u32 index;  // in the order of all rows' pieces

    INGOT_D i64 row() const { return index / static_cast<u32>(kPieces); }
    INGOT_D i64 number() const { return index % static_cast<u32>(kPieces); }
    INGOT_D i64 b() const { return row() / Body::kRowsPerSample; }
    INGOT_D i64 e() const { return row() % Body::kRowsPerSample * Body::kRow; }
    INGOT_D i64 at(int k) const {
      return number() * kPiece + (static_cast<i64>(k) * Threads + threadIdx.x) * V;
    }
    INGOT_D bool inside(int k) const { return at(k) < Body::kRow; }
    INGOT_D bool whole() const { return (number() + 1) * kPiece <= Body::kRow; }
  };

  // A piece on its way through a stage. Some tasks have none for a stage.
  struct Held {
    Piece piece;
    bool is;
    Row row;
    typename Body::template Element<V> element[kVectors];

    INGOT_D Held(const Operands& operands, i64 index, i64 pieces)
        : piece{index >= 0 && index < pieces ? static_cast<u32>(index) : 0},
          is(index >= 0 && index < pieces) {
      Body::row(operands, piece.b(), piece.e(), row);
    }
  };
  template <int P>
  using Values = Value[kVectors][Monoid<P>::kCount][V];

  // Past the row's end: the last vector again.
  template <int P>
  INGOT_D static void evaluate(const Operands& operands, Held& held, Values<P>& x) {
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const i64 at = held.piece.inside(k) ? held.piece.at(k) : Body::kRow - V;
      Body::template phase<P, V>(operands, held.row, held.piece.b(), held.piece.e() + at,
                                 held.element[k], x[k]);
    }
  }
  template <int P>
  INGOT_D static void evaluate(const Operands& operands, Held& held) {
    Values<P> ignored;
    evaluate<P>(operands, held, ignored);
  }

  template <int P>
  INGOT_D static typename Monoid<P>::State fold(const Operands& operands, Held& held) {
    using M = Monoid<P>;
    const Piece& piece = held.piece;
    Values<P> x;
    evaluate<P>(operands, held, x);
    if (Body::kNeedsIndex || !piece.whole()) {  // ArgMax wants consecutive positions
      auto state = M::identity();
      INGOT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        if (piece.inside(k)) state = M::merge(state, M::lift(x[k], piece.at(k), 1));
      }
      return state;
    }
    Value all[M::kCount][kVectors * V];
    INGOT_UNROLL
    for (int n = 0; n < M::kCount; ++n) {
      INGOT_UNROLL
      for (int i = 0; i < kVectors * V; ++i) all[n][i] = x[i / V][n][i % V];
    }
    return M::lift(all, 0, 1);
  }

  // Leaves the block's state of a piece; merges the row's where that was the last.
  template <int P>
  INGOT_D static void bring(const typename Monoid<P>::State& state, const Memory& memory,
                            const Piece& piece) {
    using M = Monoid<P>;
    __shared__ bool last;
    u32* flag = memory.template flag<P>(piece.row());
    void* states = memory.template pieces<P>();
    const i64 count = memory.rows * kPieces, begin = piece.row() * kPieces;
    if (threadIdx.x == 0) {
      M::write(states, count, begin + piece.number(), state);
      __threadfence();
      last = atomicAdd(flag, 1u) == Memory::kMerged - 2;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    __shared__ TeamStorage<M, Threads> storage;
    auto all = M::identity();
    for (i64 i = threadIdx.x; i < kPieces; i += Threads) {
      all = M::merge(all, M::read(states, count, begin + i));
    }
    all = merge_team<M, Threads>(all, storage);
    if (threadIdx.x == 0) {
      M::write(memory.template merged<P>(), memory.rows, piece.row(), all);
      ptx::store_release(flag, Memory::kMerged);
    }
  }

  // Until phases 0 ... P of the row are merged: each begins behind the one before.
  template <int P>
  INGOT_D static void wait(const Memory& memory, i64 row) {
    if (threadIdx.x == 0) {
      while (ptx::load_acquire(memory.template flag<P>(row)) != Memory::kMerged) {
      }
    }
    __syncthreads();
  }

  // Phases 0 ... S - 1 of a piece, which are merged; phase 0 is evaluated.
  template <int S, int P>
  INGOT_D static void resolve(const Operands& operands, const Memory& memory, Held& held) {
    if constexpr (P < S) {
      const auto state =
          Monoid<P>::read(memory.template merged<P>(), memory.rows, held.piece.row());
      Body::template resolve<P>(operands, state, held.piece.b(), held.piece.e(), held.row);
      if constexpr (P + 1 < S) evaluate<P + 1>(operands, held);
      resolve<S, P + 1>(operands, memory, held);
    }
  }

  INGOT_D static void finish(const Operands& operands, Held& held) {
    const Piece& piece = held.piece;
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      if (piece.inside(k)) {
        Body::template finish<V>(operands, held.row, piece.b(), piece.e() + piece.at(k),
                                 held.element[k]);
      }
    }
    if (piece.number() == 0 && threadIdx.x == 0) {
      Body::finish_row(operands, held.row, piece.b(), piece.e());
    }
  }

  // Stages S and later; held: the piece of stage S, of which phase 0 is evaluated where S > 0.
  template <int S>
  INGOT_D static void do_stages(const Operands& operands, const Memory& memory, i64 task,
                                Held& held) {
    if constexpr (S > 0) {
      if (held.is) {
        wait<S - 1>(memory, held.piece.row());
        resolve<S, 0>(operands, memory, held);
      }
    }
    if constexpr (S < Body::kPhases) {
      __shared__ TeamStorage<Monoid<S>, Threads> storage;
      auto state = Monoid<S>::identity();
      if (held.is) state = fold<S>(operands, held);
      // What the next stage reads is on its way while the threads meet.
      Held next(operands, task - (S + 1) * kLag, memory.rows * kPieces);
      if (next.is) evaluate<0>(operands, next);
      if (held.is) {
        bring<S>(merge_team<Monoid<S>, Threads>(state, storage), memory, held.piece);
      }
      do_stages<S + 1>(operands, memory, task, next);
    } else if (held.is) {
      finish(operands, held);
    }
  }

  INGOT_D static void run(const Operands& operands, i64 rows, void* memory) {
    __shared__ u32 ticket;
    const Memory shared(memory, rows);
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (threadIdx.x == 0) ticket = atomicAdd(shared.ticket(), 1u);
    __syncthreads();
    Held first(operands, ticket, rows * kPieces);
    do_stages<0>(operands, shared, ticket, first);
  }
};

// Grid: wave_tasks() blocks. memory: wave_bytes(), as begin_waves() left it.
template <class Body, int V, int Threads>
INGOT_D void rows_in_waves(const typename Body::Operands& operands, i64 rows, void* memory) {
  RowsInWaves<Body, V, Threads>::run(operands, rows, memory);
}

// Before it, on the same memory. counters: wave_counters(). Grid: one block.
template <int Threads>
INGOT_D void begin_waves(void* memory, i64 counters) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (i64 i = threadIdx.x; i < counters; i += Threads) static_cast<u32*>(memory)[i] = 0;
}

}  // namespace ingot
