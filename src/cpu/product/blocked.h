// Our own product, blocked for the caches; own.cpp says when it is asked.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/product/kernels.h"
#include "cpu/product/provider.h"

namespace ingot::cpu {

// A ProductCall in one type.
template <class T>
struct Operands {
  int64_t m, n, k;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  bool transpose_b;
  T* c;
  int64_t ldc;
  bool transpose_a = false;
  const T* packed_b = nullptr;  // as pack_whole_b() leaves it
  const BlockConsumer* consumer = nullptr;
  const T* row = nullptr;  // as in ProductCall
};

// m, n > 0. Without c (nullptr) the consumer sees blocks that are kept nowhere else.
template <class T>
void multiply_blocked(const ProductKernels<T>& kernels, const Operands<T>& operands);

// Whether cutting c as the consumer wants it costs no more than a pass over c that is saved.
bool blocks_suit(const BlockConsumer& consumer, int64_t tile_columns, int64_t m, int64_t n,
                 int64_t k);

// All of b in the order of its use; `packed` holds packed_elements() and is 64-byte aligned.
template <class T>
int64_t packed_elements(const ProductKernels<T>& kernels, int64_t n, int64_t k);
template <class T>
void pack_whole_b(const ProductKernels<T>& kernels, const Operands<T>& operands, T* packed);

// Threads that are worth their start for so many operations, and elements read or written once.
int64_t threads_for(double flops, double elements);

}  // namespace ingot::cpu
