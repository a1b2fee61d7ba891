// Lowers one sweep of a plan to steps of a launch program.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "backend/executable.h"
#include "codegen/kernel_source.h"
#include "codegen/turned.h"
#include "cuda/lowering.h"

namespace ingot::cuda {

class ProductTuning;

// A packing that a product would begin with: of the value, into memory + the step's offsets.
struct PackRequest {
  ValueId value = kNoValue;
  hopper::SplitStep step;
  hopper::Scheme scheme = hopper::Scheme::split;
  Address memory;
  bool alone = false;  // nobody reads the value as it is
};

class SweepLowering {
 public:
  virtual ~SweepLowering() = default;

  // Bytes of scratch memory behind the plan's buffers (256-byte aligned) that a run needs.
  virtual size_t scratch_bytes(int64_t batch) const = 0;
  // The units that runs with dense tensors may need, whatever the batch size.
  virtual std::vector<int> units(int64_t batch) = 0;
  // What else can be done beforehand; the context is current.
  virtual void prepare(Context& context, int64_t batch) = 0;
  virtual void lower(const Lowering& to) = 0;
  // Of a product: the packing of its rows that lower() would add for these tensors, and whether it
  // adds one for dense tensors of this batch size.
  virtual std::optional<PackRequest> packs(const Lowering&) { return std::nullopt; }
  virtual bool packs_usually(int64_t) { return false; }
  // Weights kept for inference: their bytes, the units that packing and using them takes, and the
  // packing into Lowering::frozen. Steps of a run find them there.
  virtual size_t frozen_bytes() const { return 0; }
  virtual std::vector<int> frozen_units(int64_t) { return {}; }
  virtual void lower_frozen(const Lowering&) {}
  // Of a product of f32 operands; ieee where the sweep is none.
  virtual Precision precision() const { return Precision::ieee; }
  virtual nlohmann::json describe(int64_t batch) = 0;
};

// Overrides where a value is: a product that has no place in the plan.
struct Override {
  ValueId value = kNoValue;
  Address address;
};

// The kernels of a generated source, in order.
class KernelLowering {
 public:
  KernelLowering(KernelSource source, Modules& modules);

  size_t scratch_bytes(int64_t batch) const;
  int unit() const { return unit_; }
  const KernelSource& source() const { return source_; }
  // splits: of partial states that are in the scratch memory already.
  void lower(const Lowering& to, const Override& instead = {}, int64_t splits = 0) const;
  // Of the operands, in order.
  std::vector<OperandLayout> layouts(const Lowering& to) const;
  // For a source of generate_packing(): false, with nothing added, where it does not fit.
  bool lower_packing(const Lowering& to, const PackRequest& request) const;
  nlohmann::json describe() const;

 private:
  bool admits(const KernelEntry& entry, const Lowering& to,
              std::span<const BoundTensor> tensors) const;

  KernelSource source_;
  int unit_;
};

std::unique_ptr<SweepLowering> make_kernels_lowering(const Plan& plan, int sweep, Modules& modules);
std::unique_ptr<SweepLowering> make_product_lowering(const Plan& plan, int sweep, Modules& modules,
                                                     const ProgramOptions& options,
                                                     const ProductTuning& tuning);

// Of two products in a row: the second reads the first's result, and nobody else does.
void hand_on(SweepLowering& product, SweepLowering& next);

// `sweep`, which is lowered by `plain`, packs on the way what the product of the next sweep packs
// first, where it can; else `plain` alone. products: that of the next sweep, and those behind it if
// between them they are all that read these rows (alone).
std::unique_ptr<SweepLowering> with_packing(const Plan& plan, int sweep,
                                            std::unique_ptr<SweepLowering> plain,
                                            std::vector<SweepLowering*> products, bool alone,
                                            Modules& modules);

}  // namespace ingot::cuda
