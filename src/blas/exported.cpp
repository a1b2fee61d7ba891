// The exported functions by name, for whoever asks dlsym for them.
#include <cstring>

#include "blas/library.h"

extern "C" {
#define INGOT_EXPORTED(apply)                                                                    \
  apply(cublasSgemm_v2) apply(cublasSgemm_v2_64) apply(cublasSgemmStridedBatched)                \
      apply(cublasSgemmStridedBatched_64) apply(cublasSgemmBatched) apply(cublasSgemmBatched_64) \
          apply(cublasGemmEx) apply(cublasGemmEx_64) apply(cublasGemmStridedBatchedEx)           \
              apply(cublasGemmStridedBatchedEx_64) apply(cublasGemmBatchedEx)                    \
                  apply(cublasGemmBatchedEx_64) apply(cublasLtMatmul)
#define INGOT_DECLARE(name) int name();  // only its address is used
INGOT_EXPORTED(INGOT_DECLARE)
}

namespace ingot::blas {

void* exported(const char* name) {
  struct Entry {
    const char* name;
    int (*function)();
  };
#define INGOT_ENTRY(name) {#name, name},
  static constexpr Entry entries[] = {INGOT_EXPORTED(INGOT_ENTRY)};
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) == 0) return reinterpret_cast<void*>(entry.function);
  }
  return nullptr;
}

}  // namespace ingot::blas
