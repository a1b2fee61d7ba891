// A product sweep on Ingot's own kernels (kernels/product): fp32's or TF32's accuracy from fp16
// tensor cores, or fp16 and bf16 operands as they are, with the sweep's body and partial statistics
// in the epilogue.
#pragma once

#include <map>
#include <set>
#include <shared_mutex>

#include "codegen/product_epilogue.h"
#include "cuda/matrix_operand.h"
#include "cuda/product_family.h"
#include "cuda/product_tuning.h"
#include "cuda/sweep_lowering.h"

namespace ingot::cuda {

class OwnProduct {
 public:
  // nullptr, and why, where the plan's GPU, precision or epilogue is not one for these kernels.
  // kernels_behind: that the library's product would need to do the same.
  static std::unique_ptr<OwnProduct> make(const Plan& plan, int sweep, Modules& modules,
                                          const nlohmann::json& capabilities,
                                          const ProductTuning& tuning, size_t kernels_behind,
                                          std::string* why);

  // Whether the GPU is of the architecture that was planned for.
  bool runs_on(int sm) const;

  // Whether dense, aligned operands of this batch size run here.
  bool serves(int64_t batch) const;
  size_t scratch_bytes(int64_t batch) const;
  std::vector<int> units(int64_t batch);
  // False, with nothing added, where these tensors must go to the library.
  bool lower(const Lowering& to);
  // See SweepLowering.
  std::optional<PackRequest> packs(const Lowering& to) const;
  bool packs_usually(int64_t batch) const;
  // Whether its samples exist in no other form, in such a call.
  bool reads_packed_alone(const Lowering& to) const;
  // Says that the next product reads this one's result, and nobody else does: it may be handed on
  // as halves (product/hopper/halves.cuh), so that no pass packs it.
  void hand_to(OwnProduct& next);
  // The packed weight, kept for inference: 0 bytes where the weight is not a parameter.
  size_t frozen_bytes() const;
  std::vector<int> frozen_units(int64_t batch);
  void lower_frozen(const Lowering& to);
  Precision precision() const;
  nlohmann::json describe(int64_t batch);
  // What can be measured for it, and what was chosen by whom.
  nlohmann::json describe_tuning(int64_t batch);

 private:
  // A launch description with what was compiled for it.
  struct Prepared {
    hopper::ProductShape shape;
    hopper::ProductPlan plan;
    std::string choice;  // of ProductTuning
    const char* chosen_by = "";
    int product_unit = -1;
    int sliced_unit = -1;  // where slices of K meet in memory
    std::vector<int> split_units;
    bool pays = true;  // a frozen weight's: splitting it inside the product is not faster
  };
  // What a call's tensors ask of it.
  struct Call {
    MatrixOperand x, w, y;
    const Prepared* prepared = nullptr;
    Address factors{};  // of the result, handed on as halves
  };
  // How the next product would read what it is handed: packed by itself, or as halves.
  struct Taking {
    const Prepared *plain = nullptr, *halves = nullptr;
  };
  OwnProduct(ProductFamily family, const Plan& plan, int sweep, Modules& modules,
             const ProductTuning& tuning, size_t kernels_behind, ProductEpilogue epilogue);
  std::string kernel_text(const hopper::ProductPlan& plan) const;
  hopper::ProductShape usual_shape(int64_t batch) const;
  const Prepared& usual(int64_t batch, bool frozen = false) const;
  bool takes_halves(const Lowering& to) const;
  bool hands_usually(int64_t batch) const;
  bool is_handed_usually(int64_t batch) const;
  size_t factor_bytes(int64_t samples) const;
  size_t handed_bytes(int64_t batch) const;
  std::optional<Taking> taking(const Lowering& to, const Call& before) const;
  const Prepared* handing(const Prepared& plain, bool frozen, const Taking& next) const;
  size_t factors_offset(const Prepared& handing, const Prepared& taking) const;
  void hand_on(const Lowering& to, Call& call) const;
  void name_factors(const Lowering& to, const Call& call) const;
  void add_units(std::set<int>& units, int64_t batch, bool frozen);
  std::set<int64_t> batch_sizes(int64_t batch, bool frozen) const;
  bool fold(const Lowering& to, MatrixOperand& x, MatrixOperand& w) const;
  size_t frozen_exponents() const;
  hopper::ProductShape of_program(hopper::ProductShape shape) const;
  hopper::ProductShape shape_of(const MatrixOperand& x, const MatrixOperand& w,
                                const MatrixOperand& y) const;
  const Prepared& prepared(const hopper::ProductShape& shape) const;
  const Prepared& chosen(hopper::ProductShape shape, bool frozen) const;
  size_t bytes_of(const Prepared& p) const;
  size_t partial_bytes(const Prepared& p, int statistic) const;
  const hopper::SplitStep* dense_rows(const Prepared& p) const;
  std::optional<Call> call_of(const Lowering& to) const;
  std::optional<MatrixOperand> result(const Lowering& to, const MatrixOperand& x,
                                      const MatrixOperand& w) const;
  void lower_slices(const Lowering& to, const Prepared& p, const MatrixOperand& x,
                    const MatrixOperand& w) const;
  void lower_product(const Lowering& to, const Call& call) const;

  const ProductFamily family_;
  const Plan& plan_;
  const Sweep& sweep_;
  const hopper::Element element_;
  const hopper::Scheme scheme_;  // that is asked for, and that a frozen weight is packed by
  const hopper::Unpacked unpacked_;
  Modules& modules_;
  const ProductTuning& tuning_;
  const ProductEpilogue epilogue_;
  const ProductTuning::EpilogueCost epilogue_cost_;
  std::optional<KernelLowering> merge_;
  OwnProduct *before_ = nullptr, *next_ = nullptr;  // that hands its result on; that is handed one
  mutable std::shared_mutex mutex_;
  mutable std::vector<std::unique_ptr<Prepared>> prepared_;
  mutable std::map<int64_t, bool> hands_;  // by batch size
};

}  // namespace ingot::cuda
