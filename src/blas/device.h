// The GPU that a product runs on, and its driver's functions.
#pragma once

#include <cstddef>
#include <cstdint>

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
  int (*cuMemsetD32Async)(void*, unsigned, size_t, Stream) = nullptr;
  // Of graphs; nullptr before CUDA 11.3.
  int (*cuStreamGetCaptureInfo)(Stream, int*, unsigned long long*, void**, const void**,
                                size_t*) = nullptr;
  int (*cuUserObjectCreate)(void**, void*, void (*)(void*), unsigned, unsigned) = nullptr;
  int (*cuUserObjectRelease)(void*, unsigned) = nullptr;
  int (*cuGraphRetainUserObject)(void*, void*, unsigned, unsigned) = nullptr;
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

// Whether the handle names another stream in each thread.
bool is_per_thread(Stream stream);

// What tells a stream from every other, also from an earlier one at the same address. Not to be
// asked of a stream that is being captured.
uint64_t identity_of(Stream stream);

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

}  // namespace ingot::blas
