// Every tile configuration that is worth measuring for a product on Hopper: those that the cost
// model of launch.h chooses from, and their neighbours. `ingot tune` and bench/hopper/sweep.cu
// measure them. All keep the promise on errors, so that any may be chosen by its time alone.
#pragma once

#include "product/hopper/launch.h"

namespace ingot::hopper {

// What tells a configuration from another: the kernel's template arguments and the raster.
inline std::string name_of(const TileChoice& c) {
  return config_text(c, c.slices == 1) + (merges(c) ? " slices " + std::to_string(c.slices) : "") +
         " raster " + std::to_string(c.raster_group);
}

// Beside those of the menu.
inline std::vector<TileChoice> neighbours(const ProductShape& shape, const DeviceLimits& device) {
  if (shape.element != Element::f32) return {};
  if (shape.scheme == Scheme::high) {
    std::vector<TileChoice> list;
    for (TileChoice choice : tile_choices(shape, device)) {
      if (choice.variant != Variant::crossed || choice.samples != 256) continue;
      choice.raster_group = 16;
      list.push_back(choice);
    }
    if (shape.weight_packed) return list;
    const std::vector<TileChoice> rest = neighbours(as_split(shape), device);
    list.insert(list.end(), rest.begin(), rest.end());
    return list;
  }
  if (shape.scheme == Scheme::scaled) {
    std::vector<TileChoice> list;
    for (TileChoice choice : tile_choices(shape, device)) {
      if (choice.samples != 256) continue;
      for (choice.raster_group = 4; choice.raster_group <= 16; choice.raster_group += 12)
        list.push_back(choice);
    }
    list.push_back(
        {.variant = Variant::scaled, .samples = 128, .stages = 6, .staging = 1, .cluster = 2});
    return list;
  }
  std::vector<TileChoice> list;
  add_streamed_tiles(list, shape, device);
  add_split_both_tile(list, shape);
  add_split_both_slices(list, shape, device);
  const std::vector<TileChoice> packed = {
      {.variant = Variant::packed, .samples = 64, .stages = 8, .staging = 1},
      {.variant = Variant::packed, .samples = 128, .stages = 6, .staging = 2, .cluster = 2},
      {.variant = Variant::packed, .samples = 160, .stages = 5, .staging = 2, .raster_group = 16},
      {.variant = Variant::packed, .samples = 160, .stages = 5, .staging = 2, .cluster = 2},
      {.variant = Variant::packed, .samples = 192, .stages = 5, .staging = 1},
      {.variant = Variant::packed,
       .samples = 192,
       .stages = 5,
       .staging = 1,
       .cluster = 2,
       .raster_group = 4},
      {.variant = Variant::packed,
       .samples = 192,
       .stages = 5,
       .staging = 1,
       .cluster = 2,
       .raster_group = 16}};
  list.insert(list.end(), packed.begin(), packed.end());
  if (scheme_split::splits_weight(shape)) {
    const bool along_k = shape.w.k_stride == 1;
    list.push_back(scheme_split::fused_tile(64, 1, 1, along_k));
    list.push_back(scheme_split::fused_tile(128, 1, 1, along_k));
    TileChoice grouped =
        scheme_split::fused_tile(128, scheme_split::promotion_of(shape), 1, along_k);
    grouped.raster_group = 16;
    list.push_back(grouped);
    // Beyond two waves of blocks there is nothing left to share.
    scheme_split::add_sliced_tiles(list, shape, device, 2);
  }
  return list;
}

inline std::vector<TileChoice> candidate_choices(const ProductShape& shape,
                                                 const DeviceLimits& device) {
  std::vector<TileChoice> list = tile_choices(shape, device);
  for (TileChoice choice : neighbours(shape, device)) {
    choice.batched = shape.batches > 1;
    const std::string name = name_of(choice);
    const auto same = [&](const TileChoice& c) { return name_of(c) == name; };
    if (std::none_of(list.begin(), list.end(), same)) list.push_back(choice);
  }
  return list;
}

// The plan of the candidate of that name; unsupported where this shape has none.
inline ProductPlan plan_named(const ProductShape& shape, const std::string& name,
                              const DeviceLimits& device) {
  for (const TileChoice& choice : candidate_choices(shape, device)) {
    if (name_of(choice) == name) return estimated_plan(shape, choice, device);
  }
  ProductPlan none;
  none.reason = "there is no configuration " + name;
  return none;
}

}  // namespace ingot::hopper
