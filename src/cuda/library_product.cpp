#include "cuda/library_product.h"

#include <algorithm>

#include "support/align.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

DType operand_dtype(const Plan& plan, const Sweep& sweep) {
  const Node& product = plan.graph[sweep.matmul];
  if (product.dtype != DType::f32) return product.dtype;
  if (plan.precision == Precision::bf16) return DType::bf16;
  if (plan.precision == Precision::fp16) return DType::f16;
  return DType::f32;
}

// What the library adds: to one product, of operands and of a result of one type.
std::optional<ProductBias> bias_of(const Plan& plan, const Sweep& sweep) {
  const Node& product = plan.graph[sweep.matmul];
  const Node& w = plan.graph[product.args[1]];
  const bool takes =
      !w.shape.batched && product.shape.features > 1 && operand_dtype(plan, sweep) == product.dtype;
  return takes ? product_bias(plan, sweep) : std::nullopt;
}

// What is left would add a bias for nothing, but to a product that was rounded.
std::vector<KernelSource> behind(const Plan& plan, int sweep,
                                 const std::optional<ProductBias>& bias) {
  if (!bias) return generate_sweep(plan, sweep);
  return generate_sweep(with_sum_as_product(plan, sweep, *bias), sweep);
}

}  // namespace

LibraryLowering::LibraryLowering(const Plan& plan, int sweep, Modules& modules)
    : plan_(plan),
      sweep_(plan.sweeps[static_cast<size_t>(sweep)]),
      bias_(bias_of(plan, sweep_)),
      made_(bias_ ? bias_->sum : sweep_.matmul),
      compute_(operand_dtype(plan, sweep_)),
      result_(plan.graph[sweep_.matmul].dtype),
      placed_(plan.placements[static_cast<size_t>(made_)].kind != Placement::Kind::none),
      x_copy_(plan, sweep_, 0, compute_, modules),
      w_copy_(plan, sweep_, 1, compute_, modules) {
  if (bias_) bias_copy_.emplace(plan, bias_->bias, result_, modules);
  for (KernelSource& source : behind(plan, sweep, bias_)) {
    behind_.emplace_back(std::move(source), modules);
  }
}

bool LibraryLowering::converts(int index) const {
  return plan_.graph[product_operand(plan_.graph, sweep_, index)].dtype != compute_;
}

LibraryLowering::Layout LibraryLowering::layout(int64_t batch, bool copies_x, bool copies_w,
                                                bool scratch) const {
  Layout l;
  l.w = copies_x ? align_up(x_copy_.bytes(batch), kWorkspaceAlignment) : 0;
  l.bias = l.w + (copies_w ? align_up(w_copy_.bytes(batch), kWorkspaceAlignment) : 0);
  l.product = l.bias + (bias_ ? align_up(bias_copy_->bytes(batch), kWorkspaceAlignment) : 0);
  const auto elements = static_cast<size_t>(plan_.graph[sweep_.matmul].shape.elements(batch));
  l.behind = l.product + (scratch ? align_up(elements * size_of(result_), kWorkspaceAlignment) : 0);
  l.end = l.behind + library_workspace(compute_);
  for (const KernelLowering& kernel : behind_) {
    l.end = std::max(l.end, l.behind + kernel.scratch_bytes(batch));
  }
  return l;
}

size_t LibraryLowering::scratch_bytes(int64_t batch) const {
  return layout(batch, true, true, !placed_).end;
}

