// What this machine offers to the CUDA backend: for planning and for doctor().
#include "backend/executable.h"
#include "cuda/cubin_cache.h"
#include "cuda/cublas_lt.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "cuda/product_family.h"

namespace ingot {
namespace {

using namespace cuda;

// Sustained rates of one multiprocessor, from measurements of an H200 (132 of them) and, for cc
// 8.x, datasheets; used for predictions alone.
struct Rates {
  double fp32, tf32, half, split;  // split: our fp32 product, 0 where there is none
  double scaled = 0;               // our tf32 product, the same
};

Rates rates_of(int sm) {
  if (sm == 90) return {50e12 / 132, 390e12 / 132, 700e12 / 132, 245e12 / 132, 550e12 / 132};
  if (sm >= 100) return {70e12 / 148, 900e12 / 148, 1500e12 / 148, 150e12 / 148};
  return {19e12 / 108, 130e12 / 108, 250e12 / 108, 65e12 / 108};
}

// Shared memory that a thread block may have, by the programming guide.
int shared_bytes_of(int sm) {
  if (sm == 80 || sm == 87) return 163 * 1024;
  return sm >= 90 && sm < 120 ? 227 * 1024 : 99 * 1024;
}

constexpr double kPortableOnHopper = 145e12 / 132;

double product_flops(Precision precision, const Rates& rates, bool own_product) {
  switch (precision) {
    case Precision::tf32:
      return own_product ? rates.scaled : rates.tf32;
    case Precision::bf16:
    case Precision::fp16:
      return rates.half;
    case Precision::fp32:
    case Precision::high:
      return own_product ? rates.split : rates.fp32;
    case Precision::ieee:
      break;
  }
  return rates.fp32;
}

std::string device_name(CUdevice device) {
  char name[256] = {};
  driver().cuDeviceGetName(name, sizeof(name), device);
  return name;
}

int compute_capability(CUdevice device) {
  return 10 * device_attribute(device, kComputeMajor) + device_attribute(device, kComputeMinor);
}

// Both edges of the memory clock carry data; about 0.86 of that is reached.
double bandwidth_of(CUdevice device) {
  const double clock = 1e3 * device_attribute(device, kMemoryClockKhz);
  return 2 * clock * device_attribute(device, kMemoryBusBits) / 8 * 0.86;
}

}  // namespace

Target cuda_target(const ProgramOptions& options) {
  Target target;
  target.device = Target::Device::cuda;
  target.sm = options.sm;
  target.units = options.sm == 90 ? 132 : 108;
  target.bandwidth = options.sm >= 90 ? 4.2e12 : 1.6e12;
  target.cache_bytes = options.sm >= 90 ? 50e6 : 40e6;
  target.launch_seconds = 2e-6;
  target.shared_bytes = shared_bytes_of(options.sm);
  target.name = "a GPU of compute capability " + std::to_string(options.sm / 10) + "." +
                std::to_string(options.sm % 10) + " (none here)";
  if (const Driver* d = try_driver(nullptr)) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    // The current context's GPU, else the first.
    d->cuCtxGetCurrent(&context);
    if (context != nullptr) d->cuCtxGetDevice(&device);
    target.sm = compute_capability(device);
    target.units = device_attribute(device, kMultiprocessors);
    target.bandwidth = bandwidth_of(device);
    target.cache_bytes = device_attribute(device, kL2Bytes);
    target.shared_bytes = device_attribute(device, kMaxSharedBytes);
    target.name = device_name(device);
  }
  const ProductFamily family = product_family(target.sm, options.capabilities);
  const bool splits = options.precision == Precision::fp32 ||
                      options.precision == Precision::high ||
                      (options.precision == Precision::tf32 && family == ProductFamily::hopper);
  const bool own = splits && family != ProductFamily::none;
  target.fused_epilogue = target.fused_statistics = own;
  target.fused_half = family == ProductFamily::hopper;
  Rates rates = rates_of(target.sm);
  if (target.sm == 90 && family == ProductFamily::portable) rates.split = kPortableOnHopper;
  target.product_flops = product_flops(options.precision, rates, own) * target.units;
  return target;
}

nlohmann::json describe_cuda_machine() {
  using nlohmann::json;
  json result;
  std::string why;
  if (const Driver* d = try_driver(&why)) {
    result["driver"] = {{"available", true}, {"cuda_version", d->version}};
    json gpus = json::array();
    for (int i = 0; i < d->devices; ++i) {
      CUdevice device = 0;
      size_t memory = 0;
      if (d->cuDeviceGet(&device, i) != kCudaSuccess) continue;
      d->cuDeviceTotalMem(&memory, device);
      const int sm = compute_capability(device);
      const bool own = product_family(sm, json::object()) != ProductFamily::none;
      gpus.push_back({{"index", i},
                      {"name", device_name(device)},
                      {"compute_capability", sm},
                      {"multiprocessors", device_attribute(device, kMultiprocessors)},
                      {"memory_bytes", memory},
                      {"bandwidth", bandwidth_of(device)},
                      {"supported", sm >= 80},
                      {"fp32_product", own ? "Ingot's, on tensor cores" : "cuBLASLt"}});
    }
    result["gpus"] = gpus;
  } else {
    result["driver"] = {{"available", false}, {"why", why}};
    result["gpus"] = json::array();
  }
  const NvrtcInfo& nvrtc = nvrtc_info();
  result["nvrtc"] = {{"available", nvrtc.available},
                     {"version", std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor)},
                     {"path", nvrtc.path},
                     {"why", nvrtc.why}};
  const CublasInfo& cublas = cublas_info();
  result["cublaslt"] = {{"available", cublas.available},
                        {"version", cublas.version},
                        {"path", cublas.path},
                        {"why", cublas.why}};
  const std::string cache = CubinCache::default_folder();
  result["cache"] = cache.empty() ? "" : cache + "/kernels";
  return result;
}

}  // namespace ingot
