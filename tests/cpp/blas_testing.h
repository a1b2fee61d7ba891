// What tests of libingot_blas.so's graphs share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ingot/ingot.h"

namespace ingot::blas_testing {

inline std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = uniform(random);
  return values;
}

class Program {
 public:
  Program(const std::string& graph, const char* options) {
    status_ = ingot_program_create(graph.c_str(), options, &handle_);
  }
  ~Program() { ingot_program_destroy(handle_); }
  ingot_program* operator*() const { return handle_; }
  ingot_status status() const { return status_; }

 private:
  ingot_program* handle_ = nullptr;
  ingot_status status_;
};

inline ingot_tensor tensor(const void* data, std::array<int64_t, 4> sizes,
                           std::array<int64_t, 4> strides) {
  ingot_tensor t{};
  t.data = const_cast<void*>(data);
  std::copy(sizes.begin(), sizes.end(), t.sizes);
  std::copy(strides.begin(), strides.end(), t.strides);
  t.dtype = INGOT_F32;
  t.device = -1;
  return t;
}

// What a graph of a product computes from its leaves, in order; the last is the result.
inline void run(const std::string& graph, int64_t batch, const std::vector<ingot_tensor>& tensors) {
  const Program program(graph, nullptr);
  ASSERT_EQ(program.status(), INGOT_OK) << ingot_last_error() << graph;
  size_t bytes = 0;
  ASSERT_EQ(ingot_program_workspace_size(*program, batch, &bytes), INGOT_OK);
  void* const workspace = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  ASSERT_EQ(ingot_program_run(*program, batch, tensors.data(), static_cast<int>(tensors.size()),
                              workspace, bytes, nullptr),
            INGOT_OK)
      << ingot_last_error() << graph;
  std::free(workspace);
}

}  // namespace ingot::blas_testing
