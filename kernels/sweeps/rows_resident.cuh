// The rows sweep where no cluster can keep a row, but all multiprocessors together can: operands
// are read once.
//
// As many blocks as are there at once stay, and draw pieces of the rows by a ticket, all in one
// order. A block does, over and over:
//
//   folds a piece, which lies in the L2 cache, and leaves its state; asks for the next to be
//   brought there; finishes the oldest piece that it keeps, whose row is merged; keeps the one it
//   has folded
//
// so that the reads of one piece and the writes of another are under way together, and a row's
// states have as long to come together as the blocks have room for other pieces. What one thread
// asks memory for it tells the others at a barrier when it is there: a ticket and the state of the
// oldest piece's row with the fold, whether the piece was its row's last behind the writes.
//
// No block waits for one that need not be there. Pieces are drawn in order: a block that has drawn
// one of a later row knows that all pieces of the row that it waits for are drawn, and by blocks
// that wait, if at all, for earlier rows. Where a row is not drawn whole yet and there is no room,
// which is so where few blocks are there, a piece is folded and not kept, and read again.
//
// Of one phase. States and the body: row_pieces.cuh.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/row_pieces.cuh"
#include "sweeps/shared_row.cuh"

namespace ingot {

template <class Body, int V, int Threads>
struct RowsResident : RowPieces<Body, V, Threads> {
  static_assert(Body::kPhases == 1);
  using Base = RowPieces<Body, V, Threads>;
  using Base::kPieces;
  using Base::kVectors;
  using typename Base::Held;
  using typename Base::Memory;
  using typename Base::Operands;
  using typename Base::Piece;
  using Monoid = typename Base::template Monoid<0>;
  using Shared = SharedRow<Body, V, Threads>;

  // What a block has folded and not finished, oldest first. It has never more than a row's pieces:
  // from the first of another row on it finishes one before it draws the next.
  struct Queue {
    static constexpr u32 kKept = 1u << 31, kEntries = static_cast<u32>(kPieces) + 1;
    u32* entries;  // pieces, with kKept; in shared memory
    u32 room;      // pieces that can be kept
    u32 begin = 0, count = 0;
    u32 oldest = 0, kept = 0;  // of those that are kept: where, and how many

    INGOT_D Piece piece() const { return {entries[begin] & ~kKept}; }
    INGOT_D bool front_is_kept() const { return (entries[begin] & kKept) != 0; }
    INGOT_D bool full() const { return kept == room; }
    INGOT_D u32 slot(u32 n) const { return (oldest + n) % room; }
    INGOT_D void push(u32 piece) {
      const u32 at = (begin + count) % kEntries;
      if (threadIdx.x == 0) entries[at] = full() ? piece : piece | kKept;
      if (!full()) ++kept;
      ++count;
    }
    INGOT_D void pop() {
      const bool was_kept = front_is_kept();
      begin = (begin + 1) % kEntries;
      --count;
      if (was_kept) {
        oldest = slot(1);
        --kept;
      }
    }
  };

  INGOT_D static void keep(const Held& held, u32 slot) {
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) Shared::put(slot * kVectors + k, held.element[k]);
  }

  // Vectors of results: all of their operands are read before the first is written. More at once
  // take more registers than there are.
  template <int N>
  INGOT_D static void finish_kept(const Operands& operands, const Held& held, u32 slot) {
    static_assert(kVectors % N == 0);
#pragma unroll 1
    for (int k = 0; k < kVectors; k += N) {
      typename Body::template Element<V> element[N];
      INGOT_UNROLL
      for (int n = 0; n < N; ++n) element[n] = Shared::get(slot * kVectors + k + n);
      INGOT_UNROLL
      for (int n = 0; n < N; ++n) {
        if (held.piece.inside(k + n)) {
          Body::template finish<V>(operands, held.row, held.piece.b(), held.piece.place(k + n),
                                   element[n]);
        }
      }
    }
    Base::finish_row(operands, held);
  }

  // What threads tell each other of a piece: with its fold, the one to be folded next, and the
  // state of the oldest piece's row, if it is merged; at its end, whether it was its row's last.
  struct Meeting {
    u32 next;
    bool last, is_merged;
    typename Monoid::State state;
  };

