#include "blas/ingot_library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "blas/library.h"

namespace ingot::blas {
namespace {

// INGOT_LIBRARY, or the one beside this library.
std::string path_of_ingot() {
  if (const char* given = std::getenv("INGOT_LIBRARY"); given != nullptr && *given != '\0') {
    return given;
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&path_of_ingot), &info) == 0) return "libingot.so";
  const std::string own = info.dli_fname;
  const size_t slash = own.rfind('/');
  return slash == std::string::npos ? "libingot.so" : own.substr(0, slash + 1) + "libingot.so";
}

Ingot load_ingot() {
  Ingot l;
  const std::string path = path_of_ingot();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    say("products are left to cuBLAS: " + std::string(error == nullptr ? path : error));
    return l;
  }
  const auto load = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(real_dlsym()(handle, name));
    return function != nullptr;
  };
  l.complete =
      load(l.abi_version, "ingot_abi_version") && load(l.last_error, "ingot_last_error") &&
      load(l.create, "ingot_program_create") &&
      load(l.uses_library, "ingot_program_uses_library") &&
      load(l.prepare_call, "ingot_program_prepare_call") && load(l.run, "ingot_program_run") &&
      load(l.prepare_arrays, "ingot_matrix_array_prepare") &&
      load(l.gather, "ingot_matrix_array_gather") &&
      load(l.scatter, "ingot_matrix_array_scatter") && l.abi_version() == INGOT_ABI_VERSION;
  if (l.complete) {
    say("fp32 products of this process run on Ingot where that pays; INGOT_BLAS=off leaves them "
        "to cuBLAS");
  } else {
    say("products are left to cuBLAS: " + path + " is of another release");
  }
  return l;
}

}  // namespace

void say(const std::string& message) {
  std::fprintf(stderr, "ingot: %s\n", message.c_str());
}

const Ingot& ingot() {
  static const Ingot loaded = load_ingot();
  return loaded;
}

}  // namespace ingot::blas
