// The tf32 product's kernels, each compiled with the epilogues that a program asks for.
#pragma once

#include "device.cuh"
#include "product/hopper/candidates.h"

namespace bench {

template <class Epilogue, class Config>
void add_scaled_kernel(const std::string& config, const std::string& epilogue) {
  const std::string name = config + "/" + epilogue;
  if constexpr (requires { Config::kWeightStages; }) {
    kernels()[name] = (const void*)fused_scaled_kernel<Config, Epilogue>;
  } else {
    kernels()[name] = (const void*)scaled_kernel<Config, Epilogue>;
  }
  shared_by_config()[config] = Config::kSharedBytes;
}

// Every configuration that candidates.h can name where the result is stored.
template <class Epilogue>
void add_scaled_configurations(const std::string& epilogue) {
#define ADD(type, ...) \
  add_scaled_kernel<Epilogue, type<__VA_ARGS__>>(#type "<" #__VA_ARGS__ ">", epilogue);
#define ADD_SLICES(slices)                               \
  ADD(FusedScaledConfig, 128, 4, 5, false, 1, 1, slices) \
  ADD(FusedScaledConfig, 64, 4, 8, false, 1, 1, slices)
  ADD(FusedScaledConfig, 256, 3, 3, true, 1, 2, 1)
  ADD(FusedScaledConfig, 128, 4, 5, true, 1, 1, 1)
  ADD(FusedScaledConfig, 128, 4, 5, true, 1, 2, 1)
  ADD(FusedScaledConfig, 64, 4, 8, true, 1, 1, 1)
  ADD(FusedScaledConfig, 64, 4, 8, false, 1, 1, 1)
  ADD_SLICES(2)
  ADD_SLICES(4)
  ADD_SLICES(8)
  ADD(ScaledConfig, 256, 2, 4, 1)
  ADD(ScaledConfig, 192, 2, 4, 2)
  ADD(ScaledConfig, 128, 2, 6, 1)
  ADD(ScaledConfig, 128, 2, 6, 0)
  ADD(ScaledConfig, 128, 1, 6, 1)
  ADD(ScaledConfig, 128, 1, 6, 0)
#undef ADD_SLICES
#undef ADD
}

// A kernel that is not compiled here ends the program: nothing is left out in silence.
inline void require_kernel(const ProductPlan& plan, const char* epilogue) {
  if (kernels().count(plan.config + "/" + epilogue)) return;
  std::printf("scaled_configurations.cuh lacks %s\n", plan.config.c_str());
  std::exit(2);
}

}  // namespace bench
