// Memory that products work in. All of it together stays within INGOT_BLAS_MEMORY, or an eighth of
// the card; it takes none of the card's last sixteenth, and gives back what it has when the program
// comes to need that: such a card's products are the library's.
#pragma once

#include <cstddef>
#include <mutex>

#include "blas/device.h"

namespace ingot::blas {

// Memory for the launches of one call; whoever holds it holds them together. Empty: there is none.
struct Scratch {
  void* memory = nullptr;
  size_t bytes = 0;
  std::unique_lock<std::mutex> together;
};

// At least `bytes`, aligned to 256, in the context that is current. What runs on a stream runs in
// order, so one buffer serves all its products. What a stream captures runs whenever the graph
// does: each capture has buffers of its own, which live as long as the graph and whatever is made
// of it.
Scratch scratch_for(const Place& place, Stream stream, size_t bytes, bool capturing);

}  // namespace ingot::blas