// Kernels of maps and columns read each element in the one thread that writes what it makes of it,
// before that, and make no second use of another's.
std::optional<Address> LibraryLowering::place_behind(const Lowering& to) const {
  if (behind_.size() != 1) return std::nullopt;
  const std::vector<KernelOperand>& operands = behind_.front().source().operands;
  const auto is_whole = [&](const KernelOperand& operand) { return operand.seen == sweep_.space; };
  const bool reads_each = std::any_of(operands.begin(), operands.end(), [&](const auto& operand) {
    return !operand.written && operand.value == made_ && is_whole(operand);
  });
  if (!reads_each) return std::nullopt;
  for (const KernelOperand& operand : operands) {
    const bool alike = operand.bytes == static_cast<int>(size_of(result_)) && is_whole(operand);
    if (!operand.written || !alike) continue;
    // What is updated may be read beside the product.
    const Placement& placement = to.plan.placements[static_cast<size_t>(operand.value)];
    if (placement.kind == Placement::Kind::update) continue;
    const BoundTensor tensor = to.bind(operand.value, operand.seen);
    if (tensor.strides == dense_strides(operand.seen)) return tensor.address;
  }
  return std::nullopt;
}

std::vector<int> LibraryLowering::units() const {
  std::vector<int> result;
  if (converts(0)) result.push_back(x_copy_.unit());
  if (converts(1)) result.push_back(w_copy_.unit());
  if (bias_copy_ && bias_copy_->converts()) result.push_back(bias_copy_->unit());
  for (const KernelLowering& kernel : behind_) result.push_back(kernel.unit());
  return result;
}

// An operand as the library takes it; nothing where its dtype or strides do not allow it.
std::optional<MatrixOperand> LibraryLowering::usable(const Lowering& to, int index,
                                                     std::optional<MatrixOperand> operand) const {
  if (!operand || operand->dtype != compute_) return std::nullopt;
  const bool folds = index == 0 && !plan_.graph[plan_.graph[sweep_.matmul].args[1]].shape.batched;
  if (folds && !operand->fold_batch(to.batch)) return std::nullopt;
  if (!operand->has_library_strides()) return std::nullopt;
  return operand;
}

// The operand, in the dtype and with strides that the library takes; copied where it has others.
MatrixOperand LibraryLowering::operand(const Lowering& to, int index, size_t offset) const {
  if (const std::optional<MatrixOperand> given =
          usable(to, index, matrix_operand(to, sweep_, index))) {
    return *given;
  }
  const std::optional<MatrixOperand> copy =
      usable(to, index, (index == 0 ? x_copy_ : w_copy_).lower(to, to.scratch + offset));
  if (!copy) throw std::logic_error("a dense operand is not a matrix");
  return *copy;
}

// Numbers behind one another, copied where they lie or are otherwise; none without a bias.
Address LibraryLowering::bias(const Lowering& to, size_t offset) const {
  if (!bias_) return {};
  const BoundTensor given = to.bind(bias_->bias, plan_.graph[bias_->bias].shape);
  const bool is_dense = given.strides[kFeatures] == 1;
  if (!bias_copy_->converts() && is_dense && to.alignment_of(given.address) == 16)
    return given.address;
  bias_copy_->lower(to, to.scratch + offset);
  return to.scratch + offset;
}

LibraryProduct LibraryLowering::describe_product(int64_t batch, MatrixOperand x, MatrixOperand w,
                                                 int64_t y_stride, int64_t y_batch_stride,
                                                 int y_alignment) const {
  const ProductExtents extents = product_extents(plan_, sweep_, batch);
  LibraryProduct product;
  product.batches = extents.batches;
  product.m = extents.m;
  product.n = extents.n;
  product.k = extents.k;
  product.x = {x.row_stride, x.k_stride, x.batched ? x.batch_stride : 0, x.alignment};
  product.w = {w.row_stride, w.k_stride, w.batched ? w.batch_stride : 0, w.alignment};
  product.y_stride = y_stride;
  product.y_batch_stride = y_batch_stride;
  product.y_alignment = y_alignment;
  product.operands = compute_;
  product.result = result_;
  product.bias = bias_.has_value();
  product.tf32 = plan_.precision == Precision::tf32 && compute_ == DType::f32;
  return product;
}

