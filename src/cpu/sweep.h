// One sweep of a plan on the host: its product, its body over tiles, its statistics, its tail.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/interpreter.h"
#include "cpu/phase.h"
#include "cpu/product/provider.h"

namespace ingot::cpu {

// Addresses of one run, and where values live in it.
class Addresses {
 public:
  Addresses(const Plan& plan, int64_t batch, std::span<const ingot_tensor> tensors,
            std::byte* workspace, const std::vector<size_t>& buffer_offsets,
            const std::vector<size_t>& update_offsets)
      : plan_(plan),
        batch_(batch),
        tensors_(tensors),
        workspace_(workspace),
        buffer_offsets_(buffer_offsets),
        update_offsets_(update_offsets) {}

  // A placed value, its axes factored as `seen`.
  Memory locate(ValueId value, const Shape& seen) const;
  Memory result(size_t ordinal, const Shape& seen) const;
  Memory leaf(ValueId leaf, const Shape& seen) const;
  bool is_placed(ValueId value) const;
  int64_t batch() const { return batch_; }

 private:
  Memory tensor(size_t position, const Shape& own, const Shape& seen) const;

  const Plan& plan_;
  int64_t batch_;
  std::span<const ingot_tensor> tensors_;
  std::byte* workspace_;
  const std::vector<size_t>& buffer_offsets_;
  const std::vector<size_t>& update_offsets_;
};

class SweepRunner {
 public:
  SweepRunner(const Plan& plan, const Sweep& sweep, const Isa& isa);

  // Workspace of its own: partial states, statistics, an unplaced product.
  size_t workspace_size(int64_t batch) const;
  // packed: the product's right operand as freeze() left it, or nullptr.
  void run(const Addresses& addresses, std::byte* workspace,
           const std::byte* packed = nullptr) const;

  // Memory (64-byte aligned) in which a parameter that is the product's right operand can be kept
  // packed; 0 where there is none, or where the product's provider gains nothing.
  size_t frozen_bytes() const;
  void freeze(const Addresses& addresses, std::byte* packed, size_t bytes) const;

  // Whether its body can run on blocks of another sweep's product, which it loads, as they are
  // finished.
  bool can_follow(const Sweep& product) const;
  // This product sweep with `next`, which can follow it, on its blocks; both have the same
  // workspace. `kept`: something else reads the product too. False where the product's provider
  // hands out no blocks: nothing has been done then.
  bool run_with(const SweepRunner& next, bool kept, const Addresses& addresses,
                std::byte* workspace, const std::byte* packed) const;
  // Whether run_with() would.
  bool runs_with(const SweepRunner& next, bool kept, int64_t batch) const;
  nlohmann::json describe(int64_t batch) const;

 private:
  class BodyBlocks;
  struct Layout {
    size_t product = 0, statistics = 0, states = 0, partials = 0, total = 0;
  };

  Layout layout(int64_t batch) const;
  int64_t kept_elements(int64_t batch) const;
  Tiling tiling(int64_t batch) const;
  // What is done to a product's elements while they are in registers or cache: they are handed to a
  // consumer, and written too where `kept`; or another sweep's row is added and its sum written.
  struct Behind {
    const BlockConsumer* consumer = nullptr;
    bool kept = true;
    const SweepRunner* adds = nullptr;
  };
  // A body that adds one row to a product and does nothing else.
  struct AddedRow {
    ValueId product = kNoValue, row = kNoValue, sum = kNoValue;
  };
  AddedRow find_added_row() const;
  // Whether `next` is such a body, and this product's provider would do its work.
  bool adds_row_of(const SweepRunner& next, bool kept, int64_t batch) const;
  // With something behind it, false where no provider serves that.
  bool run_product(const Addresses& addresses, std::byte* workspace, const std::byte* packed,
                   const Behind& behind) const;
  ProductCall typical_call(int64_t batch) const;
  Memory product_memory(const Addresses& addresses, std::byte* workspace) const;
  void run_body(const Addresses& addresses, std::byte* workspace, const Layout& layout) const;
  // One task of the body; statistics go to their place in `partials`.
  void run_body_task(const Bindings& bindings, const Tiling& tiles, int64_t task,
                     double* partials) const;
  void finish(const Addresses& addresses, std::byte* workspace, const Layout& layout) const;
  void merge_statistics(int64_t batch, std::byte* workspace, const Layout& layout) const;
  void run_tail(const Addresses& addresses, std::byte* workspace, const Layout& layout) const;
  Bindings bind(const Phase& phase, const Addresses& addresses, std::byte* workspace,
                const Layout& layout) const;

  const Plan& plan_;
  const Sweep& sweep_;
  Isa isa_;
  bool has_body_ = false, has_tail_ = false;
  bool product_unplaced_ = false;
  Phase body_, tail_;
  AddedRow added_row_;
  Shape kept_;                           // the space less the axes that statistics reduce
  std::map<ValueId, size_t> statistic_;  // value → which array of finished statistics
};

}  // namespace ingot::cpu
