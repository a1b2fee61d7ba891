// The library product: y = x · op(w) through cuBLASLt, loaded at run time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>

#include "cuda/driver.h"
#include "program/launch_program.h"

namespace ingot::cuda {

struct CublasInfo {
  bool available = false;
  size_t version = 0;  // 130100 is 13.1.0
  std::string path, why;
};
const CublasInfo& cublas_info();

// What a library product of so many results may use of the caller's workspace, bytes: partial sums
// where k is split, and no more than PyTorch grants it.
inline size_t library_workspace(int64_t results) {
  constexpr int64_t kMost = int64_t{32} << 20, kBytesAResult = 16 * sizeof(float);
  const int64_t most_results = kMost / kBytesAResult;
  return static_cast<size_t>(std::min(results, most_results) * kBytesAResult);
}

// cuBLASLt in one context, with its choice of algorithm for each product met so far. Thread-safe.
class CublasLt {
 public:
  CublasLt();  // for the current context; throws Error (INGOT_UNAVAILABLE)
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Chooses the algorithm now rather than at the first run.
  void prepare(const LibraryProduct& product);
  // workspace: of library_workspace().
  void run(const LibraryProduct& product, const void* x, const void* w, void* y, void* workspace,
           CUstream stream);

 private:
  struct Chosen;
  const Chosen& choose(const LibraryProduct& product);

  void* handle_ = nullptr;
  std::shared_mutex mutex_;
  std::map<LibraryProduct, std::unique_ptr<Chosen>> chosen_;
};

}  // namespace ingot::cuda
