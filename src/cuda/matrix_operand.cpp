#include "cuda/matrix_operand.h"

#include <algorithm>

#include "codegen/type_names.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

// As kernels/sweeps/copy.cuh has it.
struct CopyExtents {
  int64_t batch, rows, groups, features;
};

constexpr int kCopyThreads = 256;
constexpr int64_t kCopyBlocks = 2048;

const Node& operand_node(const Plan& plan, const Sweep& sweep, int index) {
  return plan.graph[plan.graph[sweep.matmul].args[static_cast<size_t>(index)]];
}

// Names the axes of x [B, R, 1, K] and of w [B, N, 1, K] or [B, K, 1, N].
MatrixOperand with_axes(const Plan& plan, const Sweep& sweep, int index, const int64_t* strides) {
  const Shape& shape = operand_node(plan, sweep, index).shape;
  const bool k_last = index == 0 || plan.graph[sweep.matmul].transpose_b;
  MatrixOperand operand;
  operand.batched = shape.batched;
  operand.batch_stride = strides[kBatch];
  operand.rows = k_last ? shape.rows : shape.features;
  operand.k = k_last ? shape.features : shape.rows;
  operand.row_stride = strides[k_last ? kRows : kFeatures];
  operand.k_stride = strides[k_last ? kFeatures : kRows];
  if (operand.k == 1) operand.k_stride = 1;
  if (operand.rows == 1) operand.row_stride = operand.k * operand.k_stride;
  return operand;
}

}  // namespace

bool MatrixOperand::fold_batch(int64_t batch) {
  if (!batched) return true;
  if (batch > 1) {
    if (rows > 1 && batch_stride != rows * row_stride) return false;
    if (rows == 1) row_stride = batch_stride;
  }
  rows *= batch;
  batched = false;
  return true;
}

bool MatrixOperand::has_library_strides() const {
  return (k_stride == 1 && (rows == 1 || row_stride >= k)) ||
         (row_stride == 1 && (k == 1 || k_stride >= rows));
}

ProductExtents product_extents(const Plan& plan, const Sweep& sweep, int64_t batch) {
  const Shape& x = operand_node(plan, sweep, 0).shape;
  const Shape& w = operand_node(plan, sweep, 1).shape;
  ProductExtents extents;
  extents.n = plan.graph[sweep.matmul].shape.features;
  extents.k = x.features;
  extents.m = x.rows;
  if (w.batched)
    extents.batches = batch;
  else if (x.batched)
    extents.m *= batch;
  return extents;
}

std::optional<MatrixOperand> matrix_operand(const Lowering& to, const Sweep& sweep, int index) {
  const ValueId value = product_operand(to.plan.graph, sweep, index);
  const int tensor = to.tensor_of(value);
  const bool viewed = value != to.plan.graph[sweep.matmul].args[static_cast<size_t>(index)];
  if (tensor >= 0 && viewed && !is_dense(to.tensors[static_cast<size_t>(tensor)])) {
    return std::nullopt;
  }
  const BoundTensor bound = to.bind(value, operand_node(to.plan, sweep, index).shape);
  MatrixOperand operand = with_axes(to.plan, sweep, index, bound.strides.data());
  operand.address = bound.address;
  operand.alignment = to.alignment_of(bound.address);
  operand.dtype = dtype_in_memory(to.plan, value);
  return operand;
}

ValueCopy::ValueCopy(const Plan& plan, ValueId value, DType to, Modules& modules)
    : plan_(plan), value_(value), from_(dtype_in_memory(plan, value)), to_(to) {
  const std::string types = storage_type(from_) + ", " + storage_type(to_);
  const std::string name = "copy_" + storage_type(from_) + "_to_" + storage_type(to_);
  std::string text = "#include \"sweeps/copy.cuh\"\n";
  for (const int width : {4, 1}) {
    text += fmt::format(
        "\nextern \"C\" __global__ void __launch_bounds__({}) {}_{}(\n"
        "    const __grid_constant__ ingot::Tensor source, void* destination,\n"
        "    const __grid_constant__ ingot::CopyExtents extents) {{\n"
        "  using namespace ingot;\n  copy_sweep<{}, {}>(source, destination, extents);\n}}\n",
        kCopyThreads, name, width, types, width);
  }
  unit_ = modules.add({{name, text}, {name + "_4", name + "_1"}, 0});
}

size_t ValueCopy::bytes(int64_t batch) const {
  return static_cast<size_t>(plan_.graph[value_].shape.elements(batch)) * size_of(to_);
}

void ValueCopy::lower(const Lowering& to, const Address& destination) const {
  const Shape& own = plan_.graph[value_].shape;
  const BoundTensor source = to.bind(value_, own);
  const CopyExtents extents = {own.batched ? to.batch : 1, own.rows, own.groups, own.features};
  uintptr_t bits = to.low_bits(source.address);
  for (const Axis axis : {kBatch, kRows, kGroups}) {
    bits |= static_cast<uintptr_t>(source.strides[axis]) * size_of(from_);
  }
  const bool vectors = source.strides[kFeatures] == 1 && own.features % 4 == 0 &&
                       bits % std::min<size_t>(16, 4 * size_of(from_)) == 0;
  const int64_t total = own.elements(to.batch) / (vectors ? 4 : 1);
  const int64_t blocks =
      std::clamp<int64_t>((total + kCopyThreads - 1) / kCopyThreads, 1, kCopyBlocks);
  Arguments arguments;
  arguments.add_tensors({&source, 1});
  arguments.add_address(destination);
  arguments.add(extents);
  to.overwrite(destination, bytes(to.batch));
  to.launch(StepKind::copy, unit_, vectors ? 0 : 1, blocks, kCopyThreads, std::move(arguments));
}

OperandCopy::OperandCopy(const Plan& plan, const Sweep& sweep, int index, DType to,
                         Modules& modules)
    : plan_(plan),
      sweep_(sweep),
      index_(index),
      copy_(plan, product_operand(plan.graph, sweep, index), to, modules) {}

MatrixOperand OperandCopy::lower(const Lowering& to, const Address& destination) const {
  copy_.lower(to, destination);
  const std::array<int64_t, kAxes> strides =
      dense_strides(operand_node(plan_, sweep_, index_).shape);
  MatrixOperand operand = with_axes(plan_, sweep_, index_, strides.data());
  operand.address = destination;
  operand.alignment = to.alignment_of(destination);
  operand.dtype = copy_.dtype();
  return operand;
}

}  // namespace ingot::cuda
