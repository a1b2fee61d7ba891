// Runs a ProductPlan with kernels compiled into this program; what the run-time does with NVRTC.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "launch/runtime.h"
#include "launch/runtime_maps.h"
#include "product/crossed_rows.cuh"
#include "product/hopper/crossed.cuh"
#include "product/hopper/fused_scaled.cuh"
#include "product/hopper/fused_split.cuh"
#include "product/hopper/launch.h"
#include "product/hopper/packed.cuh"
#include "product/hopper/scaled.cuh"
#include "product/hopper/split_both.cuh"
#include "product/portable/launch.h"
#include "product/portable/packed.cuh"
#include "product/scaled_rows.cuh"
#include "product/split.cuh"
#include "status.cuh"

namespace bench {

using namespace ingot;
using namespace ingot::hopper;

template <int kLanes, int kPieces, bool kVectors>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    split_rows_kernel(const __grid_constant__ SplitArgs args) {
  split_rows<kLanes, kPieces, kVectors>(args);
}
template <int kWarps, int kRegisters, int kShared>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 8 || kRegisters == 0 ? 2 : 1)
    split_columns_kernel(const __grid_constant__ SplitArgs args) {
  split_columns<kWarps, kRegisters, kShared>(args);
}

template <int kLanes, int kPairs, bool kVectors>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    scale_rows_kernel(const __grid_constant__ SplitArgs args) {
  scale_rows<kLanes, kPairs, kVectors>(args);
}
template <int kWarps, int kRegisters, int kShared>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 8 || kRegisters == 0 ? 2 : 1)
    scale_columns_kernel(const __grid_constant__ SplitArgs args) {
  scale_columns<kWarps, kRegisters, kShared>(args);
}

