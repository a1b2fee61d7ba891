// The library product: y = x · op(w) through cuBLASLt, loaded at run time.
#pragma once

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

// What a library product may use of the caller's workspace.
inline constexpr size_t kLibraryWorkspace = size_t{32} << 20;

// cuBLASLt in one context, with its choice of algorithm for each product met so far. Thread-safe.
class CublasLt {
 public:
  CublasLt();  // for the current context; throws Error (INGOT_UNAVAILABLE)
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Chooses the algorithm now rather than at the first run.
  void prepare(const LibraryProduct& product);
  void run(const LibraryProduct& product, const void* x, const void* w, void* y, void* workspace,
           size_t workspace_bytes, CUstream stream);

 private:
  struct Chosen;
  const Chosen& choose(const LibraryProduct& product);

  void* handle_ = nullptr;
  std::shared_mutex mutex_;
  std::map<LibraryProduct, std::unique_ptr<Chosen>> chosen_;
};

}  // namespace ingot::cuda
