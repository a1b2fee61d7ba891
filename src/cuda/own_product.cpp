#include "cuda/own_product.h"

#include <algorithm>
#include <mutex>

#include "cuda/product_units.h"
#include "plan/cost.h"
#include "product/hopper/args.cuh"
#include "support/align.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

using hopper::ProductPlan;
using hopper::ProductShape;
using hopper::SlicedStep;
using hopper::SplitStep;

// Of the epilogue: kernel parameters may take 4 KB, tensor maps and arguments included.
constexpr size_t kMaxOperands = 64;

bool same_shape(const hopper::OperandShape& a, const hopper::OperandShape& b) {
  return a.row_stride == b.row_stride && a.k_stride == b.k_stride && a.aligned == b.aligned &&
         a.batch_stride == b.batch_stride;
}

bool same_shape(const ProductShape& a, const ProductShape& b) {
  return a.m == b.m && a.n == b.n && a.k == b.k && same_shape(a.x, b.x) && same_shape(a.w, b.w) &&
         a.y_stride == b.y_stride && a.y_aligned == b.y_aligned &&
         a.stores_result == b.stores_result && a.weight_packed == b.weight_packed &&
         a.element == b.element && a.scheme == b.scheme && a.batches == b.batches &&
         a.x_halves == b.x_halves && a.y_halves == b.y_halves;
}

hopper::OperandShape operand_shape(const MatrixOperand& operand) {
  return {operand.row_stride, operand.k_stride, operand.alignment == 16,
          operand.batched ? operand.batch_stride : 0};
}

hopper::Unpacked unpacked_of(const Plan& plan, const Sweep& sweep) {
  if (plan.target.streams_products) return hopper::Unpacked::any;
  return packs_samples_alone(plan, sweep) ? hopper::Unpacked::whole : hopper::Unpacked::none;
}

// Of the operands of a product, both packed.
size_t packed_workspace(ProductFamily family, const ProductShape& shape) {
  ProductPlan plan;
  for (const auto operand : {SplitStep::Operand::x, SplitStep::Operand::w}) {
    add_split(plan, operand, shape, family == ProductFamily::hopper);
  }
  return align_up(plan.workspace_bytes, kWorkspaceAlignment);
}

// nullopt for what no kernel here multiplies.
std::optional<hopper::Element> element_of(DType dtype) {
  if (dtype == DType::f32) return hopper::Element::f32;
  if (dtype == DType::f16) return hopper::Element::f16;
  if (dtype == DType::bf16) return hopper::Element::bf16;
  return std::nullopt;
}

// What a policy asks of these kernels; a plan may stay with fp32's scheme (ProductPlan::scheme).
hopper::Scheme scheme_of(ProductFamily family, const Plan& plan, const Sweep& sweep) {
  const Node& product = plan.graph[sweep.matmul];
  if (family != ProductFamily::hopper || product.dtype != DType::f32) return hopper::Scheme::split;
  if (plan.precision == Precision::tf32) return hopper::Scheme::scaled;
  const bool own_weight = plan.graph[product.args[1]].shape.batched;
  return plan.precision == Precision::high && !own_weight ? hopper::Scheme::high
                                                          : hopper::Scheme::split;
}

// Of an element of the product's result.
double epilogue_flops(const Plan& plan, const Sweep& sweep) {
  const int64_t full = plan.graph[sweep.matmul].shape.elements(kPlanningBatch);
  double flops = 0;
  const auto add = [&](ValueId id, const Shape& shape) {
    if (shape.elements(kPlanningBatch) == full) flops += element_flops(plan.graph[id]);
  };
  for (const ValueId id : sweep.body) {
    const Node& node = plan.graph[id];
    add(id, sweep.shapes.at(node.kind == NodeKind::reduce ? node.args[0] : id));
  }
  for (const ValueId id : sweep.statistics) flops += element_flops(plan.graph[id]);
  return flops;
}

