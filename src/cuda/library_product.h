// A product sweep through cuBLASLt, what follows the product as a sweep of its own.
#pragma once

#include "cuda/matrix_operand.h"
#include "cuda/sweep_lowering.h"
#include "plan/product_bias.h"

namespace ingot::cuda {

class LibraryLowering {
 public:
  LibraryLowering(const Plan& plan, int sweep, Modules& modules);

  size_t scratch_bytes(int64_t batch) const;
  std::vector<int> units() const;
  // Of what is left behind the library's product.
  size_t kernels_behind() const { return behind_.size(); }
  void prepare(Context& context, int64_t batch);
  void lower(const Lowering& to) const;
  Precision precision() const;
  nlohmann::json describe() const;

 private:
  // Scratch memory: copies of x, w and the bias, the product where it has no other place, and
  // behind these the library's own, of which the end may be missing, and after it that of kernels
  // behind.
  struct Layout {
    size_t x = 0, w = 0, bias = 0, product = 0, behind = 0, end = 0;
  };
  // scratch: whether the product is there.
  Layout layout(int64_t batch, bool copies_x, bool copies_w, bool scratch) const;
  // Where the kernel behind leaves what it makes of the product, which may lie there until then.
  std::optional<Address> place_behind(const Lowering& to) const;
  bool converts(int index) const;
  std::optional<MatrixOperand> usable(const Lowering& to, int index,
                                      std::optional<MatrixOperand> operand) const;
  MatrixOperand operand(const Lowering& to, int index, size_t scratch_offset) const;
  Address bias(const Lowering& to, size_t scratch_offset) const;
  LibraryProduct describe_product(int64_t batch, MatrixOperand x, MatrixOperand w, int64_t y_stride,
                                  int64_t y_batch_stride, int y_alignment) const;

  const Plan& plan_;
  const Sweep& sweep_;
  const std::optional<ProductBias> bias_;
  const ValueId made_;          // what the library writes: the product, or its sum with the bias
  DType compute_ = DType::f32;  // of the operands
  DType result_ = DType::f32;
  bool placed_ = false;  // what it writes has a place in the plan
  OperandCopy x_copy_, w_copy_;
  std::optional<ValueCopy> bias_copy_;
  std::vector<KernelLowering> behind_;
};

}  // namespace ingot::cuda
