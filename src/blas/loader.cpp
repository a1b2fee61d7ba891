// Libraries that open cuBLAS themselves (JAX's, CuPy) ask dlsym for its functions, and so come past
// the order of symbols that LD_PRELOAD sets. This dlsym gives them this library's; for every other
// name it jumps to the C library's, which then sees the very caller: what RTLD_NEXT means depends
// on it.
#include <dlfcn.h>

#include <cstring>

#include "blas/library.h"
#include "blas/policy.h"
#include "blas/redirect.h"

extern "C" {
[[gnu::visibility("hidden")]] void* ingot_blas_c_library_dlsym = nullptr;
[[gnu::visibility("hidden")]] void* ingot_blas_replacement(void* handle, const char* name,
                                                           void* caller);
}

namespace ingot::blas {
namespace {

// In a process that loaded this library late, the C library does not come behind it.
void* c_library_dlsym() {
  void* const loaded = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  for (void* const from : {RTLD_NEXT, loaded}) {
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"}) {
      if (from == nullptr && from != RTLD_NEXT) continue;
      if (void* const found = dlvsym(from, "dlsym", version)) return found;
    }
  }
  return nullptr;
}

}  // namespace

bool is_ingot(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return false;
  const char* slash = std::strrchr(info.dli_fname, '/');
  return std::strcmp(slash == nullptr ? info.dli_fname : slash + 1, "libingot.so") == 0;
}

Dlsym* real_dlsym() {
  void* found = __atomic_load_n(&ingot_blas_c_library_dlsym, __ATOMIC_ACQUIRE);
  if (found == nullptr) {
    found = c_library_dlsym();
    __atomic_store_n(&ingot_blas_c_library_dlsym, found, __ATOMIC_RELEASE);
  }
  return reinterpret_cast<Dlsym*>(found);
}

}  // namespace ingot::blas

// nullptr: what the C library finds.
void* ingot_blas_replacement(void* handle, const char* name, void* caller) {
  using namespace ingot::blas;
  Dlsym* const real = real_dlsym();
  redirect_what_was_loaded();
  if (name == nullptr || std::strncmp(name, "cublas", 6) != 0) return nullptr;
  void* const own = exported(name);
  if (own == nullptr || handle == RTLD_NEXT || !is_on() || is_ingot(caller)) return nullptr;
  void* const theirs = real(handle, name);
  if (theirs == nullptr || theirs == own || !library_of(name).owns(theirs)) return nullptr;
  return own;
}

#if defined(__x86_64__)
extern "C" [[gnu::visibility("hidden")]] void ingot_blas_own_dlsym();
void* ingot::blas::own_dlsym() {
  return reinterpret_cast<void*>(&ingot_blas_own_dlsym);
}
asm(R"(
  .text
  .p2align 4
  .globl dlsym
  .type dlsym, @function
  .globl ingot_blas_own_dlsym
  .hidden ingot_blas_own_dlsym
dlsym:
ingot_blas_own_dlsym:
  .cfi_startproc
  endbr64
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  pushq %rsi
  .cfi_adjust_cfa_offset 8
  subq $8, %rsp
  .cfi_adjust_cfa_offset 8
  movq 24(%rsp), %rdx
  call ingot_blas_replacement
  addq $8, %rsp
  .cfi_adjust_cfa_offset -8
  popq %rsi
  .cfi_adjust_cfa_offset -8
  popq %rdi
  .cfi_adjust_cfa_offset -8
  testq %rax, %rax
  je 1f
  ret
1:
  jmp *ingot_blas_c_library_dlsym(%rip)
  .cfi_endproc
  .size dlsym, .-dlsym
)");
#else
void* ingot::blas::own_dlsym() {
  return nullptr;
}
#endif
