// What this machine offers to the CUDA backend: for planning and for doctor().
#include "backend/executable.h"
#include "cuda/cubin_cache.h"
#include "cuda/cublas_lt.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "cuda/product_family.h"
#include "product/arch.h"
#include "support/cache_folder.h"

namespace ingot {
namespace {

using namespace cuda;

// Of one multiprocessor. family: of the product's kernels, `none` for the library's.
double product_flops(Precision precision, const ArchSpec::Rates& rates, ProductFamily family) {
  switch (precision) {
    case Precision::tf32:
      return family == ProductFamily::hopper ? rates.scaled : rates.tf32;
    case Precision::bf16:
    case Precision::fp16:
      return rates.half;
    case Precision::high:
      if (family == ProductFamily::hopper) return rates.high;
      [[fallthrough]];
    case Precision::fp32:
      if (family == ProductFamily::hopper) return rates.split;
      return family == ProductFamily::portable ? rates.portable : rates.fp32;
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
  const ArchSpec& asked = arch_of(options.sm);
  target.units = asked.multiprocessors;
  target.bandwidth = asked.bandwidth;
  target.cache_bytes = asked.cache_bytes;
  target.launch_seconds = 2e-6;
  target.shared_bytes = asked.shared_bytes;
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
  target.streams_products = options.streamed;
  target.product_flops =
      product_flops(options.precision, arch_of(target.sm).rates, family) * target.units;
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
                      {"supported", sm >= kOldestSm},
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
  const std::string cache = default_cache_folder();
  result["cache"] = cache.empty() ? "" : cache + "/kernels";
  return result;
}

}  // namespace ingot