  INGOT_D static void finish_front(const Operands& operands, const Memory& memory,
                                   const Queue& queue, const typename Monoid::State& state) {
    const Piece piece = queue.piece();
    Held held(operands, piece.index, memory.pieces_of_all());
    if (!queue.front_is_kept()) Base::template evaluate<0>(operands, held);
    Body::template resolve<0>(operands, state, piece.b(), piece.begin(), held.row);
    if (queue.front_is_kept()) {
      finish_kept<2>(operands, held, queue.slot(0));
    } else {
      Base::finish(operands, held);
    }
  }
  // Finishes pieces until one more can be kept, or until those of row `drawn`; or all.
  INGOT_D static void make_room(const Operands& operands, const Memory& memory, Queue& queue,
                                const Meeting& meeting, bool all, i64 drawn) {
    bool is_known = meeting.is_merged;
    while (queue.count > 0 && (all || queue.full())) {
      const i64 row = queue.piece().row();
      if (!all && row == drawn) return;
      auto state = meeting.state;
      if (!is_known) {
        __shared__ typename Monoid::State waited;
        __syncthreads();  // all have read what was waited for before
        if (threadIdx.x == 0) waited = memory.template merged<0>().wait(row);
        __syncthreads();
        state = waited;
      }
      finish_front(operands, memory, queue, state);
      is_known = false;
      queue.pop();
    }
  }

  INGOT_D static void prefetch(const Operands& operands, u32 index, u32 pieces) {
    if (index >= pieces) return;
    const Piece piece{index};
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      if (piece.inside(k)) {
        Body::template prefetch<V>(operands, piece.b(), piece.place(k));
      }
    }
  }

  // By a thread of another warp than that which draws pieces.
  INGOT_D static void ask_for_front(const Memory& memory, const Queue& queue, Meeting& meeting) {
    if (threadIdx.x != 32) return;
    meeting.is_merged =
        queue.count > 0 && memory.template merged<0>().read(queue.piece().row(), meeting.state);
  }

  INGOT_D static void run(const Operands& operands, i64 rows, void* all_memory) {
    __shared__ u32 entries[Queue::kEntries];
    __shared__ Meeting meeting;
    __shared__ TeamStorage<Monoid, Threads> storage;
    const Memory memory(all_memory, rows);
    const u32 pieces = static_cast<u32>(rows * kPieces);
    const u32 room = static_cast<u32>(Shared::vectors() / kVectors);
    Queue queue{entries, room < kPieces ? room : static_cast<u32>(kPieces)};
    let_next_kernel_start();
    wait_for_previous_kernel();

    u32 ticket = 0;  // of thread 0: behind the piece that is folded
    if (threadIdx.x == 0) {
      meeting.next = atomicAdd(memory.ticket(), 1u);
      ticket = atomicAdd(memory.ticket(), 1u);
    }
    __syncthreads();
    u32 index = meeting.next;
    __syncthreads();
    while (index < pieces) {
      Held held(operands, index, pieces);
      typename Base::template Values<0> x;
      Base::template evaluate<0>(operands, held, x);
      if (threadIdx.x == 0) meeting.next = ticket;
      ask_for_front(memory, queue, meeting);
      const auto state =
          merge_team<Monoid, Threads>(Base::template lift<0>(held.piece, x), storage);
      const u32 next = meeting.next;
      prefetch(operands, next, pieces);
      bool was_last = false;
      if (threadIdx.x == 0) {
        was_last = Base::template leave<0>(state, memory, held.piece);
        ticket = atomicAdd(memory.ticket(), 1u);
      }
      make_room(operands, memory, queue, meeting, false, held.piece.row());
      if (!queue.full()) keep(held, queue.slot(queue.kept));
      queue.push(index);
      if (threadIdx.x == 0) meeting.last = was_last;
      __syncthreads();
      if (meeting.last) Base::template merge_row<0>(memory, held.piece.row());
      index = next;
    }
    ask_for_front(memory, queue, meeting);
    __syncthreads();
    make_room(operands, memory, queue, meeting, true, 0);
  }
};

// Grid: as many blocks as are to stay, or one a piece. memory: wave_bytes(), as begin_waves() left
// it.
template <class Body, int V, int Threads>
INGOT_D void rows_resident(const typename Body::Operands& operands, i64 rows, void* memory) {
  RowsResident<Body, V, Threads>::run(operands, rows, memory);
}

}  // namespace ingot
