// A sweep that packs on the way what the product behind it would pack first: its kernel holds the
// rows in registers, so that the product's own pass, which reads them again, is left out.
#include <stdexcept>

#include "cuda/sweep_lowering.h"

namespace ingot::cuda {
namespace {

class PackingLowering : public SweepLowering {
 public:
  PackingLowering(KernelSource source, hopper::Scheme scheme, std::unique_ptr<SweepLowering> plain,
                  std::vector<SweepLowering*> products, bool alone, Modules& modules)
      : packing_(std::move(source), modules),
        scheme_(scheme),
        plain_(std::move(plain)),
        products_(std::move(products)),
        alone_(alone) {}

  size_t scratch_bytes(int64_t batch) const override { return plain_->scratch_bytes(batch); }
  std::vector<int> units(int64_t batch) override {
    if (products_[0]->packs_usually(batch)) return {packing_.unit()};
    return plain_->units(batch);
  }
  void prepare(Context& context, int64_t batch) override { plain_->prepare(context, batch); }

  void lower(const Lowering& to) override {
    std::optional<PackRequest> request = products_[0]->packs(to.behind());
    if (request && request->scheme != scheme_) {
      throw std::logic_error("rows are packed for another scheme than their product's");
    }
    // What is redone of scaled values is read as it was (product/redo.cuh).
    const bool is_enough = scheme_ == hopper::Scheme::split;
    if (request) request->alone = alone_ && is_enough && all_read(to, *request);
    if (request && packing_.lower_packing(to, *request)) return;
    plain_->lower(to);
  }

  nlohmann::json describe(int64_t batch) override {
    nlohmann::json result = plain_->describe(batch);
    if (products_[0]->packs_usually(batch)) result["kernels"] = {packing_.describe()};
    return result;
  }

 private:
  // Whether each of the products, in turn, would begin with this packing.
  bool all_read(const Lowering& to, const PackRequest& packing) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      const Lowering at = to.behind(static_cast<int>(i) + 1);
      const std::optional<PackRequest> own = products_[i]->packs(at);
      if (!own || own->memory != packing.memory || !same_packing(own->step, packing.step)) {
        return false;
      }
    }
    return true;
  }

  const KernelLowering packing_;
  const hopper::Scheme scheme_;  // for which it packs
  const std::unique_ptr<SweepLowering> plain_;
  const std::vector<SweepLowering*> products_;
  const bool alone_;  // nobody else reads the value
};

}  // namespace

std::unique_ptr<SweepLowering> with_packing(const Plan& plan, int sweep,
                                            std::unique_ptr<SweepLowering> plain,
                                            std::vector<SweepLowering*> products, bool alone,
                                            Modules& modules) {
  const Sweep& behind = plan.sweeps[static_cast<size_t>(sweep) + 1];
  const ValueId value = product_operand(plan.graph, behind, 0);
  const Shape& rows = plan.graph[plan.graph[behind.matmul].args[0]].shape;
  const Shape& space = plan.sweeps[static_cast<size_t>(sweep)].space;
  if (space.features != rows.features) return plain;
  const bool few_bits = plan.precision == Precision::tf32;
  const hopper::Scheme scheme = few_bits ? hopper::Scheme::scaled : hopper::Scheme::split;
  std::optional<KernelSource> source = generate_packing(plan, sweep, value, scheme);
  if (!source) return plain;
  return std::make_unique<PackingLowering>(*std::move(source), scheme, std::move(plain),
                                           std::move(products), alone, modules);
}

}  // namespace ingot::cuda
