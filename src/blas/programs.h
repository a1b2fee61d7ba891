// Products on programs of libingot: made by shape, kept, and run on the caller's stream.
//
// A program is made for a weight w of features × k (the order of its elements, alpha, beta and the
// precision included) and serves every number of samples and every leading dimension. What the
// kernels need is compiled when a shape first comes.
#pragma once

#include <string>

#include "blas/device.h"
#include "blas/policy.h"

namespace ingot::blas {

struct Scalars {
  float alpha = 1, beta = 0;
};

// What follows a product of cublasLt: y = activation(alpha · product + beta · C + bias).
struct Epilogue {
  const float* bias = nullptr;  // one for each row of C
  bool relu = false;
};

struct Request {
  Product product;
  Scalars scalars;
  Epilogue epilogue;
  Outcome precision = Outcome::taken_fp32;
  Stream stream = nullptr;
};

struct Answer {
  Outcome outcome = Outcome::failed;  // of those that are not done
  int64_t done = 0;                   // products of the batch, from the first on
};

// Never throws. What it has not done, the caller must hand on.
Answer run(const Request& request);

// The graph of a product as text, for ingot_program_create; what the leaves bind: x, w, then C
// where beta is not zero, the bias where there is one, and y where beta is zero.
struct GraphKey {
  int64_t features, k;
  bool w_along_k;
  Scalars scalars;
  bool bias, relu;
};
std::string graph_of(const GraphKey& key);

}  // namespace ingot::blas
