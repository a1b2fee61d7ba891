// Runs a phase on one tile after another, in one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/phase.h"
#include "cpu/tiling.h"

namespace ingot::cpu {

// A tensor in memory as a phase's space sees it.
struct Memory {
  std::byte* data = nullptr;
  Extents strides{};  // in elements; 0 where the value does not vary
  DType dtype = DType::f32;
};

// What a phase reads and writes during one run.
struct Bindings {
  std::vector<Memory> loads;   // as Phase::loads
  std::vector<Memory> stores;  // as Phase::stores
};

// States of the elements of a tile that a reduction keeps, dense over the kept axes.
struct TileStates {
  double* first;
  double* second;
};

// The interpreter's registers; one for each thread at a time. Keeps its memory between runs.
class Scratch {
 public:
  std::byte* reserve(size_t bytes);
  ~Scratch();
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

class Interpreter {
 public:
  // `tile` is the largest tile that will be run.
  Interpreter(const Phase& phase, const Bindings& bindings, Level level, const Extents& tile,
              Scratch* scratch);

  // Computes what does not vary with the batch, for the tiles of a strip.
  void begin_strip(const Box& strip);

  // Computes a tile of that strip and stores what is to be stored.
  void run_tile(const Box& tile);
  // Merges the tile just computed into a statistic's states; `count` elements are in them already.
  void gather(const StateStep& statistic, TileStates states, double count);

 private:
  struct Register {
    std::byte* data = nullptr;
    Extents strides{};
  };

  void bind_loads(bool hoisted);
  void bind_computed(const std::vector<int>& slots);
  Register scratch_register(const Slot& slot);
  bool usable_in_place(const Slot& slot, const Memory& memory) const;
  Extents sizes_of(const Slot& slot) const;
  void run_steps(bool hoisted);
  // interpreter_pointwise.cpp
  void run_pointwise(const Run& run);
  template <class T, size_t operands>
  void run_blocks(const Run& run, const Primitives<T>& primitives);
  void run_convert(const Step& step);
  void run_reduce(const Step& step);
  void run_stores();
  void copy_in(const Slot& slot, const Memory& memory, const Register& out);
  void copy_out(const Slot& slot, const Register& in, const Memory& memory);
  template <class T>
  void read_state(const StateStep::Read& read, const Extents& kept, double count,
                  const Primitives<T>& primitives);
  template <class T>
  void reduce_box(const StateStep& state, TileStates states, double count,
                  const Primitives<T>& primitives);

  const Phase& phase_;
  const Bindings& bindings_;
  const Primitives<float>& single_;
  const Primitives<double>& wide_;
  std::vector<Register> registers_;  // by slot
  std::vector<size_t> buffer_offsets_;
  std::vector<double> constants_;  // by slot, each as float or double
  std::byte* scratch_;
  double* states_;  // room for the states of reductions inside a tile
  int64_t states_capacity_;
  AxisOrder order_ = kNaturalOrder;  // of the axes in registers
  Box tile_;
};

// The identity of a monoid in `n` states.
void clear_states(ReduceMonoid monoid, TileStates states, int64_t n);
Reading reading_of(Finish finish);

}  // namespace ingot::cpu
