// A product sweep: Ingot's own kernel with its epilogue where there is one for this GPU, precision
// and shape; cuBLASLt and what follows as a sweep of its own elsewhere.
#include <algorithm>

#include "cuda/library_product.h"
#include "cuda/own_product.h"
#include "cuda/sweep_lowering.h"

namespace ingot::cuda {
namespace {

class ProductLowering : public SweepLowering {
 public:
  ProductLowering(const Plan& plan, int sweep, Modules& modules, const ProgramOptions& options,
                  const ProductTuning& tuning)
      : library_(plan, sweep, modules) {
    own_ = OwnProduct::make(plan, sweep, modules, options.capabilities, tuning,
                            library_.kernels_behind(), &why_library_);
  }

  size_t scratch_bytes(int64_t batch) const override {
    const size_t own = own_ ? own_->scratch_bytes(batch) : 0;
    return std::max(own, library_.scratch_bytes(batch));
  }

  std::vector<int> units(int64_t batch) override {
    std::vector<int> result = library_.units();
    if (own_) {
      const std::vector<int> own = own_->units(batch);
      result.insert(result.end(), own.begin(), own.end());
    }
    return result;
  }

  void prepare(Context& context, int64_t batch) override {
    if (!own_ || !own_->runs_on(context.sm()) || !own_->serves(batch))
      library_.prepare(context, batch);
  }

  void lower(const Lowering& to) override {
    if (to.batch == 0) return;
    if (own_ && own_->runs_on(to.sm) && own_->lower(to)) return;
    if (own_ && own_->reads_packed_alone(to)) {
      throw std::logic_error("a library's product cannot read what exists only packed");
    }
    library_.lower(to);
  }

  std::optional<PackRequest> packs(const Lowering& to) override {
    if (to.batch == 0 || !own_ || !own_->runs_on(to.sm)) return std::nullopt;
    return own_->packs(to);
  }
  bool packs_usually(int64_t batch) override { return own_ && own_->packs_usually(batch); }

  void hand_to(ProductLowering& next) {
    if (own_ && next.own_) own_->hand_to(*next.own_);
  }

  size_t frozen_bytes() const override { return own_ ? own_->frozen_bytes() : 0; }
  std::vector<int> frozen_units(int64_t batch) override {
    return own_ ? own_->frozen_units(batch) : std::vector<int>();
  }
  void lower_frozen(const Lowering& to) override {
    if (own_ && own_->runs_on(to.sm)) own_->lower_frozen(to);
  }

  Precision precision() const override { return own_ ? own_->precision() : library_.precision(); }

  nlohmann::json describe(int64_t batch) override {
    const bool own = own_ && own_->serves(batch);
    nlohmann::json result = own ? own_->describe(batch) : library_.describe();
    if (!own && !why_library_.empty()) result["reason"] = why_library_;
    if (own_) result["tuning"] = own_->describe_tuning(batch);
    return result;
  }

 private:
  LibraryLowering library_;
  std::unique_ptr<OwnProduct> own_;
  std::string why_library_;
};

}  // namespace

void hand_on(SweepLowering& product, SweepLowering& next) {
  dynamic_cast<ProductLowering&>(product).hand_to(dynamic_cast<ProductLowering&>(next));
}

std::unique_ptr<SweepLowering> make_product_lowering(const Plan& plan, int sweep, Modules& modules,
                                                     const ProgramOptions& options,
                                                     const ProductTuning& tuning) {
  return std::make_unique<ProductLowering>(plan, sweep, modules, options, tuning);
}

}  // namespace ingot::cuda
