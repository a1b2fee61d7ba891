// Rows cut into pieces that many blocks work on: what is done with a piece, and where blocks meet.
//
// A piece is kPiece consecutive elements, kVectors vectors of each thread. The states of a row's
// pieces lie in memory. The block that leaves the last one merges all, in their order, and leaves
// the row's state, for which whoever finishes pieces of the row waits.
//
//   rows_in_waves.cuh      a block for some pieces' stages; what is read again lies in the L2 cache
//   rows_resident.cuh      blocks that stay, and keep what they have folded
//   rows_folded.cuh        blocks that stay, where nothing is finished but the rows' states
//
// The body is that of rows.cuh.
#pragma once

#include "common/dependent_launch.cuh"
#include "sweeps/fold.cuh"
#include "sweeps/waves.cuh"

namespace ingot {

// An element of a sample as the first of its thread's in a piece, and how far it lies behind that,
// where a piece is one feature after another: all of a thread's vectors share one address, and what
// is one value for all features is read once a piece.
struct InPiece {
  u32 first;
  i64 offset;
};
template <class Place>
inline constexpr bool kIsInPiece = false;
template <>
inline constexpr bool kIsInPiece<InPiece> = true;

// States on their way from block to block. Each word lies beside a mark in 64 bits, which are read
// and written whole: who sees the mark has the word, so that no block waits until its results are
// in memory, nor empties its L1 cache, as it would at a fence. (The idea of NCCL's LL protocol.)
template <class State>
struct MarkedStates {
  static constexpr int kWords = sizeof(State) / 4;
  static constexpr u64 kMark = u64{1} << 32;
  static_assert(sizeof(State) % 4 == 0);
  union Words {
    State state;
    u32 word[kWords];
    INGOT_D Words() {}
  };
  u64* memory;
  i64 count;

  INGOT_D void write(i64 index, const State& state) const {
    Words words;
    words.state = state;
    INGOT_UNROLL
    for (int w = 0; w < kWords; ++w) {
      ptx::store_relaxed(memory + w * count + index, kMark | words.word[w]);
    }
  }
  // Whether it has been written; all of its words are asked for at once.
  INGOT_D bool read(i64 index, State& state) const {
    u64 read[kWords];
    INGOT_UNROLL
    for (int w = 0; w < kWords; ++w) read[w] = ptx::load_relaxed(memory + w * count + index);
    Words words;
    bool all = true;
    INGOT_UNROLL
    for (int w = 0; w < kWords; ++w) {
      all = all && read[w] >= kMark;
      words.word[w] = static_cast<u32>(read[w]);
    }
    state = words.state;
    return all;
  }
  INGOT_D State wait(i64 index) const {
    State state;
    while (!read(index, state)) {
    }
    return state;
  }
  INGOT_D u64* end() const { return memory + kWords * count; }
};

// What tasks meet in: the ticket; how many pieces came, a row and phase; states of pieces and of
// rows, each phase's in room of its own.
template <class Body, i64 Pieces>
struct PieceMemory {
  u32* counters;
  u32 rows;
  template <int P>
  using States = MarkedStates<typename decltype(Body::monoid(Index<P>{}))::State>;

  INGOT_D PieceMemory(void* memory, i64 all_rows)
      : counters(static_cast<u32*>(memory)), rows(static_cast<u32>(all_rows)) {}

  INGOT_D i64 pieces_of_all() const { return static_cast<i64>(rows) * Pieces; }
  INGOT_D u32* ticket() const { return counters; }
  template <int P>
  INGOT_D u32* arrived(i64 row) const {
    return counters + 1 + P * rows + row;
  }
  template <int P>
  INGOT_D States<P> pieces() const {
    if constexpr (P == 0) {
      return {reinterpret_cast<u64*>(counters) + wave_counter_bytes(rows, Body::kPhases) / 8,
              pieces_of_all()};
    } else {
      return {merged<P - 1>().end(), pieces_of_all()};
    }
  }
  template <int P>
  INGOT_D States<P> merged() const {
    return {pieces<P>().end(), rows};
  }
};

template <class Body, int V, int Threads>
struct RowPieces {
  using Operands = typename Body::Operands;
  using Row = typename Body::Row;
  using Value = typename Body::Value;
  using Place = typename Body::Place;
  template <int P>
  using Monoid = decltype(Body::monoid(Index<P>{}));
  static constexpr i64 kPiece = wave_piece(V);
  static constexpr i64 kPieces = wave_pieces(Body::kRow, V);
  static constexpr int kVectors = kPiece / (Threads * V);
  static_assert(kVectors * Threads * V == kPiece);
  static constexpr bool kWhole = Body::kRow % kPiece == 0;  // all of its pieces
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
    INGOT_D bool inside(int k) const { return kWhole || at(k) < Body::kRow; }
    INGOT_D bool whole() const { return kWhole || (number() + 1) * kPiece <= Body::kRow; }

