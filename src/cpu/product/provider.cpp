#include "cpu/product/provider.h"

#include "cpu/product/amx/product.h"
#include "cpu/product/blas.h"
#include "cpu/product/host.h"
#include "cpu/product/onednn.h"
#include "cpu/product/own.h"
#include "support/error.h"

namespace ingot::cpu {

std::vector<std::shared_ptr<const ProductProvider>> product_providers(const Isa& isa) {
  std::vector<std::shared_ptr<const ProductProvider>> found;
  const auto add = [&](std::shared_ptr<const ProductProvider> provider) {
    if (provider != nullptr) found.push_back(std::move(provider));
  };
  add(amx::amx_product(isa, amx::choice_of_environment()));
  // On processors that are not Intel's MKL runs its AVX2 code, and that not at its best
  // (docs/cpu-backend.md).
  if (!isa.intel && isa.level != Level::baseline) add(own_product(isa, false));
  const std::shared_ptr<const ProductProvider> host = host_product();
  add(host);
  // A library of the system would bring a second pool of threads beside the host process's.
  if (host == nullptr) {
    add(onednn_product());
    add(library_product());
  }
  add(own_product(isa, true));
  return found;
}

std::shared_ptr<const ProductProvider> provider_of(const Isa& isa, const ProductCall& call) {
  for (auto& provider : product_providers(isa)) {
    if (provider->takes(call)) return provider;
  }
  return nullptr;
}

bool some_provider_consumes(const Isa& isa, const ProductCall& call) {
  const auto provider = provider_of(isa, call);
  return provider != nullptr && provider->consumes(call);
}

bool run_with_consumer(const Isa& isa, const ProductCall& call) {
  const auto provider = provider_of(isa, call);
  return provider != nullptr && provider->consumes(call) && provider->run(call);
}

bool some_provider_adds_row(const Isa& isa, const ProductCall& call) {
  const auto provider = provider_of(isa, call);
  return provider != nullptr && provider->adds_row(call);
}

bool run_with_row(const Isa& isa, const ProductCall& call) {
  const auto provider = provider_of(isa, call);
  return provider != nullptr && provider->adds_row(call) && provider->run(call);
}

std::string run_product(const Isa& isa, const ProductCall& call) {
  for (const auto& provider : product_providers(isa)) {
    if (provider->takes(call) && provider->run(call)) return provider->name();
  }
  fail(INGOT_UNSUPPORTED, "matrix product of dtype {}: no provider takes it",
       static_cast<int>(call.dtype));
}

}  // namespace ingot::cpu
