// A product that is taken where a short measurement on this machine found it the faster one.
//
// Once for each processor, number of threads and pair of products, both compute the same products
// by turns, in less than a second; the verdict is kept in the user's cache folder. The first that
// is kept there counts for every process, so that all of them, the ranks of one training run among
// them, give the same bits. Without such a folder nothing is measured, and the product is not
// taken.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/product/provider.h"

namespace ingot::cpu {

// How many times as fast as the other product one was: the median over the rounds, and the lower
// quartile, at the shape where these are smallest.
struct Verdict {
  double median = 0.0, quartile = 0.0;
  // Clearly faster, and in three rounds of four not slower: a neighbour on a shared core may take a
  // tile unit away at any moment.
  bool is_faster() const { return median >= 1.1 && quartile >= 1.0; }
};

// ratios: for each shape, of each round, the other's seconds over its own.
Verdict judge(std::vector<std::vector<double>> ratios);

class MeasuredProduct final : public ProductProvider {
 public:
  // champion: what would compute the product otherwise. folder: of this user's cache, or empty.
  MeasuredProduct(std::shared_ptr<const ProductProvider> challenger,
                  std::shared_ptr<const ProductProvider> champion, std::string folder,
                  std::string processor);

  std::string name() const override { return challenger_->name(); }
  bool takes(const ProductCall& call) const override;
  bool splits() const override { return challenger_->splits(); }
  bool run(const ProductCall& call) const override { return challenger_->run(call); }
  bool consumes(const ProductCall& call) const override { return challenger_->consumes(call); }
  bool adds_row(const ProductCall& call) const override { return challenger_->adds_row(call); }
  size_t packed_bytes(const ProductCall& call) const override {
    return challenger_->packed_bytes(call);
  }
  void pack(const ProductCall& call, std::byte* memory) const override {
    challenger_->pack(call, memory);
  }

  // None where there is no folder to keep one in.
  std::optional<Verdict> verdict() const;
  // For doctor.
  std::string describe() const;

 private:
  std::string key() const;
  Verdict measure() const;

  std::shared_ptr<const ProductProvider> challenger_, champion_;
  std::string folder_, processor_;
};

}  // namespace ingot::cpu
