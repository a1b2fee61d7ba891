// A batch that is given by arrays of its matrices' addresses. They lie in device memory, where the
// host cannot know them: the operands are gathered into memory in which they lie behind one
// another, a batch of such matrices is multiplied there, and its results are scattered.
#pragma once

#include "blas/ingot_library.h"
#include "blas/programs.h"

namespace ingot::blas {

class PointerBatch {
 public:
  // `given`: its addresses and strides say nothing.
  PointerBatch(const Product& given, const Pointers& pointers);

  // Compiles what it launches; while a stream is being captured that must have happened. What is
  // taken, or why it is not.
  static Outcome prepare(int device, bool capturing);

  size_t bytes() const { return bytes_; }  // of memory that is aligned to 256
  // The products of what lies in that memory; alpha is 1 and beta 0.
  Product product(void* memory) const;
  bool gather(void* memory, int device, Stream stream) const;
  bool scatter(void* memory, const Request& request, int device) const;  // by its alpha and beta

 private:
  Product given_;
  ingot_matrix_array a_, b_, c_;
  size_t b_offset_, c_offset_, bytes_;
};

}  // namespace ingot::blas
