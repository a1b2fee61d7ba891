#include "cpu/product/blas.h"

#include <dlfcn.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "support/threads.h"

namespace ingot::cpu {
namespace {

// Row-major c = a·op(b) is column-major cᵀ = op(b)ᵀ·aᵀ: the operands change places.
template <class T, class Integer>
void call_gemm(void* address, const ProductCall& call) {
  using Gemm =
      void (*)(const char*, const char*, const Integer*, const Integer*, const Integer*, const T*,
               const T*, const Integer*, const T*, const Integer*, const T*, T*, const Integer*);
  const auto gemm = reinterpret_cast<Gemm>(address);
  const auto m = static_cast<Integer>(call.m), n = static_cast<Integer>(call.n),
             k = static_cast<Integer>(call.k);
  // A leading dimension below the minimum is refused even where it is never used.
  const auto lda = static_cast<Integer>(std::max(call.lda, call.k)),
             ldb = static_cast<Integer>(std::max(call.ldb, call.transpose_b ? call.k : call.n)),
             ldc = static_cast<Integer>(std::max(call.ldc, call.n));
  const T one = T(1), zero = T(0);
  gemm(call.transpose_b ? "T" : "N", "N", &n, &m, &k, &one, static_cast<const T*>(call.b), &ldb,
       static_cast<const T*>(call.a), &lda, &zero, static_cast<T*>(call.c), &ldc);
}

class LibraryProduct final : public ProductProvider {
 public:
  LibraryProduct(std::string name, BlasFunctions blas) : name_(std::move(name)), blas_(blas) {}
  std::string name() const override { return name_; }
  bool takes(const ProductCall& call) const override {
    return blas_takes(blas_, call) && (!in_forked_child() || thread_count() == 1);
  }
  bool run(const ProductCall& call) const override {
    blas_product(blas_, call);
    return true;
  }

 private:
  std::string name_;
  BlasFunctions blas_;
};

std::shared_ptr<const ProductProvider> find_library() {
  for (const char* file : {"libopenblas.so.0", "libmkl_rt.so.2", "libblis.so.4"}) {
    void* handle = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) continue;
    const BlasFunctions blas{dlsym(handle, "sgemm_"), dlsym(handle, "dgemm_"), 4};
    if (blas.sgemm != nullptr) return std::make_shared<LibraryProduct>(file, blas);
  }
  return nullptr;
}

}  // namespace

bool blas_takes(const BlasFunctions& blas, const ProductCall& call) {
  const void* gemm = call.dtype == INGOT_F32   ? blas.sgemm
                     : call.dtype == INGOT_F64 ? blas.dgemm
                                               : nullptr;
  const int64_t largest = std::max({call.m, call.n, call.k, call.lda, call.ldb, call.ldc});
  return gemm != nullptr && !call.transpose_a && call.m > 0 && call.n > 0 && call.k > 0 &&
         (blas.integer_bytes == 8 || largest <= std::numeric_limits<int32_t>::max());
}

void blas_product(const BlasFunctions& blas, const ProductCall& call) {
  const bool wide = blas.integer_bytes == 8;
  if (call.dtype == INGOT_F32) {
    wide ? call_gemm<float, int64_t>(blas.sgemm, call)
         : call_gemm<float, int32_t>(blas.sgemm, call);
  } else {
    wide ? call_gemm<double, int64_t>(blas.dgemm, call)
         : call_gemm<double, int32_t>(blas.dgemm, call);
  }
}

std::shared_ptr<const ProductProvider> library_product() {
  static const auto* const found = new std::shared_ptr<const ProductProvider>(find_library());
  return *found;
}

}  // namespace ingot::cpu
