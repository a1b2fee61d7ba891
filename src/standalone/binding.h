// Where a program's values are in a standalone call, as C++ expressions: every tensor is dense and
// every stride therefore known when the file is written.
#pragma once

#include <optional>

#include "codegen/turned.h"
#include "standalone/standalone.h"

namespace ingot::standalone {

// A matrix product's operand: strides in elements.
struct MatrixStrides {
  int64_t row_stride = 0, k_stride = 1;
};

class Binding {
 public:
  explicit Binding(const Request& request);

  const Plan& plan() const { return *request_.plan; }
  // The only size that there will be.
  std::optional<int64_t> only_batch() const { return request_.batch; }
  // Up to where products contract what a call gives for the batch.
  std::optional<int64_t> most_contracted() const { return request_.contracted; }
  // "tensors[3]", "workspace + v6_mul".
  std::string address(ValueId value) const;
  std::string buffer_name(int buffer) const { return buffer_names_[static_cast<size_t>(buffer)]; }
  std::array<int64_t, kAxes> strides(ValueId value, const Shape& seen) const;
  // Operand 0 (x) or 1 (w) of a product. Throws Error where it is no matrix.
  MatrixStrides matrix(const Sweep& sweep, int operand) const;
  ValueId matrix_value(const Sweep& sweep, int operand) const;
  // Whether a kernel of vectors may run: its operands are aligned. `single`: for a batch of one.
  bool admits(const KernelSource& source, const KernelEntry& entry, bool single) const;
  // A batch size that stands for all but one.
  static constexpr int64_t kMany = int64_t{1} << 20;
  // Of a kernel's operands, in order.
  std::vector<OperandLayout> layouts(const KernelSource& source) const;

 private:
  // The leaf whose tensor holds a value; nullopt where that is a result or a buffer.
  std::optional<ValueId> leaf_of(ValueId value) const;

  const Request& request_;
  std::vector<ValueId> leaves_;
  std::vector<std::string> buffer_names_;
};

}  // namespace ingot::standalone
