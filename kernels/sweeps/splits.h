// How a columns sweep cuts its samples, for the host: plain C++, shared by the run time and by
// standalone files.
#pragma once

namespace ingot {

// `splits` parts of `per_split` samples each, the last maybe shorter; a function of sizes alone.
struct SampleSplits {
  long long splits = 1, samples = 0, per_split = 0;
};

// samples: reduced extent; per_block: samples of one step of a block; tiles: blocks along the kept
// elements.
inline SampleSplits split_samples(long long samples, long long per_block, long long tiles) {
  // Enough blocks for every SM of a large GPU, whatever the GPU, so that bits do not depend on it.
  constexpr long long kBlocks = 1024;
  const auto up = [](long long a, long long b) { return (a + b - 1) / b; };
  const auto at_least_one = [](long long n) { return n < 1 ? 1 : n; };
  const long long steps = up(samples, per_block), wanted = at_least_one(up(kBlocks, tiles));
  SampleSplits result;
  result.samples = samples;
  result.per_split = at_least_one(up(steps, wanted)) * per_block;
  result.splits = at_least_one(up(samples, result.per_split));
  return result;
}

}  // namespace ingot
