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

// What a library product may use of the caller's workspace. Of 16-bit operands on an H100, fifteen
// shapes from 8×4096×4096 to 16384×1024×2816, all but one (split along k, 3 MiB) took four bytes at
// most, and none was slower for the bound.
constexpr size_t library_workspace(DType operands) {
  return size_t{size_of(operands) == 2 ? 4u : 32u} << 20;
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
  // Of its workspace, what the algorithm uses: library_workspace() at most.
  size_t workspace(const LibraryProduct& product);
  // workspace: of so many bytes; bias: nullptr where there is none.
  struct Memory {
    const void *x, *w;
    void *y, *workspace;
    const void* bias;
  };
  void run(const LibraryProduct& product, const Memory& memory, CUstream stream);

 private:
  struct Chosen;
  const Chosen& choose(const LibraryProduct& product);

  void* handle_ = nullptr;
  std::shared_mutex mutex_;
  std::map<LibraryProduct, std::unique_ptr<Chosen>> chosen_;
};

}  // namespace ingot::cuda
