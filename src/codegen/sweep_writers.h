// One writer for each template of kernels/sweeps/: each fills a KernelSource from a sweep.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "codegen/body_writer.h"
#include "codegen/kernel_source.h"
#include "codegen/turned.h"

namespace ingot {

KernelSource write_map(const Plan& plan, int sweep);
KernelSource write_columns(const Plan& plan, int sweep);
// The second half of a columns sweep, for a product whose epilogue emits the partial states.
KernelSource write_merge(const Plan& plan, int sweep);
KernelSource write_rows(const Plan& plan, int sweep);
// See generate_packing().
std::optional<KernelSource> write_packing(const Plan& plan, int sweep, ValueId value,
                                          hopper::Scheme scheme);
KernelSource write_scan(const Plan& plan, int sweep);
KernelSource write_groups(const Plan& plan, int sweep);
// See generate_turned().
std::optional<KernelSource> write_rows_turned(const Plan& plan, int sweep,
                                              const TurnedOperands& operands);
KernelSource write_map_turned(const Plan& plan, int sweep, const TurnedOperands& operands);

inline constexpr int64_t kRowsOfASector = 8;  // side by side they fill a sector of memory
inline constexpr int64_t kElementsByI32 = int64_t{1} << 31;  // of a sample

// Reductions of the sweep's body.
std::vector<ValueId> reductions_of(const Graph& graph, const Sweep& sweep);
// Elements of a sample behind one another along the axes that lie within those of a row.
int64_t inner_extent(const Shape& space, AxisMask row);
// Whether all reductions of a rows sweep run over the same axes, neighbours of each other: rows of
// one piece, or enough of them side by side.
bool reduces_rows(const Plan& plan, int sweep);

// Names of a sweep's kernel and functor: "fused_normalise", "FusedNormalise".
std::string kernel_name(const Plan& plan, int sweep);
std::string functor_name(const std::string& kernel);

// A field "    float v5_add[V];" of a functor's struct, at the current element.
std::string field_declaration(const SweepContext& context, ValueId value, bool lanes);

// The widest of the types that a sweep's reductions take; i64 is reduced in double.
std::string reduction_type(const SweepContext& context, const std::vector<ValueId>& reductions);

// The values that a map's or a columns' body hoists out of the loop over samples (`shared`) and
// loads per element (`held`), and the three functions that the templates call for them.
class SampleBody {
 public:
  explicit SampleBody(SweepContext& context) : context_(context) {}

  // A writer whose values come from the structs Feature and Element.
  FunctionWriter writer();
  // struct Feature, struct Element, feature(), load(): to be asked for after the writer was used.
  std::string declarations();
  // How many values a sample's element loads.
  size_t loads() const { return held_.size(); }
  // How many it has of the element alone.
  size_t shares() const { return shared_.size(); }
  // How many of both are one each for the elements of a vector.
  size_t loaded_lanes() const { return lanes_of(held_); }
  size_t shared_lanes() const { return lanes_of(shared_); }

 private:
  Reference shared(ValueId value);
  Reference held(ValueId value);
  size_t lanes_of(const std::vector<ValueId>& values) const;

  SweepContext& context_;
  std::vector<ValueId> shared_, held_;
};

// How kernels/sweeps/rows_turned.cuh deals rows and their vectors to a block.
struct TurnedBlock {
  int64_t rows = 0;  // of a warp
  int64_t warps = 1, groups = 1;
  int at_once = 0;  // see kernel_text()

  int64_t team() const { return kWarpLanes / rows * warps; }
  int threads() const { return static_cast<int>(kWarpLanes * warps * groups); }
  // Small teams share a block.
  void fill() { groups = std::max<int64_t>(1, kFewestWarps / warps); }
  // Of a map: rows that fill a sector of memory with elements of so many bytes. No more than 16: of
  // what lies row by row two lanes move a sector.
  static int64_t rows_of(int64_t bytes) { return bytes < 4 ? 16 : 8; }

  static constexpr int64_t kWarpLanes = 32, kFewestWarps = 8;
};
// For rows of so many vectors, of which a thread holds so many values each, whose reductions have
// so many bytes of states. are_most: as TurnedOperands'. Nothing where rows are too long to be
// held.
std::optional<TurnedBlock> turned_block(int64_t vectors, int64_t held_of_vector,
                                        int64_t state_bytes, bool are_most);

// Assembles a translation unit.
struct UnitParts {
  std::string comment;
  std::vector<std::string> includes;
  std::string functor;  // name
  std::string members;  // of the functor, indented by two
  std::vector<std::string> kernels;
};
std::string translation_unit(const UnitParts& parts);
// An extern "C" kernel: `parameters` after the operands, and the call. cluster: blocks that share
// their memory. at_once: blocks that a multiprocessor is to have, where that is known.
std::string kernel_text(const std::string& name, const std::string& functor, int threads,
                        const std::string& parameters, const std::string& call, int64_t cluster = 1,
                        int at_once = 0);
// What the sweep does, one line a value, for the comment at the top.
std::string sweep_comment(const SweepContext& context, const std::string& kernel);

}  // namespace ingot