// Dense, aligned operands are what a run usually brings.
void LibraryLowering::prepare(Context& context, int64_t batch) {
  const ProductExtents extents = product_extents(plan_, sweep_, batch);
  if (extents.m == 0) return;
  const auto dense = [&](int index, int64_t rows) {
    const Shape& shape =
        plan_.graph[plan_.graph[sweep_.matmul].args[static_cast<size_t>(index)]].shape;
    const bool k_last = index == 0 || plan_.graph[sweep_.matmul].transpose_b;
    MatrixOperand operand;
    operand.row_stride = k_last ? extents.k : 1;
    operand.k_stride = k_last ? 1 : rows;
    operand.batched = shape.batched && extents.batches > 1;
    operand.batch_stride = shape.static_elements();
    return operand;
  };
  context.cublas().prepare(describe_product(batch, dense(0, extents.m), dense(1, extents.n),
                                            extents.n, extents.m * extents.n, 16));
}

void LibraryLowering::lower(const Lowering& to) const {
  const std::optional<Address> place = placed_ ? std::nullopt : place_behind(to);
  const bool in_scratch = !placed_ && !place;
  const auto copies = [&](int index) {
    return !usable(to, index, matrix_operand(to, sweep_, index));
  };
  const Layout l = layout(to.batch, copies(0), copies(1), in_scratch);
  if (l.end > to.scratch_bytes) {
    fail(INGOT_INVALID_ARGUMENT, "the workspace is too small for {}", sweep_.name);
  }
  const MatrixOperand x = operand(to, 0, l.x), w = operand(to, 1, l.w);
  const ProductExtents extents = product_extents(plan_, sweep_, to.batch);
  Override product = {made_, place.value_or(to.scratch + l.product)};
  int64_t y_stride = extents.n, y_batch_stride = extents.m * extents.n;
  if (placed_) {
    MatrixOperand y;
    const BoundTensor bound = to.bind(made_, plan_.graph[made_].shape);
    product = {kNoValue, bound.address};
    y.rows = plan_.graph[sweep_.matmul].shape.rows;
    y.row_stride = y.rows == 1 ? extents.n : bound.strides[kRows];
    y.batched = plan_.graph[sweep_.matmul].shape.batched;
    y.batch_stride = y_batch_stride = bound.strides[kBatch];
    const bool plain = extents.n == 1 || bound.strides[kFeatures] == 1;
    if (!plain || (extents.batches == 1 && !y.fold_batch(to.batch))) {
      fail(INGOT_UNSUPPORTED, "the result of {} must have contiguous rows", sweep_.name);
    }
    y_stride = y.row_stride;
  }
  const Address added = bias(to, l.bias);
  to.overwrite(to.scratch + l.product, l.behind - l.product);
  const Address own = to.scratch + l.behind;  // before the kernels behind it use that
  to.lend(own, library_workspace(compute_));
  to.launch(
      describe_product(to.batch, x, w, y_stride, y_batch_stride, to.alignment_of(product.address)),
      x.address, w.address, product.address, own, added);
  Lowering behind = to;
  behind.scratch = to.scratch + l.behind;
  for (const KernelLowering& kernel : behind_) kernel.lower(behind, product);
}

Precision LibraryLowering::precision() const {
  if (result_ != DType::f32) return Precision::ieee;
  if (compute_ == DType::bf16) return Precision::bf16;
  if (compute_ == DType::f16) return Precision::fp16;
  return plan_.precision == Precision::tf32 ? Precision::tf32 : Precision::ieee;
}

nlohmann::json LibraryLowering::describe() const {
  nlohmann::json kernels = nlohmann::json::array();
  for (const KernelLowering& kernel : behind_) kernels.push_back(kernel.describe());
  const char* precision = compute_ == DType::bf16              ? "bf16"
                          : compute_ == DType::f16             ? "fp16"
                          : compute_ == DType::f64             ? "f64"
                          : plan_.precision == Precision::tf32 ? "tf32"
                                                               : "ieee fp32";
  return {{"provider", fmt::format("cuBLASLt ({})", precision)}, {"kernels", kernels}};
}

}  // namespace ingot::cuda
