// A phase: a list of operations on one iteration space, ready to run on any tile of it. The body of
// a sweep is one phase, its tail another.
//
// A phase knows nothing of the batch size or of addresses. Registers are blocks of scratch memory
// (or the caller's memory, where it can be used as it lies) that hold one tile of one value.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu/primitives.h"
#include "graph/graph.h"
#include "plan/plan.h"

namespace ingot::cpu {

// How a value is computed: f32, f16, bf16 and boolean as float; f64 and i64 as double.
enum class Class : uint8_t { single, wide };
Class class_of(DType dtype);

// A value or a temporary of a phase.
struct Slot {
  enum class Kind : uint8_t { constant, load, computed } kind = Kind::computed;
  Class cls = Class::single;
  DType dtype = DType::f32;          // in memory (load)
  std::array<bool, kAxes> varies{};  // axes along which it is not broadcast
  double constant = 0;
  int load = -1;       // index into Phase::loads
  int store = -1;      // computed: index into Phase::stores whose memory may serve as its register
  int buffer = -1;     // computed, or a load that must be copied: its scratch buffer
  bool inner = false;  // computed and read within one run of steps only
};

// A reduction resolved inside a tile (kept axes stay), or a statistic gathered over tiles.
struct StateStep {
  ReduceMonoid monoid = ReduceMonoid::sum;
  int arg = -1;
  AxisMask axes = 0;
  struct Read {
    Finish finish;
    int slot;
    ValueId value;
  };
  std::vector<Read> reads;
};

struct Step {
  enum class Kind : uint8_t { pointwise, convert, reduce } kind = Kind::pointwise;
  PointwiseOp op = PointwiseOp::add_;  // pointwise, unless it is a composition
  Composite composite = Composite::none;
  Class cls = Class::single;  // pointwise: what it computes in
  DType dtype = DType::f32;   // convert, and pointwise cast_: rounds to this dtype
  int out = -1;
  std::array<int, kMaxInputs> in{-1, -1, -1, -1, -1};
  int arity = 0;
  int state = -1;        // reduce: index into Phase::reductions
  bool hoisted = false;  // does not vary with the batch
  // pointwise: where out and in stand among the operands of its run.
  std::array<int, kMaxInputs + 1> operands{};
};

// Steps that are done together. Pointwise ones over the same elements go block by block, so that
// what only they read never leaves the level-1 cache; any other step is a run of its own.
struct Run {
  int begin = 0, end = 0;  // of Phase::steps
  std::vector<int> outer;  // pointwise: slots that the run shares with others, then its own
  std::vector<int> inner;
};
// A run's outer operands and its steps, at most.
inline constexpr size_t kMaxOperands = 16;
inline constexpr int kMaxRunSteps = 32;

struct BufferClass {
  Class cls = Class::single;
  std::array<bool, kAxes> varies{};
  bool block = false;  // holds a block of a run rather than a tile
  friend bool operator==(const BufferClass&, const BufferClass&) = default;
};

struct Phase {
  Shape space;
  std::vector<Slot> slots;
  std::vector<ValueId> loads;  // what each load slot reads
  std::vector<int> load_slots;
  std::vector<Step> steps;  // hoisted ones first
  std::vector<Run> runs;
  std::vector<StateStep> reductions;
  std::vector<StateStep> statistics;
  struct Store {
    ValueId value;
    int slot;
  };
  std::vector<Store> stores;
  std::vector<BufferClass> buffers;
  std::vector<int> strip_slots, tile_slots;  // what is computed once for a strip, and by every tile
  AxisMask whole_axes = 0;                   // axes that a tile may not cut

  // Whether the space has one element along an axis, whatever the batch.
  bool space_is_one(size_t axis) const;
};

// `nodes` in order; values among `loads` are read from memory, where a node or store asks for them.
// `shapes` as in Sweep.
Phase lower_phase(const Graph& graph, const Shape& space, const std::map<ValueId, Shape>& shapes,
                  const std::vector<ValueId>& loads, const std::vector<ValueId>& nodes,
                  const std::vector<SharedState>& reductions,
                  const std::vector<SharedState>& statistics, const std::vector<ValueId>& stores);

}  // namespace ingot::cpu