    INGOT_D static Place place(i64 first, i64 offset) {
      if constexpr (kIsInPiece<Place>) {
        return {static_cast<u32>(first), offset};
      } else {
        return static_cast<Place>(first + offset);
      }
    }
    INGOT_D Place begin() const { return place(e() + number() * kPiece, 0); }
    // Of vector k. Past the row's end: the thread's first vector again, or the row's last.
    INGOT_D Place place(int k) const {
      const i64 first = inside(0) ? at(0) : Body::kRow - V;
      return place(e() + first, inside(k) ? static_cast<i64>(k) * Threads * V : 0);
    }
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
      Body::row(operands, piece.b(), piece.begin(), row);
    }
  };
  template <int P>
  using Values = Value[kVectors][Monoid<P>::kCount][V];

  template <int P>
  INGOT_D static void evaluate(const Operands& operands, Held& held, Values<P>& x) {
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      Body::template phase<P, V>(operands, held.row, held.piece.b(), held.piece.place(k),
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
    if (!piece.whole()) {
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
    return M::template lift<V>(all, piece.at(0), static_cast<i64>(Threads) * V);
  }

  // Leaves the block's state of a piece, by one thread. Whether it was the row's last.
  template <int P>
  INGOT_D static bool leave(const typename Monoid<P>::State& state, const Memory& memory,
                            const Piece& piece) {
    memory.template pieces<P>().write(piece.index, state);
    return atomicAdd(memory.template arrived<P>(piece.row()), 1u) == kPieces - 1;
  }

  // The states of a row's pieces, which all were left, merged.
  template <int P>
  INGOT_D static typename Monoid<P>::State merged_row(const Memory& memory, i64 row) {
    using M = Monoid<P>;
    __shared__ TeamStorage<M, Threads> storage;
    auto all = M::identity();
    for (i64 i = threadIdx.x; i < kPieces; i += Threads) {
      all = M::merge(all, memory.template pieces<P>().wait(row * kPieces + i));
    }
    return merge_team<M, Threads>(all, storage);
  }
  // Leaves the row's state.
  template <int P>
  INGOT_D static void merge_row(const Memory& memory, i64 row) {
    const auto all = merged_row<P>(memory, row);
    if (threadIdx.x == 0) memory.template merged<P>().write(row, all);
  }

  // Phases 0 ... S - 1 of a piece, whose row's states are there; phase 0 is evaluated.
  template <int S, int P>
  INGOT_D static void resolve(const Operands& operands, const Memory& memory, Held& held) {
    if constexpr (P < S) {
      const auto state = memory.template merged<P>().wait(held.piece.row());
      Body::template resolve<P>(operands, state, held.piece.b(), held.piece.begin(), held.row);
      if constexpr (P + 1 < S) evaluate<P + 1>(operands, held);
      resolve<S, P + 1>(operands, memory, held);
    }
  }

  INGOT_D static void finish(const Operands& operands, Held& held) {
    const Piece& piece = held.piece;
    INGOT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      if (piece.inside(k)) {
        Body::template finish<V>(operands, held.row, piece.b(), piece.place(k), held.element[k]);
      }
    }
    finish_row(operands, held);
  }

  // What is stored of a row once.
  INGOT_D static void finish_row(const Operands& operands, const Held& held) {
    const Piece& piece = held.piece;
    if (piece.number() == 0 && threadIdx.x == 0) {
      Body::finish_row(operands, held.row, piece.b(), piece.begin());
    }
  }
};

// Before the sweep, on the same memory: bytes, a multiple of 16. Grid: kWaveBeginBlocks.
template <int Threads>
INGOT_D void begin_waves(void* memory, i64 bytes) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 step = static_cast<i64>(gridDim.x) * Threads;
  for (i64 i = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x; i < bytes / 16; i += step) {
    static_cast<uint4*>(memory)[i] = uint4{0, 0, 0, 0};
  }
}

}  // namespace ingot
