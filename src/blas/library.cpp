#include "blas/library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace ingot::blas {
namespace {

constexpr const char* kVersions[] = {".13", ".12", ".11", ""};

// Of a library that is loaded.
void* handle_of(void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return nullptr;
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

void* open(const char* name, int flags) {
  for (const char* version : kVersions) {
    char file[64];
    std::snprintf(file, sizeof(file), "%s%s", name, version);
    if (void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | flags)) return handle;
  }
  return nullptr;
}

}  // namespace

thread_local int BelowHook::depth_ = 0;

Library& cublas() {
  static constinit Library library("libcublas.so", "cublasSgemm_v2");
  return library;
}

Library& cublas_lt() {
  static constinit Library library("libcublasLt.so", "cublasLtMatmul");
  return library;
}

Library& library_of(const char* symbol) {
  return std::strncmp(symbol, "cublasLt", 8) == 0 ? cublas_lt() : cublas();
}

// Behind this library in the order of symbols; else a copy that the process loaded for some of its
// libraries alone, as Python's extensions are; else the one that the loader would find.
void* Library::search() const {
  if (void* next = real_dlsym()(RTLD_NEXT, witness_)) {
    if (void* handle = handle_of(next)) return handle;
  }
  if (void* handle = open(name_, RTLD_NOLOAD)) return handle;
  return open(name_, 0);
}

void* Library::handle() {
  void* handle = handle_.load(std::memory_order_acquire);
  if (handle != nullptr) return handle;
  void* found = search();
  if (found == nullptr) return nullptr;
  return handle_.compare_exchange_strong(handle, found) ? found : handle;
}

void* Library::find(const char* symbol) {
  void* from = handle();
  return from == nullptr ? nullptr : real_dlsym()(from, symbol);
}

bool Library::owns(void* function) {
  void* from = handle_of(function);
  if (from == nullptr) return false;
  void* bound = nullptr;
  if (handle_.compare_exchange_strong(bound, from)) return true;
  return bound == from;
}

}  // namespace ingot::blas