// Bytes that an epilogue reads for each element beside what it was given by the product.
double epilogue_bytes(const Plan& plan, const Sweep& sweep) {
  const int64_t full = plan.graph[sweep.matmul].shape.elements(kPlanningBatch);
  const auto is_read = [&](ValueId id) {
    return std::any_of(sweep.body.begin(), sweep.body.end(), [&](ValueId reader) {
      const std::vector<ValueId>& args = plan.graph[reader].args;
      return std::find(args.begin(), args.end(), id) != args.end();
    });
  };
  double bytes = 0;
  for (const ValueId id : sweep.loads) {
    const Node& node = plan.graph[id];
    const bool is_matrix = node.shape.elements(kPlanningBatch) == full;
    if (is_matrix && is_read(id)) bytes += static_cast<double>(size_of(node.dtype));
  }
  return bytes;
}

}  // namespace

std::unique_ptr<OwnProduct> OwnProduct::make(const Plan& plan, int sweep, Modules& modules,
                                             const nlohmann::json& capabilities,
                                             const ProductTuning& tuning, size_t kernels_behind,
                                             std::string* why) {
  const Sweep& s = plan.sweeps[static_cast<size_t>(sweep)];
  const auto arg = [&](size_t i) -> const Node& {
    return plan.graph[plan.graph[s.matmul].args[i]];
  };
  const ProductFamily family = product_family(plan.target.sm, capabilities, why);
  if (family == ProductFamily::none) return nullptr;
  const DType dtype = plan.graph[s.matmul].dtype;
  const bool half = dtype == DType::f16 || dtype == DType::bf16;
  const bool tf32 = plan.precision == Precision::tf32;
  if (!half && !tf32 && plan.precision != Precision::fp32 && plan.precision != Precision::high) {
    *why = "the precision policy asks for the library's product";
  } else if (!half && tf32 && family != ProductFamily::hopper) {
    *why = "TF32 products are the library's on this GPU";
  } else if (!element_of(dtype) || arg(0).dtype != dtype || arg(1).dtype != dtype) {
    *why = "its operands are neither f32 nor both of the product's 16-bit type";
  } else if (half && family != ProductFamily::hopper) {
    *why = "products of 16-bit operands are the library's on this GPU";
  } else if (arg(1).shape.batched && (half || tf32 || family != ProductFamily::hopper)) {
    *why = "its weight differs from sample to sample";
  } else if (std::optional<ProductEpilogue> epilogue = write_epilogue(plan, sweep, why)) {
    if (epilogue->operands.size() > kMaxOperands) {
      *why = "its epilogue reads more tensors than fit into a launch";
      return nullptr;
    }
    return std::unique_ptr<OwnProduct>(
        new OwnProduct(family, plan, sweep, modules, tuning, kernels_behind, *std::move(epilogue)));
  }
  return nullptr;
}

OwnProduct::OwnProduct(ProductFamily family, const Plan& plan, int sweep, Modules& modules,
                       const ProductTuning& tuning, size_t kernels_behind, ProductEpilogue epilogue)
    : family_(family),
      plan_(plan),
      sweep_(plan.sweeps[static_cast<size_t>(sweep)]),
      element_(*element_of(plan.graph[sweep_.matmul].dtype)),
      scheme_(scheme_of(family, plan, sweep_)),
      unpacked_(unpacked_of(plan, sweep_)),
      modules_(modules),
      tuning_(tuning),
      epilogue_(std::move(epilogue)),
      epilogue_cost_{epilogue_.moments, kernels_behind, epilogue_flops(plan, sweep_),
                     epilogue_bytes(plan, sweep_)} {
  if (epilogue_.merge) merge_.emplace(*epilogue_.merge, modules);
}

ProductShape OwnProduct::usual_shape(int64_t batch) const {
  const ProductExtents extents = product_extents(plan_, sweep_, batch);
  ProductShape shape;
  shape.m = extents.m;
  shape.n = extents.n;
  shape.k = extents.k;
  shape.x = {extents.k, 1, true};
  const bool k_last = plan_.graph[sweep_.matmul].transpose_b;
  shape.w = {k_last ? extents.k : 1, k_last ? 1 : extents.n, true};
  shape.batches = extents.batches;
  if (shape.batches > 1) {
    const bool shared = !plan_.graph[plan_.graph[sweep_.matmul].args[0]].shape.batched;
    shape.x.batch_stride = shared ? 0 : extents.m * extents.k;
    shape.w.batch_stride = extents.n * extents.k;
  }
  shape.y_stride = extents.n;
  return of_program(shape);
}

