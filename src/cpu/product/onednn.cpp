#include "cpu/product/onednn.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "support/threads.h"

namespace ingot::cpu {
namespace {

// dnnl_sgemm: row-major, sizes as int64; returns 0 on success.
using Sgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t,
                      const float*, int64_t, float, float*, int64_t);

class OneDnnProduct final : public ProductProvider {
 public:
  OneDnnProduct(std::string name, Sgemm sgemm) : name_(std::move(name)), sgemm_(sgemm) {}
  std::string name() const override { return name_; }

  bool takes(const ProductCall& call) const override {
    return call.dtype == INGOT_F32 && !call.transpose_a && call.m > 0 && call.n > 0 && call.k > 0 &&
           (!in_forked_child() || thread_count() == 1);
  }

  bool run(const ProductCall& call) const override {
    // A leading dimension below the minimum is refused even where it is never used.
    const int64_t lda = std::max(call.lda, call.k);
    const int64_t ldb = std::max(call.ldb, call.transpose_b ? call.k : call.n);
    return sgemm_('N', call.transpose_b ? 'T' : 'N', call.m, call.n, call.k, 1.0f,
                  static_cast<const float*>(call.a), lda, static_cast<const float*>(call.b), ldb,
                  0.0f, static_cast<float*>(call.c), std::max(call.ldc, call.n)) == 0;
  }

 private:
  std::string name_;
  Sgemm sgemm_;
};

std::shared_ptr<const ProductProvider> find_onednn() {
  for (const char* file : {"libdnnl.so.3", "libdnnl.so.2"}) {
    void* handle = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) continue;
    void* sgemm = dlsym(handle, "dnnl_sgemm");
    if (sgemm != nullptr) {
      return std::make_shared<OneDnnProduct>(file, reinterpret_cast<Sgemm>(sgemm));
    }
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<const ProductProvider> onednn_product() {
  static const auto* const found = new std::shared_ptr<const ProductProvider>(find_onednn());
  return *found;
}

}  // namespace ingot::cpu
