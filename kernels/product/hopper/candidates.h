// Every tile configuration that is worth measuring for a product on Hopper: those that the cost
// model of launch.h chooses from, and their neighbours. `ingot tune` and bench/hopper/sweep.cu
// measure them. All keep the promise on errors, so that any may be chosen by its time alone.
#pragma once

#include "product/hopper/launch.h"

namespace ingot::hopper {

// What tells a configuration from another: the kernel's template arguments and the raster.
inline std::string name_of(const TileChoice& c) {
  return config_text(c, c.slices == 1) + " raster " + std::to_string(c.raster_group);
}

inline std::vector<TileChoice> candidate_choices(const ProductShape& shape,
                                                 const DeviceLimits& device) {
  const Variant packed = Variant::packed, fused = Variant::fused_split;
  std::vector<TileChoice> list = tile_choices(shape, device);
  if (shape.element != Element::f32) return list;
  if (shape.scheme == Scheme::scaled) {
    const std::vector<TileChoice> menu = list;
    for (TileChoice choice : menu) {
      if (choice.samples != 256) continue;
      for (choice.raster_group = 4; choice.raster_group <= 16; choice.raster_group += 12)
        list.push_back(choice);
    }
    list.push_back({Variant::scaled, 128, 2, 6, 6, 1, 8});
    return list;
  }
  list.push_back({packed, 64, 1, 8, 8, 1, 8});
  list.push_back({packed, 128, 2, 6, 6, 2, 8});
  list.push_back({packed, 160, 1, 5, 5, 2, 16});
  list.push_back({packed, 160, 2, 5, 5, 2, 8});
  list.push_back({packed, 192, 1, 5, 5, 1, 8});
  list.push_back({packed, 192, 2, 5, 5, 1, 4});
  list.push_back({packed, 192, 2, 5, 5, 1, 16});
  if (shape.w.vector_rows(shape.k) && !shape.weight_packed) {
    list.push_back({fused, 64, 1, 3, 6, 0, 8, 1});
    list.push_back({fused, 128, 1, 3, 4, 0, 8, 1});
    const int promotion = shape.k >= 8192 ? 2 : 1;
    list.push_back({fused, 128, 1, 3, 4, 0, 16, promotion});
    for (const int slices : {2, 4, 8}) {
      if (divide_up(shape.k, 128) < slices) break;
      for (const TileChoice& c : {TileChoice{fused, 64, 1, 3, 6, 0, 8, 1, slices},
                                  TileChoice{fused, 128, 1, 3, 4, 0, 8, 1, slices}}) {
        // Beyond two waves of blocks there is nothing left to share.
        if (tiles_of(shape, c) <= 2 * cluster_slots(c, device)) list.push_back(c);
      }
    }
  }
  std::vector<TileChoice> distinct;
  for (const TileChoice& choice : list) {
    const std::string name = name_of(choice);
    const auto same = [&](const TileChoice& c) { return name_of(c) == name; };
    if (std::none_of(distinct.begin(), distinct.end(), same)) distinct.push_back(choice);
  }
  return distinct;
}

// The plan of the candidate of that name; unsupported where this shape has none.
inline ProductPlan plan_named(const ProductShape& shape, const std::string& name,
                              const DeviceLimits& device) {
  for (const TileChoice& choice : candidate_choices(shape, device)) {
    if (name_of(choice) != name) continue;
    ProductPlan plan = plan_with(shape, choice, device);
    plan.estimated_us = estimate(shape, choice, device);
    plan.library_us = estimate_library(shape);
    plan.library_faster = plan.library_us < plan.estimated_us;
    return plan;
  }
  ProductPlan none;
  none.reason = "there is no configuration " + name;
  return none;
}

}  // namespace ingot::hopper
