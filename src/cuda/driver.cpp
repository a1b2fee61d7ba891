#include "cuda/driver.h"

#include <pthread.h>

#include <atomic>

#include "cuda/shared_library.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

constexpr int kOldestDriver = 12000;
constexpr const char* kForked =
    "this process was forked after CUDA had been used, and CUDA cannot work in it; start workers "
    "with the \"spawn\" method";

std::atomic<bool> forked_after_start{false};

struct Loaded {
  Driver driver;
  bool usable = false;
  std::string why;
};

Loaded load_driver() {
  Loaded loaded;
  const SharedLibrary library = SharedLibrary::open({"libcuda.so.1"}, "INGOT_LIBCUDA");
  if (!library.is_open()) {
    loaded.why = "no NVIDIA driver (" + library.error() + "); install one, or use device=\"cpu\"";
    return loaded;
  }
  Driver& d = loaded.driver;
  bool complete = true;
#define INGOT_LOAD(function, symbol, parameters) \
  complete = library.load(d.function, symbol) && complete;
  INGOT_DRIVER_FUNCTIONS(INGOT_LOAD)
#undef INGOT_LOAD
  if (d.cuDriverGetVersion != nullptr) d.cuDriverGetVersion(&d.version);
  if (!complete || d.version < kOldestDriver) {
    loaded.why = fmt::format(
        "the NVIDIA driver at {} is of CUDA {}.{}; Ingot needs one of CUDA 12.0 (525) or newer",
        library.path(), d.version / 1000, d.version % 1000 / 10);
    return loaded;
  }
  if (const CUresult result = d.cuInit(0); result != kCudaSuccess) {
    const char* name = "unknown error";
    d.cuGetErrorName(result, &name);
    loaded.why = fmt::format("the NVIDIA driver could not start ({}); does nvidia-smi work?", name);
    return loaded;
  }
  d.cuDeviceGetCount(&d.devices);
  if (d.devices == 0) {
    loaded.why = "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)";
    return loaded;
  }
  pthread_atfork(nullptr, nullptr, [] { forked_after_start = true; });
  loaded.usable = true;
  return loaded;
}

const Loaded& loaded_driver() {
  static const Loaded loaded = load_driver();
  return loaded;
}

}  // namespace

const Driver* try_driver(std::string* why) {
  if (forked_after_start.load(std::memory_order_relaxed)) {
    if (why != nullptr) *why = kForked;
    return nullptr;
  }
  const Loaded& loaded = loaded_driver();
  if (!loaded.usable && why != nullptr) *why = loaded.why;
  return loaded.usable ? &loaded.driver : nullptr;
}

const Driver& driver() {
  if (const Driver* d = try_driver(nullptr)) return *d;
  std::string why;
  try_driver(&why);
  fail(INGOT_UNAVAILABLE, "CUDA: {}", why);
}

void check(CUresult result, const char* doing) {
  if (result == kCudaSuccess) return;
  const char *name = "unknown error", *text = "";
  const Driver& d = loaded_driver().driver;
  d.cuGetErrorName(result, &name);
  d.cuGetErrorString(result, &text);
  fail(INGOT_FAILED, "CUDA: {} while {}: {}", name, doing, text);
}

int device_attribute(CUdevice device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, attribute, device), "asking for a device attribute");
  return value;
}

}  // namespace ingot::cuda
