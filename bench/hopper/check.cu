// Checks the Hopper product against fp64: shapes, operand layouts, hostile data, statistics, the
// redo, bitwise repeats. Prints one line a case; the exit status is the number of failures.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/check.cu
//   ./a.out            all cases
//   ./a.out small      small cases only (for compute-sanitizer)
#include "checking.cuh"
#include "configurations.cuh"

using namespace bench;

namespace {

const TileChoice kFused = scheme_split::fused_tile(128);
const TileChoice kFusedThin = scheme_split::fused_tile(64);
const TileChoice kFusedRare = scheme_split::fused_tile(128, 2);
const TileChoice kFusedHalves = scheme_split::fused_tile(128, 1, 2);
const TileChoice kFusedEighths = scheme_split::fused_tile(128, 1, 8);
const TileChoice kFusedThinQuarters = scheme_split::fused_tile(64, 1, 4);
const TileChoice kPacked = {
    .variant = Variant::packed, .samples = 128, .stages = 6, .staging = 2, .cluster = 2};
const TileChoice kPackedWide = {
    .variant = Variant::packed, .samples = 192, .stages = 5, .staging = 1, .cluster = 2};
const TileChoice kPackedThin = {
    .variant = Variant::packed, .samples = 64, .stages = 8, .staging = 1};
const TileChoice kPackedSingle = {
    .variant = Variant::packed, .samples = 128, .stages = 6, .staging = 2};

void check_portable(const Case& c, bool epilogues) {
  check(c, portable::plan_product(c.shape, 232448), epilogues);
  check(c, portable::plan_product(c.shape, 166912), epilogues);  // 256 × 128: cc 8.0
}

void check_every_kernel(const Case& c) {
  const bool epilogues = c.x == u && c.w == w && c.shape.m <= 1024;
  for (const TileChoice& choice : {kFused, kFusedRare, kFusedThin, kPacked, kPackedWide})
    check(c, choice, epilogues);
  for (const TileChoice& choice : {kFusedHalves, kFusedEighths, kFusedThinQuarters}) {
    if (divide_up(c.shape.k, 128) >= choice.slices) check(c, choice, epilogues);
  }
  if (c.shape.y_aligned && c.shape.y_stride % 4 == 0) {
    for (const TileChoice& choice : {kPackedThin, kPackedSingle}) check(c, choice, epilogues);
  }
  check_portable(c, epilogues);
}

// Layouts and alignments that only the packed variant takes, and plain stores.
void check_layouts() {
  for (const Case& c : odd_cases()) {
    check(c, kPacked, true);
    check(c, kPackedThin, true);
    check_portable(c, true);
    check(c, kPackedWide, c.shape.n % 4 != 0);
  }
  // Weights contiguous in n that the product splits.
  for (const Case& c : {Case{"x @ W in eights", transposed(200, 152, 304, false), u, w, 1e-6, 6},
                        Case{"xT @ y in eights", transposed(200, 152, 304, true), u, w, 1e-6, 6}}) {
    for (const TileChoice& choice : {kFused, kFusedRare, kFusedThin, kFusedHalves}) {
      TileChoice along_n = choice;
      along_n.w_along_k = false;
      check(c, along_n, true);
    }
  }
  const Case strided = strided_case();
  for (const TileChoice& choice : {kFused, kFusedRare, kFusedThin, kPacked, kPackedWide})
    check(strided, choice, false);
}

// Statistics of both kinds, in whole tiles, ragged ones and slices of K.
void check_sums() {
  add_kernel<SumEpilogue, FusedSplitConfig<128, 3, 4, true, 1>>(
      "FusedSplitConfig<128, 3, 4, true, 1>", "sum");
  add_kernel<SumEpilogue, FusedSplitConfig<128, 3, 4, false, 1, 8>>(
      "FusedSplitConfig<128, 3, 4, false, 1, 8>", "sum");
  add_kernel<SumEpilogue, PackedConfig<160, 1, 5, 2>>("PackedConfig<160, 1, 5, 2>", "sum");
  kernels()["portable::PackedConfig<2, 2, 2>/sum"] =
      (const void*)portable_kernel<portable::PackedConfig<2, 2, 2>, SumEpilogue>;
  kernels()["portable::PackedConfig<4, 2, 2>/sum"] =
      (const void*)portable_kernel<portable::PackedConfig<4, 2, 2>, SumEpilogue>;
  const TileChoice packed = {.variant = Variant::packed, .samples = 160, .stages = 5, .staging = 2};
  for (const Case& c : {Case{"1000x384x1024", row_major(1000, 384, 1024), u, w, 1e-6, 6},
                        Case{"67x132x1024", row_major(67, 132, 1024), u, w, 1e-6, 6}}) {
    for (const TileChoice& choice : {kFused, kFusedEighths, packed})
      check_mixed_statistics(c, plan_with(c.shape, choice, {}));
    check_mixed_statistics(c, portable::plan_product(c.shape, 166912));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool small = argc > 1 && !std::strcmp(argv[1], "small");
  add_split_kernels();
  add_configurations<PlainEpilogue>("plain");
  add_configurations<BiasScaleMomentsEpilogue>("moments");
  add_configurations<FullEpilogue>("full");
  require_candidates("full");

  for (const Case& c : row_major_cases(small)) check_every_kernel(c);
  check_layouts();
  check_sums();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
