// Products chosen by a measurement: the rule, and what is kept of it between processes.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cpu/product/measured.h"

namespace ingot::cpu {
namespace {

// Waits, in the place of a product.
class Waiting : public ProductProvider {
 public:
  Waiting(std::string name, double milliseconds, int64_t fewest_rows = 0)
      : name_(std::move(name)), milliseconds_(milliseconds), fewest_rows_(fewest_rows) {}
  std::string name() const override { return name_; }
  bool takes(const ProductCall& call) const override { return call.m >= fewest_rows_; }
  bool run(const ProductCall&) const override {
    ++runs;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds_));
    return true;
  }
  mutable std::atomic<int> runs{0};

 private:
  std::string name_;
  double milliseconds_;
  int64_t fewest_rows_;
};

class MeasuredProductTest : public testing::Test {
 protected:
  MeasuredProductTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ingot-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~MeasuredProductTest() override { std::filesystem::remove_all(folder_); }

  // processor: a name that no other test has, since a process remembers what it found.
  MeasuredProduct product(double own, double other, const std::string& processor) {
    fast_ = std::make_shared<Waiting>("tiles", own, 200);
    slow_ = std::make_shared<Waiting>("vectors", other);
    return MeasuredProduct(fast_, slow_, folder_, processor);
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      found.push_back(entry.path());
    }
    return found;
  }
  static ProductCall call(int64_t rows) {
    ProductCall made;
    made.m = rows, made.n = 64, made.k = 64;
    return made;
  }

  std::string folder_;
  std::shared_ptr<Waiting> fast_, slow_;
};

TEST(CpuMeasuredVerdict, AsksForAClearGainAtEveryShape) {
  EXPECT_TRUE(judge({{1.4, 1.2, 1.3, 1.5}, {1.2, 1.1, 1.3, 1.2}}).is_faster());
  EXPECT_FALSE(judge({{1.4, 1.2, 1.3, 1.5}, {1.0, 1.05, 1.3, 1.0}}).is_faster());
  // The tile unit is a neighbour's now and then: faster by the median, and yet not to be trusted.
  EXPECT_FALSE(judge({{0.7, 0.8, 0.9, 1.5, 1.6, 1.7, 1.7, 1.8}}).is_faster());
  EXPECT_TRUE(judge({{0.7, 1.2, 1.2, 1.5, 1.6, 1.7, 1.7, 1.8}}).is_faster());
  EXPECT_FALSE(judge({}).is_faster());
  EXPECT_FALSE(judge({{}}).is_faster());
}

TEST_F(MeasuredProductTest, IsTakenWhereItIsFasterAndMeasuredOnce) {
  const MeasuredProduct made = product(0.2, 2.0, "faster");
  EXPECT_FALSE(made.takes(call(100)));
  EXPECT_EQ(fast_->runs, 0);  // not for products that it would not take
  EXPECT_TRUE(made.takes(call(300)));
  const int runs = fast_->runs;
  EXPECT_GT(runs, 0);
  EXPECT_EQ(runs, slow_->runs);
  EXPECT_TRUE(made.takes(call(300)));
  EXPECT_EQ(fast_->runs, runs);
  ASSERT_EQ(files().size(), 1u);
  EXPECT_EQ(made.describe().rfind("yes", 0), 0u);
  EXPECT_NE(made.describe().find("vectors"), std::string::npos);
}

TEST_F(MeasuredProductTest, IsLeftWhereItIsSlower) {
  const MeasuredProduct made = product(2.0, 0.2, "slower");
  EXPECT_FALSE(made.takes(call(300)));
  EXPECT_EQ(made.describe().rfind("no", 0), 0u);
}

TEST_F(MeasuredProductTest, AnotherProcessesVerdictCounts) {
  ASSERT_TRUE(product(0.2, 2.0, "first").takes(call(300)));
  // The same question under a name that this process has not asked yet: through another path.
  const std::string link = folder_ + "/.";
  const auto slow = std::make_shared<Waiting>("tiles", 2.0, 200);
  const auto fast = std::make_shared<Waiting>("vectors", 0.2);
  EXPECT_TRUE(MeasuredProduct(slow, fast, link, "first").takes(call(300)));
  EXPECT_EQ(slow->runs, 0);
}

TEST_F(MeasuredProductTest, ADamagedFileIsReplacedAndALinkIsNotFollowed) {
  ASSERT_TRUE(product(0.2, 2.0, "damaged").takes(call(300)));
  const std::filesystem::path file = files().front();
  std::ofstream(file) << "{\"of\": 3, \"median\": \"fast\"";
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  const auto tiles = std::make_shared<Waiting>("tiles", 2.0, 200);
  const auto vectors = std::make_shared<Waiting>("vectors", 0.2);
  EXPECT_FALSE(MeasuredProduct(tiles, vectors, folder_ + "/.", "damaged").takes(call(300)));
  EXPECT_GT(tiles->runs, 0);
  std::filesystem::remove(file);
  std::filesystem::create_symlink("/etc/hostname", file);
  EXPECT_FALSE(MeasuredProduct(tiles, vectors, folder_ + "/./.", "damaged").takes(call(300)));
}

TEST_F(MeasuredProductTest, WithoutAFolderNothingIsMeasuredNorTaken) {
  for (const std::string folder : {"", "/proc/nowhere"}) {
    const auto tiles = std::make_shared<Waiting>("tiles", 0.2, 200);
    const auto vectors = std::make_shared<Waiting>("vectors", 2.0);
    const MeasuredProduct made(tiles, vectors, folder, "no folder");
    EXPECT_FALSE(made.takes(call(300)));
    EXPECT_EQ(tiles->runs, 0);
    EXPECT_EQ(made.describe().rfind("no:", 0), 0u);
  }
}

}  // namespace
}  // namespace ingot::cpu
