// The rows sweep where nothing of long rows is wanted but their states: however few they are, all
// of the GPU folds them.
//
// As many blocks as are there at once stay, and draw pieces of the rows by a ticket. A block folds
// a piece and leaves its state; the one that leaves a row's last merges the row, and writes what is
// stored of it. No block waits for another.
//
// A piece has one barrier. What thread 0 alone knows it tells there: which piece is next, and
// whether the piece before was its row's last. What is told lies in one of two places, in turn, so
// that it is not overwritten before all have read it.
//
// Of one phase. States and the body: row_pieces.cuh.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/row_pieces.cuh"

namespace ingot {

template <class Body, int V, int Threads>
struct RowsFolded : RowPieces<Body, V, Threads> {
  static_assert(Body::kPhases == 1);
  using Base = RowPieces<Body, V, Threads>;
  using typename Base::Held;
  using typename Base::Memory;
  using typename Base::Operands;
  using typename Base::Piece;
  using Monoid = typename Base::template Monoid<0>;
  struct Meeting {
    u32 next;
    bool last;
    TeamStorage<Monoid, Threads> storage;
  };

  INGOT_D static void write_row(const Operands& operands, const Memory& memory,
                                const Piece& piece) {
    Held held(operands, piece.row() * Base::kPieces, memory.pieces_of_all());
    const auto state = Base::template merged_row<0>(memory, piece.row());
    Body::template resolve<0>(operands, state, held.piece.b(), held.piece.begin(), held.row);
    Base::finish_row(operands, held);
  }

  INGOT_D static void run(const Operands& operands, i64 rows, void* all_memory) {
    __shared__ Meeting meetings[2];
    const Memory memory(all_memory, rows);
    const u32 pieces = static_cast<u32>(memory.pieces_of_all());
    let_next_kernel_start();
    wait_for_previous_kernel();

    u32 ticket = 0;  // of thread 0: behind the piece that is folded
    if (threadIdx.x == 0) {
      meetings[1].next = atomicAdd(memory.ticket(), 1u);
      meetings[1].last = false;
      ticket = atomicAdd(memory.ticket(), 1u);
    }
    __syncthreads();
    Piece piece{meetings[1].next}, before = piece;
    int turn = 0;
    for (; pieces > piece.index; turn ^= 1) {
      Meeting &here = meetings[turn], &other = meetings[turn ^ 1];
      Held held(operands, piece.index, pieces);
      typename Base::template Values<0> x;
      Base::template evaluate<0>(operands, held, x);
      if (threadIdx.x == 0) here.next = ticket;
      const auto state =
          merge_team<Monoid, Threads>(Base::template lift<0>(held.piece, x), here.storage);
      if (threadIdx.x == 0) {
        here.last = Base::template leave<0>(state, memory, held.piece);
        ticket = atomicAdd(memory.ticket(), 1u);
      }
      if (other.last) write_row(operands, memory, before);
      before = piece;
      piece = {here.next};
    }
    __syncthreads();
    if (meetings[turn ^ 1].last) write_row(operands, memory, before);
  }
};

// Grid: as many blocks as are to stay, or one a piece. memory: wave_bytes(), as begin_waves() left
// it.
template <class Body, int V, int Threads>
INGOT_D void rows_folded(const typename Body::Operands& operands, i64 rows, void* memory) {
  RowsFolded<Body, V, Threads>::run(operands, rows, memory);
}

}  // namespace ingot
