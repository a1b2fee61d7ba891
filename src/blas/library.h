// The real cuBLAS and cuBLASLt behind the functions that this library exports.
#pragma once

#include <atomic>

namespace ingot::blas {

// One of the two: bound once, to the copy that the process uses.
class Library {
 public:
  constexpr Library(const char* name, const char* witness) : name_(name), witness_(witness) {}

  // The library's own function; nullptr where there is none.
  void* find(const char* symbol);
  // Whether `function` belongs to the copy that is bound, which it settles if none is yet. What
  // belongs to another copy must not be replaced: handles of one mean nothing to the other.
  bool owns(void* function);

 private:
  void* handle();
  void* search() const;

  const char* name_;     // without its version
  const char* witness_;  // a function that only it and this library export
  std::atomic<void*> handle_{nullptr};
};
Library& cublas();
Library& cublas_lt();
Library& library_of(const char* symbol);

// A function of the real library, looked up when first called.
template <class Function>
class Real {
 public:
  constexpr explicit Real(const char* name) : name_(name) {}

  const char* name() const { return name_; }
  Function* get() {
    void* found = found_.load(std::memory_order_acquire);
    if (found == nullptr) {
      found = library_of(name_).find(name_);
      found_.store(found, std::memory_order_release);
    }
    return reinterpret_cast<Function*>(found);
  }

 private:
  const char* name_;
  std::atomic<void*> found_{nullptr};
};

// While one lives, this thread is below the hook: its products go to the library, uncounted. So
// Ingot's own ones do, and those that the library computes by others of its functions.
class BelowHook {
 public:
  BelowHook() { ++depth_; }
  ~BelowHook() { --depth_; }
  BelowHook(const BelowHook&) = delete;
  BelowHook& operator=(const BelowHook&) = delete;
  static bool here() { return depth_ > 0; }

 private:
  [[gnu::tls_model("initial-exec")]] static thread_local int depth_;
};

// The C library's dlsym; a plain call of it would come to the one that is exported here.
using Dlsym = void*(void*, const char*);
Dlsym* real_dlsym();

// The dlsym that is exported here; nullptr where there is none (loader.cpp).
void* own_dlsym();

// Whether code of libingot.so, whose own products must reach the library.
bool is_ingot(const void* address);

// The function that this library exports under a name, or nullptr.
void* exported(const char* name);

}  // namespace ingot::blas
