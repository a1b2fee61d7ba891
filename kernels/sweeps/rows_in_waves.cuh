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
// Blocks draw tasks by a ticket: a block waits for such as run already, and none need be resident
// beside another. States and the body: row_pieces.cuh.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/row_pieces.cuh"

namespace ingot {

template <class Body, int V, int Threads>
struct RowsInWaves : RowPieces<Body, V, Threads> {
  using Base = RowPieces<Body, V, Threads>;
  using Base::kPieces;
  using typename Base::Held;
  using typename Base::Memory;
  using typename Base::Operands;
  using typename Base::Piece;
  template <int P>
  using Monoid = typename Base::template Monoid<P>;
  static constexpr i64 kLag = wave_lag(kPieces);

  template <int P>
  INGOT_D static typename Monoid<P>::State fold(const Operands& operands, Held& held) {
    typename Base::template Values<P> x;
    Base::template evaluate<P>(operands, held, x);
    return Base::template lift<P>(held.piece, x);
  }

  // Leaves the block's state of a piece; merges the row's where that was the last.
  template <int P>
  INGOT_D static void bring(const typename Monoid<P>::State& state, const Memory& memory,
                            const Piece& piece) {
    __shared__ bool last;
    if (threadIdx.x == 0) last = Base::template leave<P>(state, memory, piece);
    __syncthreads();
    if (last) Base::template merge_row<P>(memory, piece.row());
  }

  // Stages S and later; held: the piece of stage S, of which phase 0 is evaluated where S > 0.
  template <int S>
  INGOT_D static void do_stages(const Operands& operands, const Memory& memory, i64 task,
                                Held& held) {
    if constexpr (S > 0) {
      if (held.is) {
        // By one thread first: blocks that wait ask no oftener than they must.
        if (threadIdx.x == 0) memory.template merged<S - 1>().wait(held.piece.row());
        __syncthreads();
        Base::template resolve<S, 0>(operands, memory, held);
      }
    }
    if constexpr (S < Body::kPhases) {
      __shared__ TeamStorage<Monoid<S>, Threads> storage;
      auto state = Monoid<S>::identity();
      if (held.is) state = fold<S>(operands, held);
      // What the next stage reads is on its way while the threads meet.
      Held next(operands, task - (S + 1) * kLag, memory.pieces_of_all());
      if (next.is) Base::template evaluate<0>(operands, next);
      if (held.is) {
        bring<S>(merge_team<Monoid<S>, Threads>(state, storage), memory, held.piece);
      }
      do_stages<S + 1>(operands, memory, task, next);
    } else if (held.is) {
      Base::finish(operands, held);
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

}  // namespace ingot