// With what is the same in all calls.
ProductShape OwnProduct::of_program(ProductShape shape) const {
  shape.stores_result = epilogue_.stored != kNoValue;
  shape.element = element_;
  shape.scheme = scheme_;
  shape.unpacked = unpacked_;
  return shape;
}

std::string OwnProduct::kernel_text(const ProductPlan& plan) const {
  return product_kernel_text(
      epilogue_, {plan.header, plan.kernel, plan.config, static_cast<int>(plan.threads),
                  plan.variant != hopper::Variant::portable, static_cast<int>(plan.resident)});
}

const OwnProduct::Prepared& OwnProduct::prepared(const ProductShape& shape) const {
  const auto matches = [&](const std::unique_ptr<Prepared>& p) {
    return same_shape(p->shape, shape);
  };
  {
    const std::shared_lock lock(mutex_);
    const auto found = std::find_if(prepared_.begin(), prepared_.end(), matches);
    if (found != prepared_.end()) return **found;
  }
  auto p = std::make_unique<Prepared>();
  p->shape = shape;
  if (shape.weight_packed) {
    ProductShape whole = shape;
    whole.weight_packed = false;
    p->plan = plan_own_product(family_, shape, plan_.target);
    p->pays = p->plan.estimated_us <= plan_own_product(family_, whole, plan_.target).estimated_us;
  } else if (shape.x_halves || shape.y_halves) {
    p->plan = plan_own_product(family_, shape, plan_.target);
    p->chosen_by = "estimated";
  } else {
    ProductTuning::Choice choice = tuning_.choose(family_, shape, epilogue_cost_);
    p->plan = std::move(choice.plan);
    p->choice = std::move(choice.name);
    p->chosen_by = choice.by;
  }
  if (p->plan.variant != hopper::Variant::unsupported) {
    p->product_unit = modules_.add(
        {{epilogue_.kernel, kernel_text(p->plan)}, {epilogue_.kernel}, p->plan.shared_bytes});
    if (!p->plan.sliced.kernel.empty()) p->sliced_unit = modules_.add(sliced_unit(p->plan));
    for (const SplitStep& step : p->plan.splits) {
      p->split_units.push_back(modules_.add(split_unit(step)));
    }
  }
  const std::unique_lock lock(mutex_);
  prepared_.push_back(std::move(p));
  return *prepared_.back();
}

// With a frozen weight where there is one and it pays.
const OwnProduct::Prepared& OwnProduct::chosen(ProductShape shape, bool frozen) const {
  const Prepared& plain = prepared(shape);
  if (!frozen || plain.product_unit < 0) return plain;
  shape.weight_packed = true;
  const Prepared& kept = prepared(shape);
  return kept.pays && kept.product_unit >= 0 ? kept : plain;
}

size_t OwnProduct::bytes_of(const Prepared& p) const {
  size_t partials = 0;
  for (int i = 0; i < epilogue_.moments; ++i) partials += partial_bytes(p, i);
  return align_up(p.plan.workspace_bytes, kWorkspaceAlignment) +
         align_up(partials, kWorkspaceAlignment);
}

size_t OwnProduct::partial_bytes(const Prepared& p, int statistic) const {
  return hopper::partial_bytes(p.plan, p.shape.n, (epilogue_.sums >> statistic & 1) != 0);
}

// The plan counts on what this GPU's architecture has of shared memory.
bool OwnProduct::runs_on(int sm) const {
  return sm == plan_.target.sm;
}

bool OwnProduct::serves(int64_t batch) const {
  return usual(batch).product_unit >= 0;
}

