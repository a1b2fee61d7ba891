#include "blas/device.h"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "blas/library.h"

namespace ingot::blas {
namespace {

constexpr int kComputeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kOldestMajor = 8;
constexpr auto kPerThreadStream = uintptr_t{2};  // CU_STREAM_PER_THREAD

struct Loaded {
  Driver functions;
  bool complete = false;
};

Loaded load_driver() {
  Loaded l;
  const char* given = std::getenv("INGOT_LIBCUDA");
  void* handle = dlopen(given != nullptr && *given != '\0' ? given : "libcuda.so.1", RTLD_NOW);
  if (handle == nullptr) return l;
  l.complete = true;
  const auto load = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(real_dlsym()(handle, name));
    return function != nullptr;
  };
  Driver& d = l.functions;
  l.complete = load(d.cuCtxGetCurrent, "cuCtxGetCurrent") && l.complete;
  l.complete = load(d.cuCtxGetDevice, "cuCtxGetDevice") && l.complete;
  l.complete = load(d.cuDeviceGetAttribute, "cuDeviceGetAttribute") && l.complete;
  l.complete = load(d.cuStreamGetCtx, "cuStreamGetCtx") && l.complete;
  l.complete = load(d.cuStreamIsCapturing, "cuStreamIsCapturing") && l.complete;
  l.complete =
      load(d.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode") && l.complete;
  l.complete = load(d.cuMemGetInfo, "cuMemGetInfo_v2") && l.complete;
  l.complete = load(d.cuMemAlloc, "cuMemAlloc_v2") && l.complete;
  l.complete = load(d.cuMemFree, "cuMemFree_v2") && l.complete;
  l.complete = load(d.cuMemsetD32Async, "cuMemsetD32Async") && l.complete;
  load(d.cuStreamGetId, "cuStreamGetId");
  load(d.cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2");
  load(d.cuUserObjectCreate, "cuUserObjectCreate");
  load(d.cuUserObjectRelease, "cuUserObjectRelease");
  load(d.cuGraphRetainUserObject, "cuGraphRetainUserObject");
  return l;
}

}  // namespace

const Driver* driver() {
  static const Loaded loaded = load_driver();
  return loaded.complete ? &loaded.functions : nullptr;
}

Place place_of(Stream stream) {
  Place place;
  const Driver* d = driver();
  if (d == nullptr || d->cuCtxGetCurrent(&place.context) != 0 || place.context == nullptr ||
      d->cuCtxGetDevice(&place.device) != 0) {
    return place;
  }
  // The first three name a default stream of the current context.
  if (reinterpret_cast<uintptr_t>(stream) > kPerThreadStream) {
    Context of_stream = nullptr;
    if (d->cuStreamGetCtx(stream, &of_stream) != 0 || of_stream != place.context) return place;
  }
  int major = 0;
  if (d->cuDeviceGetAttribute(&major, kComputeMajor, place.device) != 0) return place;
  place.known = major >= kOldestMajor;
  return place;
}

bool is_capturing(Stream stream) {
  int status = 0;
  return driver()->cuStreamIsCapturing(stream, &status) != 0 || status != 0;
}

AllowDuringCapture::AllowDuringCapture() {
  driver()->cuThreadExchangeStreamCaptureMode(&mode_);
}

AllowDuringCapture::~AllowDuringCapture() {
  driver()->cuThreadExchangeStreamCaptureMode(&mode_);
}

bool is_per_thread(Stream stream) {
  return reinterpret_cast<uintptr_t>(stream) == kPerThreadStream;
}

uint64_t identity_of(Stream stream) {
  unsigned long long id = 0;
  const Driver& d = *driver();
  if (d.cuStreamGetId != nullptr && d.cuStreamGetId(stream, &id) == 0) return id;
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace ingot::blas
