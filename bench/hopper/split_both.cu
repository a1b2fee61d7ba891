// Checks the product that splits both operands on the way (product/hopper/split_both.cuh) against
// fp64, as check.cu checks the others, whole and in three numbers of slices. streamed.cu times it.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Ikernels bench/hopper/split_both.cu
//   ./a.out            all cases
//   ./a.out small      small cases only (for compute-sanitizer)
//
// Left out is data whose products overflow fp32: what slices make of them is an infinity or NaN as
// fp32's own sums have it. Errors are in units of fp32's promise (docs/numerics.md). The exit
// status is whether a check failed.
#include <cstring>

#include "checking.cuh"

using namespace bench;

namespace {

template <class Config, class Epilogue>
void add_epilogue(const std::string& name) {
  kernels()[name] = (const void*)split_both_product_kernel<Config, Epilogue>;
  kernels()["merged " + name] = (const void*)merged_kernel<Config, Epilogue>;
}

template <class Config>
void add_configuration(const std::string& config) {
  kernels()["split_both_slices" + config] = (const void*)split_both_kernel<Config>;
  add_epilogue<Config, PlainEpilogue>(config + "/plain");
  add_epilogue<Config, BiasScaleMomentsEpilogue>(config + "/moments");
  add_epilogue<Config, FullEpilogue>(config + "/full");
  shared_by_config()[config] = Config::kSharedBytes;
}

TileChoice tile_of(const ProductShape& shape, int slices) {
  TileChoice tile = split_both_tile(shape).value();
  const int64_t chunks = divide_up(shape.k, kSplitBothChunk);
  const int64_t most = std::max<int64_t>(1, DeviceLimits().multiprocessors / tiles_of(shape, tile));
  tile.slices = int(std::min(chunks, slices > 0 ? slices : most));
  return tile;
}

void check_case(const Case& c, int slices) {
  const ProductPlan plan = plan_with(c.shape, tile_of(c.shape, slices), {});
  const bool whole = plan.sliced.kernel.empty();
  if (shared_by_config()[plan.config] != (whole ? plan.shared_bytes : plan.sliced.shared_bytes)) {
    std::printf("launch.h and the kernel disagree on shared memory: %s\n", plan.config.c_str());
    std::exit(1);
  }
  std::printf("%d slices: ", plan.slices);
  check(c, plan, c.x == u && c.w == w && c.shape.k <= 4096);
}

std::vector<Case> cases(bool small) {
  std::vector<Case> list = {
      {"128x128x64", row_major(128, 128, 64), u, w, 1e-6, 6},
      {"128x128x128", row_major(128, 128, 128), u, w, 1e-6, 6},
      {"1x4x4", row_major(1, 4, 4), u, w, 1e-6, 6},
      {"ragged 100x200x132", row_major(100, 200, 132), u, w, 1e-6, 6},
      {"ragged 65x130x1100", row_major(65, 130, 1100), u, w, 1e-6, 6},
      {"17x9x1100", row_major(17, 9, 1100), u, w, 1e-6, 6},
      {"w along rows", transposed(100, 132, 1096, false), u, w, 1e-6, 6},
      {"both along rows", transposed(100, 132, 1096, true), u, w, 1e-6, 6},
      {"many tiles 3000x2180x132", row_major(3000, 2180, 132), u, w, 1e-6, 6},
      {"the same along rows", transposed(3000, 2180, 136, true), u, w, 1e-6, 6},
  };
  if (small) return list;
  const auto along_rows = transposed(260, 132, 4104, true);
  const auto shape = row_major(260, 131, 4100);
  const std::vector<Case> more = {
      {"256x256x131072", row_major(256, 256, 131072), u, w, 1e-6, 6},
      {"64x64x262144", row_major(64, 64, 262144), u, w, 2e-6, 6},
      {"normal", row_major(256, 256, 16384), Data::normal, Data::normal, 1e-6, 6},
      {"large mean", shape, Data::large_mean, w, 1e-6, 6},
      {"rows 2^+-60", shape, Data::wide_rows, Data::wide_rows, 2e-6, 6},
      {"chunks 2^+-30", shape, Data::wide_chunks, Data::wide_chunks, 2e-5, 6},
      {"x chunks 2^+-30", shape, Data::wide_chunks, u, 2e-6, 6},
      {"w chunks 2^+-30", shape, u, Data::wide_chunks, 2e-6, 6},
      {"elements 2^+-20", shape, Data::wide_elements, Data::wide_elements, 2e-5, 6},
      {"growing w", row_major(256, 256, 8192), Data::normal, Data::growing, 2e-6, 6},
      {"growing x", row_major(256, 256, 8192), Data::growing, Data::normal, 2e-6, 6},
      {"growing both", row_major(256, 256, 8192), Data::growing, Data::growing, 2e-6, 6},
      {"zero start w", shape, Data::normal, Data::zero_start, 1e-6, 6},
      {"zero start x", shape, Data::zero_start, Data::normal, 1e-6, 6},
      {"denormal w", shape, Data::normal, Data::denormal, 1e-4, 6},
      {"denormal x", shape, Data::denormal, Data::normal, 1e-4, 6},
      {"outlier", shape, Data::outlier, Data::outlier, 2e-6, 6},
      {"huge x tiny w", shape, Data::huge, Data::tiny, 1e-6, 6},
      {"tiny x huge w", shape, Data::tiny, Data::huge, 1e-6, 6},
      {"huge x denormal w", shape, Data::huge, Data::denormal, 1e-6, 6},
      {"special x", shape, Data::special, Data::normal, 2e-6, 6},
      {"special w", shape, Data::normal, Data::special, 2e-6, 6},
      {"special both", shape, Data::special, Data::special, 2e-6, 6},
      {"rows: 256x256x131072", transposed(256, 256, 131072, true), u, w, 1e-6, 6},
      {"rows: rows 2^+-60", along_rows, Data::wide_rows, Data::wide_rows, 2e-6, 6},
      {"rows: x chunks 2^+-30", along_rows, Data::wide_chunks, u, 2e-6, 6},
      {"rows: w chunks 2^+-30", along_rows, u, Data::wide_chunks, 2e-6, 6},
      {"rows: growing both", along_rows, Data::growing, Data::growing, 2e-6, 6},
      {"rows: zero start x", along_rows, Data::zero_start, Data::normal, 1e-6, 6},
      {"rows: special both", along_rows, Data::special, Data::special, 2e-6, 6},
  };
  list.insert(list.end(), more.begin(), more.end());
  list.push_back(strided_case());
  return list;
}

}  // namespace

int main(int count, char** arguments) {
  add_configuration<SplitBothConfig<true, true>>("SplitBothConfig<true, true>");
  add_configuration<SplitBothConfig<true, false>>("SplitBothConfig<true, false>");
  add_configuration<SplitBothConfig<false, true>>("SplitBothConfig<false, true>");
  add_configuration<SplitBothConfig<false, false>>("SplitBothConfig<false, false>");
  for (const Case& c : cases(count > 1 && !std::strcmp(arguments[1], "small"))) {
    for (const int slices : {1, 2, 3, 0}) check_case(c, slices);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
