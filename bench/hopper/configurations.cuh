// The product kernels of every configuration that product/hopper/candidates.h names, but for those
// that read operands unpacked (streamed.cu, split_both.cu), and of the portable product's tiles,
// each compiled with the epilogues that a program asks for. Templates have to be written out;
// require_candidates() holds the list here to the one there.
#pragma once

#include "device.cuh"
#include "problem.cuh"
#include "product/hopper/candidates.h"

namespace bench {

template <class Epilogue, class Config>
void add_kernel(const std::string& config, const std::string& epilogue) {
  const std::string name = config + "/" + epilogue;
  if constexpr (requires { Config::kWeightStages; }) {
    kernels()[name] = (const void*)fused_split_kernel<Config, Epilogue>;
  } else {
    kernels()[name] = (const void*)packed_kernel<Config, Epilogue>;
  }
  shared_by_config()[config] = Config::kSharedBytes;
}

template <class Epilogue>
void add_configurations(const std::string& epilogue) {
#define ADD(type, ...) \
  add_kernel<Epilogue, type<__VA_ARGS__>>(#type "<" #__VA_ARGS__ ">", epilogue);
  // With TMA stores of the result, then without.
  ADD(FusedSplitConfig, 64, 3, 6, true, 1)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1)
  ADD(FusedSplitConfig, 128, 3, 4, true, 1)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1)
  ADD(FusedSplitConfig, 128, 3, 4, true, 2)
  ADD(FusedSplitConfig, 128, 3, 4, false, 2)
  ADD(PackedConfig, 64, 1, 8, 1)
  ADD(PackedConfig, 64, 1, 8, 0)
  ADD(PackedConfig, 128, 1, 6, 2)
  ADD(PackedConfig, 128, 1, 6, 0)
  ADD(PackedConfig, 128, 2, 6, 2)
  ADD(PackedConfig, 128, 2, 6, 0)
  ADD(PackedConfig, 160, 1, 5, 2)
  ADD(PackedConfig, 160, 1, 5, 0)
  ADD(PackedConfig, 160, 2, 5, 2)
  ADD(PackedConfig, 160, 2, 5, 0)
  ADD(PackedConfig, 192, 1, 5, 1)
  ADD(PackedConfig, 192, 1, 5, 0)
  ADD(PackedConfig, 192, 2, 5, 1)
  ADD(PackedConfig, 192, 2, 5, 0)
  // Slices of K meet through shared memory, and never store by TMA.
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 2)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 4)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 8)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 2)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 4)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 8)
  // Weights that are contiguous in n.
  ADD(FusedSplitConfig, 64, 3, 6, true, 1, 1, false, false)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 1, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, true, 1, 1, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 1, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, true, 2, 1, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, false, 2, 1, false, false)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 2, false, false)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 4, false, false)
  ADD(FusedSplitConfig, 64, 3, 6, false, 1, 8, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 2, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 4, false, false)
  ADD(FusedSplitConfig, 128, 3, 4, false, 1, 8, false, false)
#undef ADD
  kernels()["portable::PackedConfig<2, 2, 2>/" + epilogue] =
      (const void*)portable_kernel<portable::PackedConfig<2, 2, 2>, Epilogue>;
  kernels()["portable::PackedConfig<4, 2, 2>/" + epilogue] =
      (const void*)portable_kernel<portable::PackedConfig<4, 2, 2>, Epilogue>;
}

// Ends the program where a candidate for one of many shapes has no kernel here, or the kernel takes
// other shared memory than the host reckons.
inline void require_candidates(const std::string& epilogue) {
  const auto require = [&](const ProductShape& shape) {
    for (const TileChoice& choice : candidate_choices(shape, {})) {
      if (is_unpacked(choice.variant)) continue;
      const ProductPlan plan = plan_with(shape, choice, {});
      if (kernels().count(plan.config + "/" + epilogue) == 0) {
        std::printf("configurations.cuh lacks %s\n", plan.config.c_str());
        std::exit(1);
      }
      if (shared_by_config()[plan.config] != plan.shared_bytes) {
        std::printf("launch.h and the kernel disagree on shared memory: %s\n", plan.config.c_str());
        std::exit(1);
      }
    }
  };
  for (const int64_t m : {1, 64, 1024, 16384}) {
    for (const int64_t n : {64, 1024, 8192}) {
      for (const int64_t k : {64, 1024, 8192, 32768}) {
        for (const bool stores_by_tma : {true, false}) {
          ProductShape shape = row_major(m, n, k);
          if (!stores_by_tma) shape.y_aligned = false;
          require(shape);
          shape.w = {1, n, true};
          require(shape);
        }
      }
    }
  }
}

}  // namespace bench
