#include "cuda/context.h"

#include <map>
#include <shared_mutex>

#include "support/error.h"

namespace ingot::cuda {
namespace {

// Contexts live until the process ends, as primary contexts do. (A context that the process
// destroyed and made anew at the same address would be taken for the old one; PyTorch never does.)
struct Registry {
  std::shared_mutex mutex;
  std::map<CUcontext, std::unique_ptr<Context>> contexts;
  std::map<int, CUcontext> primary;
};

Registry& registry() {
  static Registry* r = new Registry;  // outlives every static that may run kernels at exit
  return *r;
}

Context* find_context(CUcontext handle, int device) {
  Registry& r = registry();
  {
    const std::shared_lock lock(r.mutex);
    if (const auto found = r.contexts.find(handle); found != r.contexts.end()) {
      return found->second.get();
    }
  }
  auto context = std::make_unique<Context>(handle, device);
  const std::unique_lock lock(r.mutex);
  return r.contexts.try_emplace(handle, std::move(context)).first->second.get();
}

CUcontext primary_context(int device) {
  Registry& r = registry();
  const std::unique_lock lock(r.mutex);
  if (const auto found = r.primary.find(device); found != r.primary.end()) return found->second;
  CUcontext context = nullptr;
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "looking for a GPU");
  check(driver().cuDevicePrimaryCtxRetain(&context, handle), "starting a GPU");
  r.primary[device] = context;
  return context;
}

}  // namespace

Context::Context(CUcontext handle, int device)
    : handle_(handle),
      device_(device),
      sm_(10 * device_attribute(device, kComputeMajor) + device_attribute(device, kComputeMinor)),
      multiprocessors_(device_attribute(device, kMultiprocessors)) {
  if (sm_ < 80) {
    fail(INGOT_UNSUPPORTED,
         "GPU {} has compute capability {}.{}; Ingot's kernels need 8.0 (Ampere) or newer", device,
         sm_ / 10, sm_ % 10);
  }
}

CublasLt& Context::cublas() {
  if (CublasLt* ready = cublas_ready_.load(std::memory_order_acquire)) return *ready;
  // Not std::call_once: an exception that leaves it ends the process where libgcc is linked in.
  const std::lock_guard lock(cublas_mutex_);
  if (!cublas_) cublas_ = std::make_unique<CublasLt>();
  cublas_ready_.store(cublas_.get(), std::memory_order_release);
  return *cublas_;
}

CurrentContext::CurrentContext(int device) {
  // A thread seldom changes its context, and a context never its device.
  static thread_local Context* last = nullptr;
  const Driver& d = driver();
  if (device < 0 || device >= d.devices) {
    fail(INGOT_INVALID_ARGUMENT, "there is no CUDA device {}; this machine shows {}", device,
         d.devices);
  }
  CUcontext current = nullptr;
  CUdevice current_device = -1;
  check(d.cuCtxGetCurrent(&current), "asking for the current context");
  if (last != nullptr && last->handle() == current && last->device() == device) {
    context_ = last;
    return;
  }
  if (current != nullptr) check(d.cuCtxGetDevice(&current_device), "asking for the current GPU");
  if (current == nullptr || current_device != device) {
    current = primary_context(device);
    check(d.cuCtxPushCurrent(current), "entering a GPU's context");
    pushed_ = true;
  }
  try {
    context_ = find_context(current, device);
    if (!pushed_) last = context_;
  } catch (...) {
    if (pushed_) d.cuCtxPopCurrent(&current);
    throw;
  }
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

}  // namespace ingot::cuda
