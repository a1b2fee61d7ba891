#include "cuda/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>

namespace ingot::cuda {
namespace {

namespace fs = std::filesystem;

// Folders of the CUDA libraries that the process has loaded, and of their siblings in the wheels
// of CUDA 12, which keep each library in a folder of its own (nvidia/cuda_nvrtc/lib, ...).
std::vector<fs::path> folders_in_use() {
  std::vector<fs::path> folders;
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    const fs::path path = info->dlpi_name != nullptr ? info->dlpi_name : "";
    const std::string name = path.filename().string();
    const bool cuda = name.starts_with("libcudart") || name.starts_with("libcublas") ||
                      name.starts_with("libnvrtc") || name.starts_with("libcudnn.");
    if (cuda) static_cast<std::vector<fs::path>*>(data)->push_back(path.parent_path());
    return 0;
  };
  dl_iterate_phdr(visit, &folders);
  const std::vector<fs::path> found = folders;
  for (const fs::path& folder : found) {
    const fs::path packages = folder.parent_path().parent_path();
    if (packages.filename() != "nvidia") continue;
    for (const char* sibling : {"cu13", "cuda_nvrtc", "cublas"}) {
      folders.push_back(packages / sibling / "lib");
    }
  }
  folders.emplace_back("/usr/local/cuda/lib64");
  return folders;
}

std::vector<std::string> candidates_of(const std::vector<std::string>& names,
                                       const char* environment) {
  std::vector<std::string> candidates;
  std::error_code ignored;
  if (const char* given = std::getenv(environment); given != nullptr && *given != '\0') {
    if (fs::is_directory(given, ignored)) {
      for (const std::string& name : names) candidates.push_back((fs::path(given) / name).string());
    } else {
      candidates.emplace_back(given);
    }
  }
  candidates.insert(candidates.end(), names.begin(), names.end());
  for (const fs::path& folder : folders_in_use()) {
    for (const std::string& name : names) candidates.push_back((folder / name).string());
  }
  return candidates;
}

}  // namespace

SharedLibrary SharedLibrary::open(const std::vector<std::string>& names, const char* environment) {
  SharedLibrary library;
  std::error_code ignored;
  for (const std::string& candidate : candidates_of(names, environment)) {
    if (candidate.find('/') != std::string::npos && !fs::exists(candidate, ignored)) continue;
    library.handle_ = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle_ != nullptr) {
      library.path_ = candidate;
      // Of a bare name: where the loader found it.
      link_map* map = nullptr;
      if (dlinfo(library.handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
        library.path_ = map->l_name;
      }
      library.error_.clear();
      return library;
    }
    const char* error = dlerror();
    if (library.error_.empty() && error != nullptr) library.error_ = error;
  }
  if (library.error_.empty()) library.error_ = names.front() + " not found";
  return library;
}

void* SharedLibrary::find(const char* symbol) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, symbol);
}

}  // namespace ingot::cuda
