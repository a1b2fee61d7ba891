// What blocks of the rows sweep keep of rows that registers cannot hold. The body: rows.cuh.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"
#include "sweeps/tensor.cuh"

namespace ingot {

// The live values of a thread's vectors, in shared memory: what later phases need not compute from
// operands again. How many there is room for is told by the launch.
template <class Body, int V, int Threads>
struct SharedRow {
  using Element = typename Body::template Element<V>;
  // Neighbouring threads' pieces lie side by side, whatever the number of values.
  static constexpr int kWords = (sizeof(Element) + 3) / 4;
  static constexpr int kPieceWords = kWords % 4 == 0 ? 4 : 1;
  static constexpr int kPieces = kWords / kPieceWords;
  using Piece = Pack<u32, kPieceWords>;
  union Pieces {
    Element element;
    Piece piece[kPieces];
    INGOT_D Pieces() {}
  };

  INGOT_D static int vectors() {
    return static_cast<int>(ptx::dynamic_shared_bytes() / (Threads * kPieces * sizeof(Piece)));
  }
  INGOT_D static Piece* place(int vector) {
    extern __shared__ __align__(16) unsigned char row_memory[];
    return reinterpret_cast<Piece*>(row_memory) + vector * kPieces * Threads + threadIdx.x;
  }
  INGOT_D static void put(int vector, const Element& element) {
    Pieces pieces;
    pieces.element = element;
    INGOT_UNROLL
    for (int i = 0; i < kPieces; ++i) place(vector)[i * Threads] = pieces.piece[i];
  }
  INGOT_D static Element get(int vector) {
    Pieces pieces;
    INGOT_UNROLL
    for (int i = 0; i < kPieces; ++i) pieces.piece[i] = place(vector)[i * Threads];
    return pieces.element;
  }
};

}  // namespace ingot
