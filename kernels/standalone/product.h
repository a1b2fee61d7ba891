// Host side of a standalone file: the fp32 product by split operands. On compute capability 9.0 the
// Hopper kernels, where the file was compiled for sm_90a (INGOT_HOPPER), elsewhere the portable one
// (INGOT_PORTABLE); which tile, grid and workspace is planned anew for every shape, as the library
// does, by product/hopper/launch.h and product/portable/launch.h.
#pragma once

#include <dlfcn.h>

#include "product/hopper/args.cuh"
#include "product/hopper/launch.h"
#include "product/portable/args.cuh"
#include "product/portable/launch.h"
#include "product/split.cuh"
#include "standalone/call.h"

namespace ingot::standalone {

// A kernel of this file and what plans call it.
struct ProductKernel {
  const char *function, *config;
  const void* kernel;
};
struct SplitKernel {
  const char* function;
  const void* kernel;
};

// One product of a program: its shape, for a batch, and the kernels that the file has for it.
struct Product {
  hopper::ProductShape shape;
  int moments;    // statistics that the epilogue emits
  unsigned sums;  // bit i: the i-th is a plain sum
  const ProductKernel* kernels;
  int kernel_count;
  const SplitKernel* splits;
  int split_count;
};

struct ProductTensors {
  void *x, *w, *y;  // y: nullptr where nothing is stored
};

inline bool hopper_here(const Device& device) {
#if defined(INGOT_HOPPER)
  return arch_of(device.sm).hopper_kernels;
#else
  return false;
#endif
}

inline const void* kernel_for(const Product& product, const hopper::ProductPlan& plan) {
  for (int i = 0; i < product.kernel_count; ++i) {
    const ProductKernel& kernel = product.kernels[i];
    if (plan.kernel == kernel.function && plan.config == kernel.config) return kernel.kernel;
  }
  return nullptr;
}

// The plan of the library, where the file has its kernel: it has all that a GPU like the one it was
// written for takes. Else the quickest of those that are here.
inline hopper::ProductPlan plan_product(const Device& device, const Product& product) {
  const hopper::ProductShape& shape = product.shape;
  const hopper::DeviceLimits limits = hopper::limits_of(device.multiprocessors);
  const bool hopper = hopper_here(device);
  hopper::ProductPlan plan =
      hopper ? hopper::plan_product(shape, limits)
             : portable::plan_product(hopper::as_split(shape), device.shared_bytes);
  if (plan.variant == hopper::Variant::unsupported) {
    throw std::runtime_error("the product has no plan: " + plan.reason);
  }
  if (kernel_for(product, plan)) return plan;
  double least = 0;
  bool found = false;
  if (hopper) {
    for (const hopper::TileChoice& choice : hopper::tile_choices(shape, limits)) {
      const hopper::ProductPlan other = hopper::plan_with(shape, choice, limits);
      const double time = hopper::estimate(shape, choice, limits);
      if (!kernel_for(product, other) || (found && time >= least)) continue;
      plan = other;
      least = time;
      found = true;
    }
  }
  if (!found) throw std::runtime_error("this file has no kernel of the product for this GPU");
  return plan;
}

inline const void* split_named(const Product& product, const std::string& function) {
  for (int i = 0; i < product.split_count; ++i) {
    if (function == product.splits[i].function) return product.splits[i].kernel;
  }
  throw std::runtime_error("this file was written without the kernel " + function);
}

// A product's plan with its kernel, and its workspace: what the plan asks for, then the partial
// statistics of its tiles.
struct ProductLayout {
  hopper::ProductPlan plan;
  const void* kernel = nullptr;
  size_t partials = 0, bytes = 0;
};

inline size_t partial_bytes(const Product& product, const hopper::ProductPlan& plan,
                            int statistic) {
  return hopper::partial_bytes(plan, product.shape.n, (product.sums >> statistic & 1) != 0);
}

inline ProductLayout make_product_layout(const Device& device, const Product& product) {
  ProductLayout layout;
  layout.plan = plan_product(device, product);
  layout.kernel = kernel_for(product, layout.plan);
  check(cudaFuncSetAttribute(layout.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(layout.plan.shared_bytes)),
        "reserving shared memory");
  for (const hopper::SplitStep& step : layout.plan.splits) {
    check(cudaFuncSetAttribute(split_named(product, step.kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, int(step.shared_bytes)),
          "reserving shared memory");
  }
  layout.partials = hopper::align_up(layout.plan.workspace_bytes, 256);
  layout.bytes = layout.partials;
  for (int i = 0; i < product.moments; ++i) {
    layout.bytes += partial_bytes(product, layout.plan, i);
  }
  layout.bytes = hopper::align_up(layout.bytes, 256);
  return layout;
}

// The same, remembered for the batch sizes that this thread used last.
inline const ProductLayout& product_layout(const Device& device, const Product& product) {
  static thread_local std::map<std::tuple<int, const void*, int64_t>, ProductLayout> known;
  const auto key =
      std::make_tuple(device.index, static_cast<const void*>(product.kernels), product.shape.m);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() >= 256) known.clear();
  return known.emplace(key, make_product_layout(device, product)).first->second;
}

// The driver's cuTensorMapEncodeTiled, so that nothing is linked beside the CUDA runtime. Constants
// are those of cuda.h: fp16 and fp32 elements, the 128-byte swizzle, promotion to 256 bytes of L2.
inline TensorMap encode_map(const hopper::TensorMapSpec& spec, void* base) {
  using Encode = int (*)(TensorMap*, int, unsigned, void*, const uint64_t*, const uint64_t*,
                         const uint32_t*, const uint32_t*, int, int, int, int);
  static const Encode encode = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<Encode>(driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr);
  }();
  if (!encode) throw std::runtime_error("the driver knows no tensor maps: it is older than 12.0");
  TensorMap map = {};
  const hopper::TensorMapExtents of = hopper::extents_of(spec);
  const int status = encode(&map, hopper::tensor_map_type(spec.element), unsigned(of.rank), base,
                            of.extents, of.strides, of.box, of.steps, 0, 3, 3, 0);
  if (status != 0) {
    throw std::runtime_error("describing a matrix to the copy engine failed with CUDA error " +
                             std::to_string(status));
  }
  return map;
}

