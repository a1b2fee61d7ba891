// The operands of a product sweep as matrices in the memory of a call.
#pragma once

#include "cuda/lowering.h"

namespace ingot::cuda {

// Element (batch, row, k) of an operand: x by samples m, w by features n.
struct MatrixOperand {
  Address address;
  int alignment = 16;  // of the address: a power of two ≤ 16
  DType dtype = DType::f32;
  int64_t rows = 0, k = 0;  // of one batch entry
  int64_t row_stride = 0, k_stride = 1, batch_stride = 0;
  bool batched = false;

  // Folds the batch into the rows where the strides allow it.
  bool fold_batch(int64_t batch);
  // Whether a library takes it as it is: one stride 1, the other at least the extent.
  bool has_library_strides() const;
};

// A product's extents for a batch size; what does not depend on where the tensors are.
struct ProductExtents {
  int64_t batches = 1;  // independent products: 1 unless the weight is batched
  int64_t m = 0, n = 0, k = 0;
};
ProductExtents product_extents(const Plan& plan, const Sweep& sweep, int64_t batch);

// Operand 0 (x) or 1 (w) as it lies in memory; nullopt where no strides over batch, rows and k
// describe it (a view of a tensor with gaps): it must be copied first.
std::optional<MatrixOperand> matrix_operand(const Lowering& to, const Sweep& sweep, int index);

// Copies a value into dense memory, in a dtype. The kernels are units of `modules`.
class ValueCopy {
 public:
  ValueCopy(const Plan& plan, ValueId value, DType to, Modules& modules);

  size_t bytes(int64_t batch) const;
  int unit() const { return unit_; }
  DType dtype() const { return to_; }
  bool converts() const { return from_ != to_; }
  void lower(const Lowering& to, const Address& destination) const;

 private:
  const Plan& plan_;
  ValueId value_;
  DType from_, to_;
  int unit_;
};

// Of an operand: rows by k.
class OperandCopy {
 public:
  OperandCopy(const Plan& plan, const Sweep& sweep, int index, DType to, Modules& modules);

  size_t bytes(int64_t batch) const { return copy_.bytes(batch); }
  int unit() const { return copy_.unit(); }
  // Adds the copy; gives the operand as it is then.
  MatrixOperand lower(const Lowering& to, const Address& destination) const;

 private:
  const Plan& plan_;
  const Sweep& sweep_;
  int index_;
  ValueCopy copy_;
};

}  // namespace ingot::cuda
