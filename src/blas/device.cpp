#include "blas/device.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>

#include "blas/library.h"

namespace ingot::blas {
namespace {

constexpr int kComputeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kOldestMajor = 8;
constexpr auto kPerThreadStream = uintptr_t{2};  // CU_STREAM_PER_THREAD
constexpr size_t kGrain = size_t{2} << 20;
constexpr int kCallsUntilRetry = 1000;

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
  load(d.cuStreamGetId, "cuStreamGetId");
  return l;
}

// Bytes that all workspaces together may take.
size_t most_bytes(size_t total) {
  static const char* const given = std::getenv("INGOT_BLAS_MEMORY");
  if (given != nullptr && *given != '\0') return std::strtoull(given, nullptr, 10) << 20;
  return total / 8;
}

std::atomic<size_t> reserved{0};

// Streams come and go, and a new one may lie where an old one lay.
uint64_t identity_of(Stream stream) {
  unsigned long long id = 0;
  const Driver& d = *driver();
  if (d.cuStreamGetId != nullptr && d.cuStreamGetId(stream, &id) == 0) return id;
  return reinterpret_cast<uintptr_t>(stream);
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

bool Workspace::reserve(size_t needed) {
  if (needed <= bytes) return true;
  if (refused != 0 && needed >= refused && calls_until_retry-- > 0) return false;
  refused = needed;
  calls_until_retry = kCallsUntilRetry;
  const Driver& d = *driver();
  const AllowDuringCapture allow;
  const size_t wanted = (needed + kGrain - 1) / kGrain * kGrain;
  size_t free = 0, total = 0;
  if (d.cuMemGetInfo(&free, &total) != 0) return false;
  // Some must stay: the program itself goes on allocating.
  const size_t others = reserved.load() - bytes;
  if (others + wanted > most_bytes(total) || wanted + total / 16 > free + bytes) return false;
  if (memory != nullptr) {
    d.cuMemFree(memory);
    reserved -= bytes;
    memory = nullptr;
    bytes = 0;
  }
  if (d.cuMemAlloc(&memory, wanted) != 0) {
    memory = nullptr;
    return false;
  }
  bytes = wanted;
  reserved += wanted;
  refused = 0;
  return true;
}

Workspace& workspace_of(const Place& place, Stream stream) {
  using Key = std::tuple<Context, uint64_t, const void*>;
  struct Registry {
    std::shared_mutex mutex;
    std::map<Key, std::unique_ptr<Workspace>> workspaces;
  };
  static Registry& registry = *new Registry;
  static thread_local char thread_marker;
  const bool per_thread = reinterpret_cast<uintptr_t>(stream) == kPerThreadStream;
  const Key key = {place.context, identity_of(stream), per_thread ? &thread_marker : nullptr};
  {
    const std::shared_lock lock(registry.mutex);
    const auto found = registry.workspaces.find(key);
    if (found != registry.workspaces.end()) return *found->second;
  }
  const std::unique_lock lock(registry.mutex);
  auto& place_in_map = registry.workspaces[key];
  if (!place_in_map) place_in_map = std::make_unique<Workspace>();
  return *place_in_map;
}

}  // namespace ingot::blas
