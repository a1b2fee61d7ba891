// Rows cut into pieces that many blocks work on: what is done with a piece, and where blocks meet.
//
// A piece is kPiece consecutive elements, kVectors vectors of each thread. The states of a row's
// pieces lie in memory. The block that leaves the last one merges all, in their order, and raises
// the row's flag, for which whoever finishes pieces of the row waits.
//
//   rows_in_waves.cuh      a block for some pieces' stages; what is read again lies in the L2 cache
//   rows_resident.cuh      blocks that stay, and keep what they have folded
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
struct PieceMemory {
  static constexpr u32 kMerged = static_cast<u32>(Pieces) + 1;
  u32* counters;
  u32 rows;
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));

  INGOT_D PieceMemory(void* memory, i64 all_rows)
      : counters(static_cast<u32*>(memory)), rows(static_cast<u32>(all_rows)) {}

  INGOT_D i64 pieces_of_all() const { return static_cast<i64>(rows) * Pieces; }
  INGOT_D u32* ticket() const { return counters; }
  template <int P>
  INGOT_D u32* flag(i64 row) const {
    return counters + 1 + P * rows + row;
  }
  // Of a phase: `Pieces` states a row, then one a row.
  template <int P>
  INGOT_D unsigned char* pieces() const {
    if constexpr (P == 0) {
      return reinterpret_cast<unsigned char*>(counters) + wave_counter_bytes(rows, Body::kPhases);
    } else {
      return merged<P - 1>() + Monoid<P - 1>::bytes(rows);
    }
  }
  template <int P>
  INGOT_D unsigned char* merged() const {
    return pieces<P>() + Monoid<P>::bytes(static_cast<i64>(rows) * Pieces);
  }
};

template <class Body, int V, int Threads>
struct RowPieces {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));
  static constexpr int kVectors = wave_vectors(V);
  static constexpr i64 kPiece = static_cast<i64>(Threads) * V * kVectors;
  static constexpr i64 kPieces = wave_pieces(Body::kRow, V, Threads);
  using Memory = PieceMemory<Body, kPieces>;

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
  INGOT_D static typename Monoid<P>::State lift(const Piece& piece, const Values<P>& x) {
    using M = Monoid<P>;
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

  // Leaves the block's state of a piece, by one thread. Whether it was the row's last.
  template <int P>
  INGOT_D static bool leave(const typename Monoid<P>::State& state, const Memory& memory,
                            const Piece& piece) {
    const i64 count = memory.pieces_of_all();
    Monoid<P>::write(memory.template pieces<P>(), count, piece.index, state);
    __threadfence();
    return atomicAdd(memory.template flag<P>(piece.row()), 1u) == Memory::kMerged - 2;
  }

  // Merges the states of a row's pieces, which all were left, and raises its flag.
  template <int P>
  INGOT_D static void merge_row(const Memory& memory, i64 row) {
    using M = Monoid<P>;
    __shared__ TeamStorage<M, Threads> storage;
    const i64 count = memory.pieces_of_all(), begin = row * kPieces;
    __threadfence();
    auto all = M::identity();
    for (i64 i = threadIdx.x; i < kPieces; i += Threads) {
      all = M::merge(all, M::read(memory.template pieces<P>(), count, begin + i));
    }
    all = merge_team<M, Threads>(all, storage);
    if (threadIdx.x == 0) {
      M::write(memory.template merged<P>(), memory.rows, row, all);
      ptx::store_release(memory.template flag<P>(row), Memory::kMerged);
    }
  }

  // Phases 0 ... P of the row: each begins behind the one before.
  template <int P>
  INGOT_D static bool is_merged(const Memory& memory, i64 row) {
    return ptx::load_acquire(memory.template flag<P>(row)) == Memory::kMerged;
  }
  template <int P>
  INGOT_D static typename Monoid<P>::State merged(const Memory& memory, i64 row) {
    return Monoid<P>::read(memory.template merged<P>(), memory.rows, row);
  }

  // Until they are merged.
  template <int P>
  INGOT_D static void wait(const Memory& memory, i64 row) {
    if (threadIdx.x == 0) {
      while (!is_merged<P>(memory, row)) {
      }
    }
    __syncthreads();
  }

  // Phases 0 ... S - 1 of a piece, which are merged; phase 0 is evaluated.
  template <int S, int P>
  INGOT_D static void resolve(const Operands& operands, const Memory& memory, Held& held) {
    if constexpr (P < S) {
      const auto state = merged<P>(memory, held.piece.row());
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
    finish_row(operands, held);
  }

  // What is stored of a row once.
  INGOT_D static void finish_row(const Operands& operands, const Held& held) {
    const Piece& piece = held.piece;
    if (piece.number() == 0 && threadIdx.x == 0) {
      Body::finish_row(operands, held.row, piece.b(), piece.e());
    }
  }
};

// Before the sweep, on the same memory. counters: wave_counters(). Grid: one block.
template <int Threads>
INGOT_D void begin_waves(void* memory, i64 counters) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (i64 i = threadIdx.x; i < counters; i += Threads) static_cast<u32*>(memory)[i] = 0;
}

}  // namespace ingot
