// Programs of libingot for the products of a process, kept by shape; what a run of each binds.
#pragma once

#include <array>
#include <atomic>
#include <compare>
#include <map>
#include <shared_mutex>

#include "blas/ingot_library.h"
#include "blas/programs.h"

namespace ingot::blas {

// All that a launch follows from: of addresses, how they are aligned.
struct Layout {
  int64_t batch;
  std::array<int64_t, 11> strides;
  std::array<uint8_t, 5> low_bits;
  friend auto operator<=>(const Layout&, const Layout&) = default;
};

// A call's tensors, in the order of the graph's leaves.
struct Tensors {
  static constexpr size_t kMost = 7;
  std::array<ingot_tensor, kMost> list{};
  int count = 0;
  Layout layout{};
};

struct Prepared {
  Outcome outcome = Outcome::failed;
  size_t workspace = 0;
};

struct Program {
  ingot_program* handle = nullptr;  // kept until the process ends
  std::atomic<bool> broken{false};
  std::shared_mutex mutex;
  std::map<Layout, Prepared> layouts;
};

// Of one product, or of a batch that one launch multiplies.
GraphKey key_of(const Matrices& matrices, const Request& request, bool scalars_in_memory);
Tensors tensors_of(const GraphKey& key, const Matrices& matrices, const Request& request,
                   int device);

// Whether the text of kernels may have these scalars: few different ones, since each makes kernels.
bool scalars_fit(const Scalars& scalars);

// nullptr where no more are kept.
Program* program_of(const GraphKey& key, Outcome precision, int device);

// What is known of a layout, or is found out now: who multiplies, and all is compiled. `capturing`:
// nothing may be compiled now.
Prepared prepared(Program& program, const Tensors& tensors, Outcome precision, bool capturing);

// Leaves the products of the program to the library from now on, and says why.
Outcome fail(Program& program, const char* doing);

}  // namespace ingot::blas
