// What a call asks of the host, as data: steps in order over the caller's tensors, its workspace
// and frozen weights. It is the same for all calls whose tensors are laid out alike; run() fills in
// the addresses. `ingot explain` prints it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cpu/interpreter.h"
#include "cpu/product/provider.h"
#include "program/program.h"

namespace ingot::cpu {

// A value in memory as a step walks it, its address still to be filled in.
struct BoundMemory {
  Address address;
  Extents strides{};
  DType dtype = DType::f32;

  Memory in(const CallMemory& memory) const { return {memory.at(address), strides, dtype}; }
};

// A product's right operand, into the form that its provider reads.
struct PackStep {
  ProductCall call;  // without addresses
  std::shared_ptr<const ProductProvider> provider;
  Address b, packed;
};

// A phase on the tiles of its space; or on blocks of a product as they are finished.
struct PhaseStep {
  const Phase* phase = nullptr;
  bool tail = false;
  std::vector<BoundMemory> loads, stores;  // as in the phase
  Tiling tiles;
  // Where statistics are gathered: what each chunk of the batch left of them, and how many elements
  // are kept along each axis.
  Address partials;
  Extents kept{};
  // On a product's blocks: the loads that it is, by their place among the loads.
  std::vector<size_t> product_loads;
};

// `batches` products, each a step further on; and what is done to their elements while they are in
// registers or cache, where a provider does that: a row is added, and `behind_row` runs then, or
// `behind` runs on their blocks. Where it finds that it cannot after all, `behind` runs behind the
// product.
struct ProductStep {
  ProductCall call;     // without addresses
  Providers providers;  // that take it, in order
  int64_t batches = 1;
  Address a, b, c, packed_b, row;
  int64_t a_step = 0, b_step = 0, c_step = 0;  // bytes
  std::optional<PhaseStep> behind, behind_row;
  int follower = -1;    // the sweep that `behind` is of
  bool is_kept = true;  // on blocks: the product is written too
};

// Statistics of what their chunks left: each state whole, and what is read off it.
struct MergeStep {
  const Phase* phase = nullptr;
  Tiling tiles;      // of the phase that gathered
  int64_t kept = 0;  // elements
  Address partials, states;
  std::vector<Address> finished;  // of each reading of each statistic
};

// From a constant where there is one.
struct CopyStep {
  BoundMemory from, to;
  Extents sizes{};
  std::optional<double> constant;
};

struct HostStep {
  int sweep = -1;   // of the plan; -1: behind them all
  std::string why;  // of a copy
  std::variant<PackStep, ProductStep, PhaseStep, MergeStep, CopyStep> what;

  StepKind kind() const;
};

struct HostProgram {
  Level level = Level::baseline;
  std::vector<HostStep> steps;
  std::vector<Buffer> buffers;
  size_t workspace_bytes = 0;
};

void run(const HostProgram& program, const CallMemory& memory);

// How `body` would have a product's blocks; columns() is 0 where it takes none.
class BodyBlocks final : public BlockConsumer {
 public:
  explicit BodyBlocks(const PhaseStep& body) : body_(body) {}
  BodyBlocks(const PhaseStep& body, Level level, const CallMemory& memory);

  int64_t rows() const override { return body_.tiles.batch_chunk; }
  int64_t columns() const override;
  void consume(Range rows, Range columns, const void* data, int64_t ld) const override;

 private:
  const PhaseStep& body_;
  Level level_ = Level::baseline;
  Bindings bindings_;
  double* partials_ = nullptr;
};

// With a hash that is the same for programs that do the same.
nlohmann::json describe(const HostProgram& program, const Plan& plan);

}  // namespace ingot::cpu
