// fp32 product for Hopper with some 16 bits, at about TF32's speed: one fp16 product, and the two
// cross terms in FP8.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w and x: packed by product/crossed_rows.cuh, a plane of lines for the cross terms,
// then
//            one for the main term, and one exponent a row; TMA boxes of rows × 128 bytes (a line)
//            under the 128-byte swizzle.
// Tile       128 features × kSamples samples of yᵀ; a stage is a line of either operand. Blocks,
//            clusters and roles: stages.cuh.
// Sums       one accumulator for all three terms, whose scales agree. An FP8 product cuts the whole
//            accumulator to 14 bits, so the cross terms of all K come first, where that costs
//            nothing; the fp16 product on top of them is exact but for its own truncation.
// Promotion  every 1024 of K of the main term, half that apart in the two consumers, so that one
//            multiplies meanwhile. There are no registers for a second accumulator: the upper
//            halves of the sum move into packed pairs, and the exact rest stays.
#pragma once

#include "product/hopper/stages.cuh"
#include "product/hopper/wgmma.cuh"

namespace ingot::hopper {

template <int kSamples, int kCluster, int kStages, int kStagingBuffers>
struct CrossedConfig : PackedStages<kSamples, kCluster, kStages, kStagingBuffers> {};

// Sums of which the upper halves, two in a word, are kept apart from what the tensor core adds to.
template <int kValues>
struct UpperHalves {
  u32 words[kValues / 2] = {};

  INGOT_D static float low(u32 word) { return __uint_as_float(word << 16); }
  // With the low half as bits too small to matter: all that counts is that it is the same when it
  // is subtracted and when it is added back.
  INGOT_D static float high(u32 word) { return __uint_as_float(word); }

  INGOT_D void promote(float (&sum)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float a = sum[2 * i] + low(words[i]), b = sum[2 * i + 1] + high(words[i]);
      words[i] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
      sum[2 * i] = a - low(words[i]);  // exact; NaN where the sum is not finite
      sum[2 * i + 1] = b - high(words[i]);
    }
  }
  INGOT_D void add_to(float (&sum)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      sum[2 * i] += low(words[i]);
      sum[2 * i + 1] += high(words[i]);
    }
  }
};

template <class Config>
struct CrossedConsumer {
  static constexpr int kValues = Config::kSamples / 2;
  // Lines that are summed before a promotion.
  static constexpr i32 kMainRun = 16, kCrossRun = 64;

  RingCursor<Config::kStages> cursor;

  // 64 of K. In a cross line either half meets the other half of the other operand.
  template <bool kCross>
  INGOT_D static void multiply(float (&sum)[kValues], const ConsumerPlace& place, u32 index,
                               bool add) {
    const u32 slot = place.ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + place.group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (kCross) {
        Wgmma<Config::kSamples, e4m3>::ss(sum, a + 2 * step, b + 2 * (step ^ 2), step > 0 || add);
      } else {
        Wgmma<Config::kSamples>::ss(sum, a + 2 * step, b + 2 * step, step > 0 || add);
      }
    }
  }

  template <bool kCross>
  INGOT_D void issue(float (&sum)[kValues], const ConsumerPlace& place, bool add) {
    const u32 slot = cursor.slot;
    wait_stage<Config>(place, cursor);
    cursor.advance();
    ptx::wgmma_fence();
    multiply<kCross>(sum, place, slot, add);
    ptx::wgmma_commit();
  }

  // `lines` of a plane, at least one, on top of `sum` or, without `add`, instead of it. Products of
  // a line are issued before those of the line before are awaited; none is under way at the end,
  // since FP8 and fp16 ones are ordered by nothing else.
  template <bool kCross>
  INGOT_D void add_lines(float (&sum)[kValues], const ConsumerPlace& place, i32 lines, bool add) {
    u32 before = cursor.slot;
    issue<kCross>(sum, place, add);
    for (i32 line = 1; line < lines; ++line) {
      const u32 now = cursor.slot;
      issue<kCross>(sum, place, true);
      ptx::wgmma_wait<1>();
      release_stage<Config>(place, before);
      before = now;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    release_stage<Config>(place, before);
  }

  // All of K: `chunks` lines, of the two planes.
  INGOT_D void accumulate(float (&sum)[kValues], const ConsumerPlace& place, i32 chunks) {
    const i32 lines = chunks / 2;
    UpperHalves<kValues> upper;
    i32 run = lines < kCrossRun ? lines : kCrossRun;
    add_lines<true>(sum, place, run, false);
    for (i32 left = lines - run; left > 0; left -= run) {
      upper.promote(sum);
      run = left < kCrossRun ? left : kCrossRun;
      add_lines<true>(sum, place, run, true);
    }
    run = place.group == 1 ? kMainRun / 2 : kMainRun;
    for (i32 left = lines; left > 0; run = kMainRun) {
      if (run > left) run = left;
      add_lines<false>(sum, place, run, true);
      left -= run;
      if (left > 0) upper.promote(sum);
    }
    upper.add_to(sum);
  }
};

template <class Config, class Epilogue>
INGOT_D void product_crossed(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                             const ProductArgs& args, const typename Epilogue::Params& params) {
  packed_product<Config, Epilogue, CrossedConsumer<Config>, false>(w_map, x_map, y_map, args,
                                                                   params);
}

}  // namespace ingot::hopper