inline void launch_splits(const Call& call, const Product& product, const ProductTensors& tensors,
                          const hopper::ProductPlan& plan, unsigned char* scratch) {
  for (const hopper::SplitStep& step : plan.splits) {
    const bool is_x = step.operand == hopper::SplitStep::Operand::x;
    SplitArgs args = {static_cast<const float*>(is_x ? tensors.x : tensors.w),
                      step.row_stride,
                      step.k_stride,
                      i32(step.rows),
                      i32(step.k),
                      scratch + step.packed_offset,
                      reinterpret_cast<i32*>(scratch + step.exponent_offset)};
    void* arguments[] = {&args};
    launch(call, split_named(product, step.kernel),
           {step.grid, int(step.threads), step.shared_bytes, step.cluster}, arguments);
  }
}

// Splits the operands, multiplies, runs the epilogue with `params`. Returns the number of partial
// states for each feature that it left at scratch + product_layout().partials.
template <class Params>
i64 run_product(const Call& call, const Product& product, const ProductTensors& tensors,
                unsigned char* scratch, Params params) {
  const ProductLayout& layout = product_layout(call.device, product);
  const hopper::ProductPlan& plan = layout.plan;
  const hopper::ProductShape& shape = product.shape;
  launch_splits(call, product, tensors, plan, scratch);

  hopper::ProductArgs args = {};
  args.x = {static_cast<const float*>(tensors.x), shape.x.row_stride, shape.x.k_stride};
  args.w = {static_cast<const float*>(tensors.w), shape.w.row_stride, shape.w.k_stride};
  args.x_exponent = reinterpret_cast<const i32*>(scratch + plan.x_exponent_offset);
  args.w_exponent = reinterpret_cast<const i32*>(scratch + plan.w_exponent_offset);
  args.y = static_cast<float*>(tensors.y);
  args.y_stride = shape.y_stride;
  unsigned char* partials = scratch + layout.partials;
  for (int i = 0; i < product.moments; ++i) {
    args.partials[i] = reinterpret_cast<Moments<float>::State*>(partials);
    partials += partial_bytes(product, plan, i);
  }
  args.m = i32(shape.m);
  args.n = i32(shape.n);
  args.k = i32(shape.k);
  args.chunks = plan.chunks;
  args.raster = {plan.raster_feature_tiles, i32(plan.sample_tiles), plan.raster_group};

  Grid grid = {plan.grid, int(plan.threads), plan.shared_bytes, 0};
  if (plan.variant == hopper::Variant::portable) {
    portable::PackedOperands operands = {scratch + plan.w_packed_offset,
                                         scratch + plan.x_packed_offset};
    void* arguments[] = {&operands, &args, &params};
    launch(call, layout.kernel, grid, arguments);
    return plan.moment_tiles;
  }
  const auto base = [&](hopper::TensorMapSpec::Source source) -> void* {
    using Source = hopper::TensorMapSpec::Source;
    if (source == Source::x_packed) return scratch + plan.x_packed_offset;
    if (source == Source::w_packed) return scratch + plan.w_packed_offset;
    return source == Source::w ? tensors.w : source == Source::x ? tensors.x : tensors.y;
  };
  TensorMap w_map = {}, x_map = {}, y_map = {};
  if (plan.variant != hopper::Variant::direct) {
    w_map = encode_map(plan.w_map, base(plan.w_map.source));
    x_map = encode_map(plan.x_map, base(plan.x_map.source));
  }
  if (plan.tma_store) y_map = encode_map(plan.y_map, tensors.y);
  grid.cluster = plan.cluster;
  void* arguments[] = {&w_map, &x_map, &y_map, &args, &params};
  launch(call, layout.kernel, grid, arguments);
  return plan.moment_tiles;
}

}  // namespace ingot::standalone
