// One call on its way to a host program.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "cpu/lowering.h"

namespace ingot::cpu {

class ProgramLowering {
 public:
  ProgramLowering(const HostPlan& host, int64_t batch, std::span<const ingot_tensor> tensors,
                  std::span<const size_t> frozen);

  HostProgram run();
  HostProgram packing();

 private:
  // How a product reads b where it lies: [n, k] if transposed, else [k, n].
  struct RightLayout {
    bool transposed;
    int64_t ld;
  };
  // A product and its operands as it reads them; how many matrices each and the result are.
  struct Product {
    const Node& node;
    int64_t rows, n, k, a_count, b_count, c_count;
    BoundMemory a, b;
    RightLayout right{};
    Address packed_b{};
  };

  const HostSweep& sweep_at(int sweep) const { return host_.sweeps[static_cast<size_t>(sweep)]; }

  template <class What>
  void add(What&& what, std::string why = {}) {
    program_.steps.push_back({sweep_, std::move(why), std::forward<What>(what)});
  }
  void name(std::string what, const Address& address, size_t bytes);
  // Memory of the workspace, until the next turn.
  Address take(std::string what, size_t bytes);

  // A placed value, its axes factored as `seen`. What updates a buffer waits in the workspace until
  // everything has been read.
  BoundMemory bind(ValueId value, const Shape& seen) const;
  BoundMemory in_tensor(const BoundTensor& bound) const;
  // What a phase of the sweep that is lowered loads: its statistics from where they were merged.
  BoundMemory bind_load(const Sweep& sweep, ValueId value) const;
  bool is_aligned(const BoundMemory& memory) const;

  Tiling tiling(const HostSweep& host) const;
  PhaseStep phase_step(const HostSweep& host, const Phase& phase, const Tiling& tiles) const;
  // A sweep's body, with room for what it gathers.
  PhaseStep body_step(const HostSweep& host, const Tiling& tiles);
  void lower_body(int sweep);
  // What follows once a body, wherever it ran, has seen everything.
  void finish(int sweep);
  // Whole tensors that no sweep writes: a result that is a leaf or a second name, and updates,
  // which reach their buffers only when everything has been read.
  void copy_remaining();

  // product_lowering.cpp. Whether what follows the product is part of its step.
  bool lower_product(const Turn& turn);
  BoundMemory operand(const Sweep& sweep, int index) const;
  // Where a sweep's right operand is kept packed, or nowhere.
  Address frozen_at(int sweep) const;
  std::optional<RightLayout> right_layout(const BoundMemory& b, const Node& product, int64_t n,
                                          int64_t k) const;
  // An operand of `count` matrices, copied to where it lies dense and in the product's type.
  BoundMemory copied(const BoundMemory& from, const Sweep& sweep, int index, int64_t count,
                     int64_t rows, int64_t columns);
  // Whether a product can write it.
  bool is_direct(const BoundMemory& c, const Node& product) const;
  ProductStep step_into(const Product& product, const BoundMemory& c) const;
  // The row that a body adds, as part of the product, which is never written; then the rest.
  bool add_with_row(const Turn& turn, const Product& product);
  std::optional<BoundMemory> added_row(const AddedRow& added, const Product& product);
  // A body on the product's blocks, where its provider hands them out.
  void hand_blocks(const Turn& turn, ProductStep* step);

  const HostPlan& host_;
  const Plan& plan_;
  const Graph& graph_;
  const int64_t batch_;
  const std::span<const size_t> frozen_;
  size_t used_ = 0, scratch_ = 0;  // of the workspace; before any turn
  const std::vector<size_t> offsets_;
  const Places places_;
  std::vector<Address> updates_;
  HostProgram program_;
  int sweep_ = -1;  // that is lowered
  // Of the body lowered last.
  std::map<ValueId, Address> statistics_;
  Address states_, partials_;
  Tiling gathered_;
};

}  // namespace ingot::cpu
