// Two products in a row: whether the first hands its result to the second as halves, and where
// their factors lie.
#include <algorithm>
#include <string_view>

#include "cuda/own_product.h"
#include "support/align.h"
#include "support/error.h"

namespace ingot::cuda {

void OwnProduct::hand_to(OwnProduct& next) {
  const bool split = family_ == ProductFamily::hopper && element_ == hopper::Element::f32 &&
                     scheme_ == hopper::Scheme::split && next.scheme_ == hopper::Scheme::split &&
                     next.family_ == family_ && next.element_ == element_;
  const int64_t features = plan_.graph[sweep_.matmul].shape.features;
  const bool own_weight = plan_.graph[plan_.graph[sweep_.matmul].args[1]].shape.batched;
  const bool same_rows = usual_shape(1).m == next.usual_shape(1).m;
  if (!split || own_weight || !same_rows) return;
  if (!hopper::can_be_halves(features) || next.usual_shape(1).k != features) return;
  if (epilogue_.stored != product_operand(plan_.graph, next.sweep_, 0)) return;
  next_ = &next;
  next.before_ = this;
}

// The product before it has handed it halves.
bool OwnProduct::takes_halves(const Lowering& to) const {
  const ValueId handed = to.lowered.halves.value;
  return handed != kNoValue && handed == product_operand(plan_.graph, sweep_, 0);
}

bool OwnProduct::reads_packed_alone(const Lowering& to) const {
  return takes_halves(to) || to.lowered.packed_alone == product_operand(plan_.graph, sweep_, 0);
}

// Behind both products' scratch memory.
size_t OwnProduct::factors_offset(const Prepared& handing, const Prepared& taking) const {
  return align_up(std::max(bytes_of(handing), next_->bytes_of(taking)), kWorkspaceAlignment);
}

// This product with halves as its result, where both together are faster so; else nullptr.
const OwnProduct::Prepared* OwnProduct::handing(const Prepared& plain, bool frozen,
                                                const Taking& next) const {
  const auto given = [](const Prepared& p) { return std::string_view(p.chosen_by) == "given"; };
  if (plain.product_unit < 0 || next.plain->product_unit < 0 || next.halves->product_unit < 0) {
    return nullptr;
  }
  if (given(plain) || given(*next.plain) || !hopper::stores_by_tma(plain.shape)) return nullptr;
  hopper::ProductShape shape = plain.shape;
  shape.y_halves = true;
  shape.weight_packed = frozen;
  const Prepared& handing = prepared(shape);
  if (handing.product_unit < 0) return nullptr;
  const double before = plain.plan.estimated_us + next.plain->plan.estimated_us;
  const double after = handing.plan.estimated_us + next.halves->plan.estimated_us;
  return after < before ? &handing : nullptr;
}

// nullopt where the operand that `before` stores is not what this product reads, row by row.
std::optional<OwnProduct::Taking> OwnProduct::taking(const Lowering& to, const Call& before) const {
  std::optional<MatrixOperand> x = matrix_operand(to, sweep_, 0);
  std::optional<MatrixOperand> w = matrix_operand(to, sweep_, 1);
  if (!x || !w || !fold(to, *x, *w)) return std::nullopt;
  const bool same = x->address == before.y.address && x->rows == before.y.rows &&
                    x->k == before.w.rows && x->row_stride == x->k && x->k_stride == 1;
  const std::optional<MatrixOperand> y = result(to, *x, *w);
  if (!same || !y || x->dtype != DType::f32 || w->dtype != DType::f32) return std::nullopt;
  hopper::ProductShape shape = shape_of(*x, *w, *y);
  Taking taking;
  const bool frozen = to.frozen.base != Address::Base::none;
  taking.plain = &chosen(shape, frozen);
  shape.x_halves = true;
  taking.halves = &chosen(shape, frozen);
  return taking;
}

// Makes a call's result halves where that pays. What it was itself handed stays as it is meanwhile.
void OwnProduct::hand_on(const Lowering& to, Call& call) const {
  if (next_ == nullptr) return;
  const std::optional<Taking> next = next_->taking(to.behind(), call);
  if (!next) return;
  const bool frozen = to.frozen.base != Address::Base::none;
  const Prepared* halves = handing(*call.prepared, frozen, *next);
  if (halves == nullptr) return;
  size_t at = factors_offset(*halves, *next->halves);
  const size_t bytes = factor_bytes(call.x.rows);
  if (call.prepared->shape.x_halves) {
    const size_t handed = to.lowered.halves.factors.offset - to.scratch.offset;
    const size_t end = align_up(handed + before_->factor_bytes(call.x.rows), kWorkspaceAlignment);
    if (bytes_of(*halves) > handed) return;
    if (at < end && handed < at + bytes) at = end;
  }
  if (at + bytes > to.scratch_bytes) return;
  call.prepared = halves;
  call.factors = to.scratch + at;
}

// Of a result handed on.
size_t OwnProduct::factor_bytes(int64_t samples) const {
  return hopper::factor_bytes(samples, plan_.graph[sweep_.matmul].shape.features);
}

// Of the usual tensors, factors of what it is handed and hands on included.
size_t OwnProduct::handed_bytes(int64_t batch) const {
  if (!hands_usually(batch)) return 0;
  const int64_t samples = usual_shape(batch).m;
  size_t at = factors_offset(usual(batch), next_->usual(batch)), bytes = factor_bytes(samples);
  if (is_handed_usually(batch)) {
    at = std::max(at, before_->factors_offset(before_->usual(batch), usual(batch)));
    bytes += align_up(before_->factor_bytes(samples), kWorkspaceAlignment);
  }
  return at + bytes;
}

void OwnProduct::name_factors(const Lowering& to, const Call& call) const {
  const Node& node = plan_.graph[epilogue_.stored];
  const std::string called = node.name.empty() ? fmt::format("%{}", epilogue_.stored) : node.name;
  const size_t bytes = factor_bytes(call.x.rows);
  to.overwrite(call.factors, bytes);
  to.name(called + "'s factors", call.factors, bytes);
}

bool OwnProduct::is_handed_usually(int64_t batch) const {
  return before_ != nullptr && before_->hands_usually(batch);
}

// With dense tensors. Remembered, since it follows from all products before.
bool OwnProduct::hands_usually(int64_t batch) const {
  if (next_ == nullptr) return false;
  {
    const std::shared_lock lock(mutex_);
    if (const auto known = hands_.find(batch); known != hands_.end()) return known->second;
  }
  hopper::ProductShape own = usual_shape(batch), shape = next_->usual_shape(batch);
  own.x_halves = is_handed_usually(batch);
  Taking next;
  next.plain = &next_->prepared(shape);
  shape.x_halves = true;
  next.halves = &next_->prepared(shape);
  const bool hands = handing(prepared(own), false, next) != nullptr;
  const std::unique_lock lock(mutex_);
  return hands_.emplace(batch, hands).first->second;
}

// What dense tensors of a batch size run by.
const OwnProduct::Prepared& OwnProduct::usual(int64_t batch, bool frozen) const {
  hopper::ProductShape shape = usual_shape(batch);
  shape.weight_packed = frozen;
  shape.x_halves = is_handed_usually(batch);
  shape.y_halves = hands_usually(batch);
  return prepared(shape);
}

}  // namespace ingot::cuda
