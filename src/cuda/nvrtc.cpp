#include "cuda/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cuda/shared_library.h"
#include "product/arch.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

using Program = struct NvrtcProgram*;

struct Nvrtc {
  int (*version)(int*, int*) = nullptr;
  int (*supported_count)(int*) = nullptr;
  int (*supported)(int*) = nullptr;
  int (*create)(Program*, const char*, const char*, int, const char* const*,
                const char* const*) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*compile)(Program, int, const char* const*) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
  int (*ptx_size)(Program, size_t*) = nullptr;
  int (*ptx)(Program, char*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  NvrtcInfo info;
};

// NVRTC opens its builtins by bare name. Beside an NVRTC in PyTorch's wheels they are in no folder
// that the loader searches, and are found only if they are in the process already.
void load_builtins(const std::string& nvrtc_path) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(nvrtc_path).parent_path(), error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("libnvrtc-builtins.so.")) dlopen(entry.path().c_str(), RTLD_NOW);
  }
}

Nvrtc load_nvrtc() {
  Nvrtc n;
  const SharedLibrary library =
      SharedLibrary::open({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}, "INGOT_NVRTC");
  if (!library.is_open()) {
    n.info.why = "NVRTC not found (" + library.error() +
                 "); it comes with PyTorch's CUDA wheels (nvidia-cuda-nvrtc) and with the CUDA "
                 "toolkit; INGOT_NVRTC may name its file or folder";
    return n;
  }
  n.info.path = library.path();
  load_builtins(n.info.path);
  bool ok = library.load(n.version, "nvrtcVersion");
  ok = library.load(n.supported_count, "nvrtcGetNumSupportedArchs") && ok;
  ok = library.load(n.supported, "nvrtcGetSupportedArchs") && ok;
  ok = library.load(n.create, "nvrtcCreateProgram") && ok;
  ok = library.load(n.destroy, "nvrtcDestroyProgram") && ok;
  ok = library.load(n.compile, "nvrtcCompileProgram") && ok;
  ok = library.load(n.log_size, "nvrtcGetProgramLogSize") && ok;
  ok = library.load(n.log, "nvrtcGetProgramLog") && ok;
  ok = library.load(n.cubin_size, "nvrtcGetCUBINSize") && ok;
  ok = library.load(n.cubin, "nvrtcGetCUBIN") && ok;
  ok = library.load(n.ptx_size, "nvrtcGetPTXSize") && ok;
  ok = library.load(n.ptx, "nvrtcGetPTX") && ok;
  ok = library.load(n.error_string, "nvrtcGetErrorString") && ok;
  if (n.version != nullptr) n.version(&n.info.major, &n.info.minor);
  if (!ok || n.info.major < 12) {
    n.info.why = fmt::format("{} is NVRTC {}.{}; Ingot needs 12.0 or newer", n.info.path,
                             n.info.major, n.info.minor);
    return n;
  }
  int count = 0;
  n.supported_count(&count);
  n.info.architectures.resize(static_cast<size_t>(count));
  if (count > 0) n.supported(n.info.architectures.data());
  n.info.available = true;
  return n;
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = load_nvrtc();
  return loaded;
}

}  // namespace

const NvrtcInfo& nvrtc_info() {
  return nvrtc().info;
}

std::string nvrtc_architecture(int sm) {
  const std::vector<int>& known = nvrtc_info().architectures;
  if (known.empty() || std::find(known.begin(), known.end(), sm) != known.end()) {
    return fmt::format("sm_{}{}", sm, arch_of(sm).hopper_kernels ? "a" : "");
  }
  int best = kOldestSm;
  for (const int architecture : known) {
    if (architecture <= sm) best = std::max(best, architecture);
  }
  return fmt::format("compute_{}", best);
}

Compilation nvrtc_compile(const std::string& name, const std::string& source,
                          const std::vector<std::pair<std::string, std::string>>& headers,
                          const std::vector<std::string>& options) {
  const Nvrtc& n = nvrtc();
  if (!n.info.available) fail(INGOT_UNAVAILABLE, "{}", n.info.why);
  std::vector<const char*> paths, texts, flags;
  for (const auto& [path, text] : headers) {
    paths.push_back(path.c_str());
    texts.push_back(text.c_str());
  }
  bool to_ptx = false;
  for (const std::string& option : options) {
    flags.push_back(option.c_str());
    to_ptx = to_ptx || option.find("=compute_") != std::string::npos;
  }
  Program program = nullptr;
  const int created = n.create(&program, source.c_str(), (name + ".cu").c_str(),
                               static_cast<int>(headers.size()), texts.data(), paths.data());
  if (created != 0) fail(INGOT_FAILED, "NVRTC: {}", n.error_string(created));
  const auto destroy = [&n](Program* p) { n.destroy(p); };
  const std::unique_ptr<Program, decltype(destroy)> guard(&program, destroy);

  const int compiled = n.compile(program, static_cast<int>(flags.size()), flags.data());
  Compilation result;
  size_t size = 0;
  n.log_size(program, &size);
  result.log.resize(size);
  if (size > 0) n.log(program, result.log.data());
  while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  if (compiled != 0) {
    fail(INGOT_FAILED, "NVRTC {}.{} could not compile {} ({}):\n{}", n.info.major, n.info.minor,
         name, n.error_string(compiled), result.log);
  }
  (to_ptx ? n.ptx_size : n.cubin_size)(program, &size);
  result.code.resize(size);
  (to_ptx ? n.ptx : n.cubin)(program, result.code.data());
  return result;
}

}  // namespace ingot::cuda
