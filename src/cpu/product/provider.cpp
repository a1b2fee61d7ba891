#include "cpu/product/provider.h"

#include <algorithm>

#include "cpu/product/amx/product.h"
#include "cpu/product/blas.h"
#include "cpu/product/host.h"
#include "cpu/product/measured.h"
#include "cpu/product/onednn.h"
#include "cpu/product/own.h"
#include "support/cache_folder.h"
#include "support/error.h"

namespace ingot::cpu {
namespace {

// Those that need nothing beyond vectors of floats.
Providers plain_providers(const Isa& isa) {
  Providers found;
  const auto add = [&](std::shared_ptr<const ProductProvider> provider) {
    if (provider != nullptr) found.push_back(std::move(provider));
  };
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

// AMX beside the one that would compute a large product otherwise.
std::shared_ptr<const MeasuredProduct> measured_amx(std::shared_ptr<const ProductProvider> tiles,
                                                    const Providers& others) {
  ProductCall large;
  large.m = large.n = large.k = 4096;
  large.lda = large.ldb = large.ldc = 4096;
  large.transpose_b = true;
  const auto champion = std::find_if(others.begin(), others.end(),
                                     [&](const auto& provider) { return provider->takes(large); });
  if (champion == others.end()) return nullptr;
  return std::make_shared<MeasuredProduct>(std::move(tiles), *champion, default_cache_folder(),
                                           processor_name());
}

}  // namespace

Providers product_providers(const Isa& isa) {
  Providers found = plain_providers(isa);
  const amx::Choice choice = amx::choice_of_environment();
  std::shared_ptr<const ProductProvider> tiles = amx::amx_product(isa, choice);
  if (tiles != nullptr && choice == amx::Choice::automatic) {
    tiles = measured_amx(std::move(tiles), found);
  }
  if (tiles != nullptr) found.insert(found.begin(), std::move(tiles));
  return found;
}

std::string use_of_amx(const Isa& isa) {
  const amx::Choice choice = amx::choice_of_environment();
  std::shared_ptr<const ProductProvider> tiles;
  if (choice == amx::Choice::automatic) tiles = amx::amx_product(isa, choice);
  if (tiles == nullptr) return amx::use_of(amx::support(isa), choice);
  const auto measured = measured_amx(std::move(tiles), plain_providers(isa));
  return measured != nullptr ? measured->describe() : "no";
}

Providers providers_of(const Isa& isa, const ProductCall& call) {
  Providers found = product_providers(isa);
  std::erase_if(found, [&](const auto& provider) { return !provider->takes(call); });
  return found;
}

std::string run_product(const Providers& providers, const ProductCall& call) {
  for (const auto& provider : providers) {
    if (provider->run(call)) return provider->name();
  }
  fail(INGOT_UNSUPPORTED, "matrix product of dtype {}: no provider takes it",
       static_cast<int>(call.dtype));
}

}  // namespace ingot::cpu
