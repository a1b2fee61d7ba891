// What is known of a product before it is called: the kernels of all batch sizes, and what people
// are told.
#include <algorithm>

#include "cuda/own_product.h"
#include "cuda/product_units.h"

namespace ingot::cuda {

using hopper::ProductShape;
using hopper::SplitStep;

// Those that between them are served by every kernel that some batch size is served by.
std::set<int64_t> OwnProduct::batch_sizes(int64_t batch, bool frozen) const {
  std::set<int64_t> batches = {batch};
  if (plan_.target.streams_products) return batches;
  if (plan_.graph[plan_.graph[sweep_.matmul].args[1]].shape.batched) {
    const hopper::DeviceLimits limits = hopper::limits_of(plan_.target.units);
    for (const int64_t size : hopper::representative_batches(usual_shape(2), limits)) {
      batches.insert(size);
    }
    return batches;
  }
  ProductShape one = usual_shape(1);
  one.weight_packed = frozen;
  const int64_t per_entry = std::max<int64_t>(1, one.m);
  for (const int64_t samples : representative_samples(family_, one, plan_.target)) {
    batches.insert((samples + per_entry - 1) / per_entry);
  }
  for (const int64_t samples : tuning_.samples_with_choice(family_, one, epilogue_.moments)) {
    batches.insert(std::max<int64_t>(1, samples / per_entry));
  }
  return batches;
}

// Of all batch sizes.
void OwnProduct::add_units(std::set<int>& units, int64_t batch, bool frozen) {
  for (const int64_t size : batch_sizes(batch, frozen)) {
    ProductShape shape = usual_shape(size);
    shape.weight_packed = frozen;
    for (const Prepared* p : {&prepared(shape), &usual(size, frozen)}) {
      units.insert(p->split_units.begin(), p->split_units.end());
      units.insert(p->sliced_unit);
      units.insert(p->product_unit);
    }
  }
  if (merge_) units.insert(merge_->unit());
  units.erase(-1);
}

std::vector<int> OwnProduct::units(int64_t batch) {
  std::set<int> result;
  add_units(result, batch, false);
  return {result.begin(), result.end()};
}

std::vector<int> OwnProduct::frozen_units(int64_t batch) {
  std::set<int> result;
  if (frozen_bytes() > 0) add_units(result, batch, true);
  return {result.begin(), result.end()};
}

nlohmann::json OwnProduct::describe(int64_t batch) {
  const Prepared& p = usual(batch);
  nlohmann::json kernels = nlohmann::json::array();
  for (const SplitStep& step : p.plan.splits) {
    const Unit unit = split_unit(step);
    kernels.push_back({{"name", unit.source.name}, {"text", unit.source.text}});
  }
  if (!p.plan.sliced.kernel.empty()) {
    const Unit unit = sliced_unit(p.plan);
    kernels.push_back({{"name", unit.source.name}, {"text", unit.source.text}});
  }
  kernels.push_back({{"name", epilogue_.kernel}, {"text", kernel_text(p.plan)}});
  if (merge_) kernels.push_back(merge_->describe());
  std::string provider = name_of(family_, element_, p.plan.scheme);
  if (p.shape.y_halves) provider += "; its epilogue packs the result for the next product";
  if (p.shape.x_halves) provider += "; its samples come packed from the product before";
  return {{"provider", std::move(provider)},
          {"config", p.plan.config},
          {"reason", p.plan.reason},
          {"kernels", kernels}};
}

nlohmann::json OwnProduct::describe_tuning(int64_t batch) {
  const ProductShape shape = usual_shape(batch);
  const Prepared& p = prepared(shape);
  return {{"key", tuning_.key(family_, shape, epilogue_.moments)},
          {"choice", p.choice},
          {"by", p.chosen_by},
          {"candidates", tuning_.candidates(family_, shape)},
          {"file", tuning_.file()}};
}

}  // namespace ingot::cuda
