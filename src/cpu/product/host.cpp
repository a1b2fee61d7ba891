// The product that the host process registered (PyTorch's own, in a PyTorch process).
#include "cpu/product/host.h"

#include <atomic>
#include <utility>

#include "support/threads.h"

namespace ingot::cpu {
namespace {

class HostProduct final : public ProductProvider {
 public:
  HostProduct(std::string name, ingot_product_fn function, void* context)
      : name_(std::move(name)), function_(function), context_(context) {}

  std::string name() const override { return name_; }

  // Another library's pool of threads is dead in a forked child and would be waited for for ever.
  bool takes(const ProductCall& call) const override {
    return !call.transpose_a && (!in_forked_child() || thread_count() == 1);
  }

  bool run(const ProductCall& call) const override {
    return function_(call.m, call.n, call.k, call.a, call.lda, call.b, call.ldb,
                     call.transpose_b ? 1 : 0, call.c, call.ldc, call.row, call.dtype,
                     context_) == 0;
  }

  // A product of 16 bits is rounded to them: with the row, once.
  bool adds_row(const ProductCall& call) const override {
    return call.dtype == INGOT_F16 || call.dtype == INGOT_BF16;
  }

 private:
  std::string name_;
  ingot_product_fn function_;
  void* context_;
};

std::atomic<uint64_t> registrations{0};

// Readers keep what they loaded alive, so that a program that runs finishes with the old one.
// Never destroyed: programs may run in other threads while the process exits.
std::atomic<std::shared_ptr<const ProductProvider>>& slot() {
  static auto* const instance = new std::atomic<std::shared_ptr<const ProductProvider>>();
  return *instance;
}

}  // namespace

void set_host_product(const std::string& name, ingot_product_fn fn, void* context) {
  std::shared_ptr<const ProductProvider> provider;
  if (fn != nullptr) provider = std::make_shared<HostProduct>(name, fn, context);
  slot().store(std::move(provider));
  ++registrations;
}

uint64_t registered_products() {
  return registrations.load();
}

std::shared_ptr<const ProductProvider> host_product() {
  return slot().load();
}

}  // namespace ingot::cpu