size_t OwnProduct::scratch_bytes(int64_t batch) const {
  ProductShape shape = usual_shape(batch);
  size_t bytes = bytes_of(prepared(shape));
  // Products of many shapes come laid out in many ways, at worst so that both operands must be
  // packed; what a call then takes, it is asked for itself.
  const bool any_layout = unpacked_ != hopper::Unpacked::none && element_ == hopper::Element::f32;
  if (any_layout) bytes = std::max(bytes, packed_workspace(family_, shape));
  bytes = std::max(bytes, handed_bytes(batch));
  if (frozen_bytes() > 0) {
    shape.weight_packed = true;
    bytes = std::max(bytes, bytes_of(prepared(shape)));
  }
  return bytes;
}

size_t OwnProduct::frozen_exponents() const {
  const ProductExtents extents = product_extents(plan_, sweep_, 1);
  return align_up(hopper::packed_bytes(scheme_, extents.n, extents.k), kWorkspaceAlignment);
}

size_t OwnProduct::frozen_bytes() const {
  const Node& weight = plan_.graph[product_operand(plan_.graph, sweep_, 1)];
  if (weight.kind != NodeKind::leaf || weight.role != LeafRole::parameter) return 0;
  if (element_ != hopper::Element::f32) return 0;  // read as it is
  const ProductExtents extents = product_extents(plan_, sweep_, 1);
  return frozen_exponents() + static_cast<size_t>(extents.n) * sizeof(i32);
}

void OwnProduct::lower_frozen(const Lowering& to) {
  const std::optional<MatrixOperand> w = matrix_operand(to, sweep_, 1);
  if (!w) fail(INGOT_UNSUPPORTED, "{}: a weight with gaps cannot be frozen", sweep_.name);
  SplitStep step = hopper::plan_split(SplitStep::Operand::w, w->rows, w->k, operand_shape(*w),
                                      scheme_, family_ == ProductFamily::hopper);
  step.exponent_offset = frozen_exponents();
  to.pack(product_operand(plan_.graph, sweep_, 1), w->address, step, modules_.add(split_unit(step)),
          to.frozen);
}

ProductShape OwnProduct::shape_of(const MatrixOperand& x, const MatrixOperand& w,
                                  const MatrixOperand& y) const {
  ProductShape shape;
  shape.m = x.rows;
  shape.n = w.rows;
  shape.k = x.k;
  shape.x = operand_shape(x);
  shape.w = operand_shape(w);
  shape.y_stride = y.row_stride;
  shape.y_aligned = y.alignment == 16;
  return of_program(shape);
}

// Operands of a batch of products stay as they are; else the samples of all entries are one matrix.
bool OwnProduct::fold(const Lowering& to, MatrixOperand& x, MatrixOperand& w) const {
  if (w.batched && to.batch > 1) return true;
  return w.fold_batch(to.batch) && x.fold_batch(to.batch);
}

// Where the epilogue stores; nullopt for a result that is no matrix.
std::optional<MatrixOperand> OwnProduct::result(const Lowering& to, const MatrixOperand& x,
                                                const MatrixOperand& w) const {
  MatrixOperand y;
  y.rows = x.rows;
  y.row_stride = w.rows;
  if (epilogue_.stored == kNoValue) return y;
  if (const int index = to.tensor_of(epilogue_.stored); index >= 0) {
    // One row a sample, whatever the shape of the tensor: dense, or a matrix with wider rows.
    const ingot_tensor& tensor = to.tensors[static_cast<size_t>(index)];
    const bool one_row = tensor.sizes[kRows] == 1;
    const int64_t row_stride = tensor.strides[one_row ? kBatch : kRows];
    const bool matrix = tensor.sizes[kFeatures] == plan_.graph[sweep_.matmul].shape.features &&
                        tensor.sizes[kGroups] == 1 &&
                        (one_row || tensor.sizes[kBatch] == 1 ||
                         tensor.strides[kBatch] == tensor.sizes[kRows] * row_stride) &&
                        (tensor.strides[kFeatures] == 1 || tensor.sizes[kFeatures] == 1);
    if (!is_dense(tensor) && !matrix) return std::nullopt;
    if (!is_dense(tensor)) y.row_stride = row_stride;
  }
  y.address = to.bind(epilogue_.stored, plan_.graph[epilogue_.stored].shape).address;
  y.alignment = to.alignment_of(y.address);
  return y;
}

