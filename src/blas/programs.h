// Products on programs of libingot: made by shape, kept, and run on the caller's stream.
//
// A program is made for a weight w of features × k (the order of its elements, alpha, beta and the
// precision included) and serves every number of samples and every leading dimension. What the
// kernels need is compiled when a shape first comes.
#pragma once

#include <compare>
#include <optional>
#include <string>

#include "blas/device.h"
#include "blas/policy.h"

namespace ingot::blas {

struct Scalars {
  float alpha = 1, beta = 0;
  friend auto operator<=>(const Scalars&, const Scalars&) = default;
};

enum class Activation { none, relu, gelu };  // GELU by tanh, as cuBLAS has it

// What follows a product of cublasLt: y = activation(alpha · product + beta · C + bias).
struct Epilogue {
  const float* bias = nullptr;  // one for each row of C
  int64_t bias_stride = 0;      // to the next product's; 0: all share it
  Activation activation = Activation::none;
};

// A batch's matrices by arrays of their addresses, on the device.
struct Pointers {
  const float* const* a;
  const float* const* b;
  float* const* c;
};

struct Request {
  Product product;
  std::optional<Pointers> pointers;  // in the place of the product's addresses
  Scalars scalars;
  // Where alpha and beta lie on the device; `scalars` then says nothing.
  const float *alpha = nullptr, *beta = nullptr;
  Epilogue epilogue;
  bool whole = false;  // a batch is done whole or not at all
  Outcome precision = Outcome::taken_fp32;
  Stream stream = nullptr;
};

struct Answer {
  Outcome outcome = Outcome::failed;  // of those that are not done
  int64_t done = 0;                   // products of the batch, from the first on
};

// Never throws. What it has not done, the caller must hand on.
Answer run(const Request& request);

// The graph of a product as text, for ingot_program_create; what the leaves bind: x, w, C where it
// adds, alpha and (where it adds) beta where they lie in memory, the bias where there is one, and y
// where C is not y.
struct GraphKey {
  int64_t features = 0, k = 0;
  int64_t batch_rows = 0;  // samples of each product of a batch; 0: there is no batch
  bool w_along_k = false;
  bool adds = false;               // beta · C
  bool scalars_in_memory = false;  // alpha and beta; zero ones there count as BLAS has it
  Scalars scalars = {};            // elsewhere
  bool bias = false;
  Activation activation = Activation::none;
  bool own_bias = false;  // each product of a batch
  bool apart = false;     // C is not y

  friend auto operator<=>(const GraphKey&, const GraphKey&) = default;
};
std::string graph_of(const GraphKey& key);

}  // namespace ingot::blas