template <int kLanes, int kPairs, bool kVectors>
__global__ void __launch_bounds__(kLanes > 256 ? kLanes : 256)
    cross_rows_kernel(const __grid_constant__ SplitArgs args) {
  cross_rows<kLanes, kPairs, kVectors>(args);
}
template <int kWarps, int kRegisters, int kShared>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 8 || kRegisters == 0 ? 2 : 1)
    cross_columns_kernel(const __grid_constant__ SplitArgs args) {
  cross_columns<kWarps, kRegisters, kShared>(args);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(384, 1)
    fused_split_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                       const __grid_constant__ TensorMap y,
                       const __grid_constant__ ProductArgs args,
                       const __grid_constant__ typename Epilogue::Params params) {
  product_fused_split<Config, Epilogue>(w, x, y, args, params);
}
template <class Config, class Epilogue>
__global__ void __launch_bounds__(384, 1)
    packed_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                  const __grid_constant__ TensorMap y, const __grid_constant__ ProductArgs args,
                  const __grid_constant__ typename Epilogue::Params params) {
  product_packed<Config, Epilogue>(w, x, y, args, params);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(384, 1)
    fused_scaled_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                        const __grid_constant__ TensorMap y,
                        const __grid_constant__ ProductArgs args,
                        const __grid_constant__ typename Epilogue::Params params) {
  product_fused_scaled<Config, Epilogue>(w, x, y, args, params);
}
template <class Config, class Epilogue>
__global__ void __launch_bounds__(384, 1)
    scaled_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                  const __grid_constant__ TensorMap y, const __grid_constant__ ProductArgs args,
                  const __grid_constant__ typename Epilogue::Params params) {
  product_scaled<Config, Epilogue>(w, x, y, args, params);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    split_both_product_kernel(const __grid_constant__ TensorMap w,
                              const __grid_constant__ TensorMap x,
                              const __grid_constant__ TensorMap y,
                              const __grid_constant__ ProductArgs args,
                              const __grid_constant__ typename Epilogue::Params params) {
  product_split_both<Config, Epilogue>(w, x, y, args, params);
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    split_both_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                      const __grid_constant__ ProductArgs args) {
  split_both_slices<Config>(w, x, args);
}
template <class Config, class Epilogue>
__global__ void __launch_bounds__(kMergeThreads, 1)
    merged_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                  const __grid_constant__ TensorMap y, const __grid_constant__ ProductArgs args,
                  const __grid_constant__ typename Epilogue::Params params) {
  product_merged<Config, Epilogue>(w, x, y, args, params);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(384, 1)
    crossed_kernel(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
                   const __grid_constant__ TensorMap y, const __grid_constant__ ProductArgs args,
                   const __grid_constant__ typename Epilogue::Params params) {
  product_crossed<Config, Epilogue>(w, x, y, args, params);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    portable_kernel(const __grid_constant__ portable::PackedOperands operands,
                    const __grid_constant__ ProductArgs args,
                    const __grid_constant__ typename Epilogue::Params params) {
  portable::product_portable<Config, Epilogue>(operands, args, params);
}

// Kernels by the text a plan names them with ("product_packed<PackedConfig<…>>/epilogue").
inline std::map<std::string, const void*>& kernels() {
  static std::map<std::string, const void*> table;
  return table;
}

// Shared memory that a configuration's kernels take.
inline std::map<std::string, size_t>& shared_by_config() {
  static std::map<std::string, size_t> table;
  return table;
}

inline void add_split_kernels() {
  const auto add = [](const char* name, const void* f) { kernels()[name] = f; };
#define ADD(l, p, v) \
  add("split_rows<" #l ", " #p ", " #v ">", (const void*)split_rows_kernel<l, p, v>);
#define ADD_LANES(l, v) ADD(l, 1, v) ADD(l, 2, v) ADD(l, 4, v) ADD(l, 8, v)
  ADD_LANES(32, true)
  ADD_LANES(256, true)
  ADD_LANES(1024, true)
  ADD(1024, 0, true)
  ADD_LANES(32, false)
  ADD_LANES(256, false)
  ADD_LANES(1024, false)
  ADD(1024, 0, false)
#undef ADD_LANES
#undef ADD
  add("split_columns<8, 2, 2>", (const void*)split_columns_kernel<8, 2, 2>);
  add("split_columns<16, 2, 2>", (const void*)split_columns_kernel<16, 2, 2>);
  add("split_columns<16, 0, 0>", (const void*)split_columns_kernel<16, 0, 0>);
}

inline void add_scale_kernels() {
  const auto add = [](const char* name, const void* f) { kernels()[name] = f; };
#define ADD(l, p, v) \
  add("scale_rows<" #l ", " #p ", " #v ">", (const void*)scale_rows_kernel<l, p, v>);
#define ADD_LANES(l, v) ADD(l, 1, v) ADD(l, 2, v) ADD(l, 4, v)
  ADD_LANES(32, true)
  ADD_LANES(256, true)
  ADD_LANES(1024, true)
  ADD(1024, 0, true)
  ADD_LANES(32, false)
  ADD_LANES(256, false)
  ADD_LANES(1024, false)
  ADD(1024, 0, false)
#undef ADD_LANES
#undef ADD
  add("scale_columns<8, 1, 1>", (const void*)scale_columns_kernel<8, 1, 1>);
  add("scale_columns<16, 1, 1>", (const void*)scale_columns_kernel<16, 1, 1>);
  add("scale_columns<16, 0, 0>", (const void*)scale_columns_kernel<16, 0, 0>);
}

inline void add_cross_kernels() {
  const auto add = [](const char* name, const void* f) { kernels()[name] = f; };
#define ADD(l, p, v) \
  add("cross_rows<" #l ", " #p ", " #v ">", (const void*)cross_rows_kernel<l, p, v>);
#define ADD_LANES(l, v) ADD(l, 1, v) ADD(l, 2, v) ADD(l, 4, v)
  ADD_LANES(32, true)
  ADD_LANES(256, true)
  ADD_LANES(1024, true)
  ADD(1024, 0, true)
  ADD_LANES(32, false)
  ADD_LANES(256, false)
  ADD_LANES(1024, false)
  ADD(1024, 0, false)
#undef ADD_LANES
#undef ADD
  add("cross_columns<8, 2, 2>", (const void*)cross_columns_kernel<8, 2, 2>);
  add("cross_columns<16, 2, 2>", (const void*)cross_columns_kernel<16, 2, 2>);
  add("cross_columns<16, 0, 0>", (const void*)cross_columns_kernel<16, 0, 0>);
}

struct Buffers {
  const float* x = nullptr;
  const float* w = nullptr;
  float* y = nullptr;
  Moments<float>::State* partials[kMaxMoments] = {};
  unsigned char* workspace = nullptr;
};

// A plan bound to buffers, ready to launch any number of times.
template <class Params>
struct Bound {
  ProductPlan plan;
  Buffers buffers;
  ProductArgs args{};
  Params params{};
  TensorMap w{}, x{}, y{};
  portable::PackedOperands packed{};
  const void* kernel = nullptr;
  const void* sliced = nullptr;

  void split() const {
    for (const SplitStep& step : plan.splits) {
      const bool is_x = step.operand == SplitStep::Operand::x;
      SplitArgs split_args = args_of(step);
      split_args.source = is_x ? buffers.x : buffers.w;
      split_args.packed = buffers.workspace + step.packed_offset;
      split_args.exponent = reinterpret_cast<i32*>(buffers.workspace + step.exponent_offset);
      void* arguments[] = {&split_args};
      const Grid grid = {step.grid, int(step.threads), step.shared_bytes, step.cluster};
      launch(kernels().at(step.kernel), grid, arguments, nullptr, false);
    }
  }
  void slices() {
    if (sliced == nullptr) return;
    void* arguments[] = {&w, &x, &args};
    const SlicedStep& step = plan.sliced;
    const Grid grid = {step.grid, int(step.threads), step.shared_bytes, 0};
    launch(sliced, grid, arguments, nullptr, !plan.splits.empty());
  }
  void product(bool dependent = false) {
    void* arguments[] = {&w, &x, &y, &args, &params};
    void* portable_arguments[] = {&packed, &args, &params};
    const bool is_portable = plan.variant == Variant::portable;
    const Grid grid = {plan.grid, int(plan.threads), plan.shared_bytes, plan.cluster};
    launch(kernel, grid, is_portable ? portable_arguments : arguments, nullptr, dependent);
  }
  void run() {
    split();
    slices();
    product(true);
  }
};

template <class Params>
Bound<Params> bind(const ProductPlan& plan, const ProductShape& shape, const Buffers& buffers,
                   const char* epilogue, const Params& params) {
  Bound<Params> bound;
  bound.plan = plan;
  bound.buffers = buffers;
  bound.params = params;
  const bool is_portable = plan.variant == Variant::portable;
  const bool merged = !plan.sliced.kernel.empty();
  const char* kind = is_portable ? "portable::" : merged ? "merged " : "";
  const std::string name = kind + plan.config + "/" + epilogue;
  if (!kernels().count(name)) {
    std::printf("no kernel %s in this program\n", name.c_str());
    std::exit(1);
  }
  bound.kernel = kernels().at(name);
  if (merged) bound.sliced = kernels().at(plan.sliced.kernel + plan.config);
  unsigned char* ws = buffers.workspace;
  const auto base = [&](TensorMapSpec::Source source) -> void* {
    using Source = TensorMapSpec::Source;
    switch (source) {
      case Source::w:
        return const_cast<float*>(buffers.w);
      case Source::x:
        return const_cast<float*>(buffers.x);
      case Source::y:
        return buffers.y;
      case Source::x_packed:
        return ws + plan.x_packed_offset;
      case Source::w_packed:
        return ws + plan.w_packed_offset;
    }
    return nullptr;
  };
  bound.packed = {ws + plan.w_packed_offset, ws + plan.x_packed_offset};
  if (!is_portable) bound.w = encode_map(plan.w_map, base(plan.w_map.source));
  if (!is_portable) bound.x = encode_map(plan.x_map, base(plan.x_map.source));
  if (plan.tma_store) bound.y = encode_map(plan.y_map, base(plan.y_map.source));
  ProductArgs& a = bound.args;
  a = args_of(plan, shape);
  a.x.data = buffers.x;
  a.w.data = buffers.w;
  a.x_exponent = reinterpret_cast<i32*>(ws + plan.x_exponent_offset);
  a.w_exponent = reinterpret_cast<i32*>(ws + plan.w_exponent_offset);
  a.y = buffers.y;
  a.sums = reinterpret_cast<float*>(ws + plan.sums_offset);
  for (int i = 0; i < kMaxMoments; ++i) a.partials[i] = buffers.partials[i];
  return bound;
}

}  // namespace bench
