#include "codegen/embedded_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace ingot {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The embedded set is the folder, byte for byte: none missing, none stale.
TEST(EmbeddedKernels, MatchTheFolder) {
  const fs::path root = fs::path(INGOT_SOURCE_DIR) / "kernels";
  std::vector<std::string> expected;
  if (fs::exists(root)) {
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (const fs::path type = entry.path().extension(); type == ".cuh" || type == ".h") {
        expected.push_back(fs::relative(entry.path(), root).generic_string());
      }
    }
  }
  std::vector<std::string> embedded;
  for (const EmbeddedKernel& kernel : embedded_kernels()) {
    embedded.emplace_back(kernel.path);
    EXPECT_EQ(std::string(kernel.text), read(root / kernel.path)) << kernel.path;
  }
  std::sort(expected.begin(), expected.end());
  std::sort(embedded.begin(), embedded.end());
  EXPECT_EQ(embedded, expected);
}

}  // namespace
}  // namespace ingot
