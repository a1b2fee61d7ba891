// The GPU that a product runs on: its driver's functions, and memory to work in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "blas/cublas.h"

namespace ingot::blas {

using Context = void*;

// What of the driver is needed; a process that multiplies has it loaded.
struct Driver {
  int (*cuCtxGetCurrent)(Context*) = nullptr;
  int (*cuCtxGetDevice)(int*) = nullptr;
  int (*cuDeviceGetAttribute)(int*, int, int) = nullptr;
  int (*cuStreamGetCtx)(Stream, Context*) = nullptr;
  int (*cuStreamIsCapturing)(Stream, int*) = nullptr;
  int (*cuStreamGetId)(Stream, unsigned long long*) = nullptr;  // nullptr before CUDA 12
  int (*cuThreadExchangeStreamCaptureMode)(int*) = nullptr;
  int (*cuMemGetInfo)(size_t*, size_t*) = nullptr;
  int (*cuMemAlloc)(void**, size_t) = nullptr;
  int (*cuMemFree)(void*) = nullptr;
};
const Driver* driver();  // nullptr where there is none

// Where a call runs. `known` is false where that cannot be said, or the GPU is older than 8.0.
struct Place {
  bool known = false;
  Context context = nullptr;
  int device = 0;
};
Place place_of(Stream stream);

bool is_capturing(Stream stream);

// While one lives, this thread may allocate and load although another thread captures a stream.
class AllowDuringCapture {
 public:
  AllowDuringCapture();
  ~AllowDuringCapture();
  AllowDuringCapture(const AllowDuringCapture&) = delete;
  AllowDuringCapture& operator=(const AllowDuringCapture&) = delete;

 private:
  int mode_ = 2;  // relaxed
};

// Memory of one stream: what runs on a stream runs in order, so one buffer serves all its products.
// The launches of one must not mix with another's, which is why whoever uses it holds the lock.
struct Workspace {
  std::mutex mutex;
  void* memory = nullptr;
  size_t bytes = 0;
  size_t refused = 0;         // the least that there was no room for, and for how many calls
  int calls_until_retry = 0;  // nobody asks again: asking is slow

  // At least `bytes`, aligned to 256; false where there is no room. Frees what there was, which
  // waits for the device.
  bool reserve(size_t needed);
};
// Of the context that is current. Never destroyed.
Workspace& workspace_of(const Place& place, Stream stream);

}  // namespace ingot::blas