// nullopt where these tensors must go to the library.
std::optional<OwnProduct::Call> OwnProduct::call_of(const Lowering& to) const {
  std::optional<MatrixOperand> x = matrix_operand(to, sweep_, 0);
  std::optional<MatrixOperand> w = matrix_operand(to, sweep_, 1);
  if (!x || !w || !fold(to, *x, *w)) return std::nullopt;
  if (element_of(x->dtype) != element_ || element_of(w->dtype) != element_) return std::nullopt;
  const std::optional<MatrixOperand> y = result(to, *x, *w);
  if (!y) return std::nullopt;
  ProductShape shape = shape_of(*x, *w, *y);
  if (w->batched) shape.batches = to.batch;
  shape.x_halves = takes_halves(to);
  const Prepared& p = chosen(shape, to.frozen.base != Address::Base::none);
  if (p.product_unit < 0 || bytes_of(p) > to.scratch_bytes) return std::nullopt;
  Call call = {*x, *w, *y, &p};
  hand_on(to, call);
  return call;
}

bool OwnProduct::lower(const Lowering& to) {
  const std::optional<Call> call = call_of(to);
  if (!call) return false;
  const Prepared& p = *call->prepared;
  for (size_t i = 0; i < p.plan.splits.size(); ++i) {
    const SplitStep& step = p.plan.splits[i];
    const bool is_x = step.operand == SplitStep::Operand::x;
    to.pack(product_operand(plan_.graph, sweep_, is_x ? 0 : 1), (is_x ? call->x : call->w).address,
            step, p.split_units[i], to.scratch);
  }
  if (p.sliced_unit >= 0) lower_slices(to, p, call->x, call->w);
  if (p.shape.y_halves) name_factors(to, *call);
  lower_product(to, *call);
  to.lowered.halves = {};
  if (p.shape.y_halves) to.lowered.halves = {epilogue_.stored, call->factors};
  if (merge_) {
    Lowering behind = to;
    behind.scratch = to.scratch + align_up(p.plan.workspace_bytes, kWorkspaceAlignment);
    merge_->lower(behind, {}, p.plan.moment_tiles);
  }
  return true;
}

// Rows without gaps, in the form that generate_packing() writes.
const SplitStep* OwnProduct::dense_rows(const Prepared& p) const {
  if (p.plan.scheme == hopper::Scheme::high) return nullptr;
  for (const SplitStep& step : p.plan.splits) {
    const bool dense = step.k_stride == 1 && step.row_stride == step.k && step.entry_rows == 0;
    if (step.operand == SplitStep::Operand::x && dense) return &step;
  }
  return nullptr;
}

std::optional<PackRequest> OwnProduct::packs(const Lowering& to) const {
  const std::optional<Call> call = call_of(to);
  const SplitStep* step = call ? dense_rows(*call->prepared) : nullptr;
  if (step == nullptr) return std::nullopt;
  const ValueId samples = product_operand(plan_.graph, sweep_, 0);
  return PackRequest{samples, *step, call->prepared->plan.scheme, to.scratch};
}

bool OwnProduct::packs_usually(int64_t batch) const {
  const Prepared& p = usual(batch);
  return p.product_unit >= 0 && dense_rows(p) != nullptr;
}

void OwnProduct::lower_slices(const Lowering& to, const Prepared& p, const MatrixOperand& x,
                              const MatrixOperand& w) const {
  const ProductPlan& plan = p.plan;
  const Address sums = to.scratch + plan.sums_offset;
  to.overwrite(sums, plan.sums_bytes);
  to.name("sums of slices", sums, plan.sums_bytes);
  Arguments arguments;
  arguments.add_map(plan.w_map, w.address);
  arguments.add_map(plan.x_map, x.address);
  const size_t at = arguments.add(hopper::args_of(plan, p.shape));
  arguments.set(at + offsetof(hopper::ProductArgs, sums), sums);
  to.launch(StepKind::product, p.sliced_unit, 0, plan.sliced.grid,
            static_cast<int>(plan.sliced.threads), std::move(arguments), plan.sliced.shared_bytes,
            plan.cluster);
}

