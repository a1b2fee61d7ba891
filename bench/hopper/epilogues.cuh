// Hand-written epilogues for checks and timings; generated ones look the same.
#pragma once

#include "common/types.cuh"

namespace bench {

using namespace ingot;

struct PlainEpilogue {
  struct Params {};
  struct Feature {};
  struct Sample {};
  static constexpr int kMoments = 0;
  static constexpr u32 kSums = 0;
  static constexpr bool kStore = true;
  static constexpr bool kReadsElements = false;
  INGOT_D static Feature feature(const Params&, i64) { return {}; }
  INGOT_D static Sample sample(const Params&, i64) { return {}; }
  INGOT_D static float apply(const Params&, const Feature&, const Sample&, i64, i64, float product,
                             float (&)[1]) {
    return product;
  }
};

// gemm_scale_bn's first sweep: (product + bias) · scale, and its statistics.
struct BiasScaleMomentsEpilogue {
  struct Params {
    const float *bias, *scale;
  };
  struct Feature {
    float bias, scale;
  };
  struct Sample {};
  static constexpr int kMoments = 1;
  static constexpr u32 kSums = 0;
  static constexpr bool kStore = true;
  static constexpr bool kReadsElements = false;
  INGOT_D static Feature feature(const Params& p, i64 n) { return {p.bias[n], p.scale[n]}; }
  INGOT_D static Sample sample(const Params&, i64) { return {}; }
  INGOT_D static float apply(const Params&, const Feature& f, const Sample&, i64, i64,
                             float product, float (&stat)[1]) {
    return stat[0] = (product + f.bias) * f.scale;
  }
};

// Every kind of operand, two statistics: product · row[m] + full[m, n], and its square.
struct FullEpilogue {
  struct Params {
    const float *row, *full;
    i64 n;
  };
  struct Feature {};
  struct Sample {
    float factor;
  };
  static constexpr int kMoments = 2;
  static constexpr u32 kSums = 0;
  static constexpr bool kStore = true;
  static constexpr bool kReadsElements = false;
  INGOT_D static Feature feature(const Params&, i64) { return {}; }
  INGOT_D static Sample sample(const Params& p, i64 m) { return {p.row[m]}; }
  INGOT_D static float apply(const Params& p, const Feature&, const Sample& s, i64 m, i64 n,
                             float product, float (&stat)[2]) {
    const float value = product * s.factor + p.full[m * p.n + n];
    stat[0] = value;
    stat[1] = value * value;
    return value;
  }
};

// A plain sum before moments: product · row[m] and its square.
struct SumEpilogue {
  struct Params {
    const float* row;
  };
  struct Feature {};
  struct Sample {
    float factor;
  };
  static constexpr int kMoments = 2;
  static constexpr u32 kSums = 1;
  static constexpr bool kStore = true;
  static constexpr bool kReadsElements = false;
  INGOT_D static Feature feature(const Params&, i64) { return {}; }
  INGOT_D static Sample sample(const Params& p, i64 m) { return {p.row[m]}; }
  INGOT_D static float apply(const Params&, const Feature&, const Sample& s, i64, i64,
                             float product, float (&stat)[2]) {
    stat[0] = product * s.factor;
    stat[1] = stat[0] * stat[0];
    return stat[0];
  }
};

}  // namespace bench
