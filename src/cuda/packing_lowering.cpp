// A sweep that packs on the way what the product behind it would pack first: its kernel holds the
// rows in registers, so that the product's own pass, which reads them again, is left out.
#include "cuda/sweep_lowering.h"

namespace ingot::cuda {
namespace {

class PackingLowering : public SweepLowering {
 public:
  PackingLowering(KernelSource source, std::unique_ptr<SweepLowering> plain, SweepLowering& product,
                  bool alone, Modules& modules)
      : packing_(std::move(source), modules),
        plain_(std::move(plain)),
        product_(product),
        alone_(alone) {}

  size_t scratch_bytes(int64_t batch) const override { return plain_->scratch_bytes(batch); }
  std::vector<int> units(int64_t batch) override {
    if (product_.packs_usually(batch)) return {packing_.unit()};
    return plain_->units(batch);
  }
  void prepare(Context& context, int64_t batch) override { plain_->prepare(context, batch); }

  void lower(const Lowering& to) override {
    std::optional<PackRequest> request = product_.packs(to.behind());
    if (request) request->alone = alone_;
    if (request && packing_.lower_packing(to, *request)) return;
    plain_->lower(to);
  }

  nlohmann::json describe(int64_t batch) override {
    nlohmann::json result = plain_->describe(batch);
    if (product_.packs_usually(batch)) result["kernels"] = {packing_.describe()};
    return result;
  }

 private:
  const KernelLowering packing_;
  const std::unique_ptr<SweepLowering> plain_;
  SweepLowering& product_;
  const bool alone_;  // it is the value's only reader
};

}  // namespace

std::unique_ptr<SweepLowering> with_packing(const Plan& plan, int sweep,
                                            std::unique_ptr<SweepLowering> plain,
                                            SweepLowering& product, Modules& modules) {
  const Sweep& behind = plan.sweeps[static_cast<size_t>(sweep) + 1];
  const ValueId value = product_operand(plan.graph, behind, 0);
  const Shape& rows = plan.graph[plan.graph[behind.matmul].args[0]].shape;
  const Shape& space = plan.sweeps[static_cast<size_t>(sweep)].space;
  if (space.features != rows.features) return plain;
  std::optional<KernelSource> source = generate_packing(plan, sweep, value);
  if (!source) return plain;
  const bool alone = reads_sweep_before_alone(plan, static_cast<size_t>(sweep) + 1) &&
                     !plan.graph[plan.graph[behind.matmul].args[1]].shape.batched;
  return std::make_unique<PackingLowering>(*std::move(source), std::move(plain), product, alone,
                                           modules);
}

}  // namespace ingot::cuda