void OwnProduct::lower_product(const Lowering& to, const Call& call) const {
  using hopper::OperandView;
  using hopper::ProductArgs;
  const Prepared& p = *call.prepared;
  const MatrixOperand &x = call.x, &w = call.w, &y = call.y;
  const ProductPlan& plan = p.plan;
  const bool frozen = p.shape.weight_packed;
  Arguments arguments;
  add_operands(plan,
               {x.address, w.address, y.address, to.scratch + plan.x_packed_offset,
                frozen ? to.frozen : to.scratch + plan.w_packed_offset},
               arguments);

  const size_t at = arguments.add(hopper::args_of(plan, p.shape));
  const ValueId samples = product_operand(plan_.graph, sweep_, 0);
  if (p.shape.x_halves) {
    arguments.set(at + offsetof(ProductArgs, x_packed), x.address);
  } else if (to.lowered.packed_alone == samples) {
    arguments.set(at + offsetof(ProductArgs, x_packed), to.scratch + plan.x_packed_offset);
  } else if (element_ == hopper::Element::f32) {
    arguments.set(at + offsetof(ProductArgs, x) + offsetof(OperandView, data), x.address);
  }
  if (element_ == hopper::Element::f32) {
    arguments.set(at + offsetof(ProductArgs, w) + offsetof(OperandView, data), w.address);
  }
  if (!hopper::is_unpacked(plan.variant)) {
    if (p.shape.x_halves) {
      arguments.set(at + offsetof(ProductArgs, x_factor), to.lowered.halves.factors);
    } else {
      arguments.set(at + offsetof(ProductArgs, x_exponent), to.scratch + plan.x_exponent_offset);
    }
    arguments.set(at + offsetof(ProductArgs, w_exponent),
                  frozen ? to.frozen + frozen_exponents() : to.scratch + plan.w_exponent_offset);
  }
  if (p.shape.y_halves) arguments.set(at + offsetof(ProductArgs, y_factor), call.factors);
  if (!plan.tma_store) arguments.set(at + offsetof(ProductArgs, y), y.address);
  if (p.sliced_unit >= 0) {
    arguments.set(at + offsetof(ProductArgs, sums), to.scratch + plan.sums_offset);
  }
  Address partials = to.scratch + align_up(plan.workspace_bytes, kWorkspaceAlignment);
  for (int i = 0; i < epilogue_.moments; ++i) {
    const size_t bytes = partial_bytes(p, i);
    arguments.set(at + offsetof(ProductArgs, partials) + static_cast<size_t>(i) * sizeof(void*),
                  partials);
    to.overwrite(partials, bytes);
    to.name((epilogue_.sums >> i & 1) != 0 ? "partial sums" : "partial moments", partials, bytes);
    partials = partials + bytes;
  }

  std::vector<BoundTensor> params;
  for (const KernelOperand& operand : epilogue_.operands) {
    params.push_back(to.bind(operand.value, operand.seen));
  }
  arguments.add_tensors(params);
  // Only Hopper's kernels know of clusters.
  const unsigned cluster = family_ == ProductFamily::hopper ? plan.cluster : 0;
  to.launch(StepKind::product, p.product_unit, 0, plan.grid, static_cast<int>(plan.threads),
            std::move(arguments), plan.shared_bytes, cluster);
}

Precision OwnProduct::precision() const {
  if (element_ != hopper::Element::f32) return Precision::ieee;
  const bool high = scheme_ == hopper::Scheme::high;
  return plan_.precision == Precision::high && !high ? Precision::fp32 : plan_.precision;
}

}  // namespace ingot::cuda
