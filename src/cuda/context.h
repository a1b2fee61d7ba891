// The CUDA context that a call runs in, and what is kept once per context.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "cuda/cublas_lt.h"
#include "cuda/driver.h"

namespace ingot::cuda {

// A GPU as kernels see it, in one context.
class Context {
 public:
  Context(CUcontext handle, int device);

  CUcontext handle() const { return handle_; }
  int device() const { return device_; }
  int sm() const { return sm_; }
  int multiprocessors() const { return multiprocessors_; }
  // Created when first asked for, with the context current.
  CublasLt& cublas();

 private:
  CUcontext handle_;
  int device_, sm_, multiprocessors_;
  std::mutex cublas_mutex_;
  std::unique_ptr<CublasLt> cublas_;
  std::atomic<CublasLt*> cublas_ready_{nullptr};
};

// Makes a context of `device` current while it lives. A current context of that device is kept
// (PyTorch's, which is the primary one); otherwise the primary context is entered.
class CurrentContext {
 public:
  explicit CurrentContext(int device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  Context& operator*() const { return *context_; }
  Context* operator->() const { return context_; }

 private:
  Context* context_;
  bool pushed_ = false;
};

}  // namespace ingot::cuda
