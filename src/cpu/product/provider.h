// Who computes a host matrix product. A provider is asked in order of preference whether it takes a
// call; the last one (our own portable product) takes everything.
//
// To add one: a class that implements ProductProvider, and a line in product_providers().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/product/ranges.h"
#include "ingot/ingot.h"

namespace ingot::cpu {

// What follows a product and can run on each of its blocks as soon as it is finished, in the thread
// that finished it, while it is in cache.
class BlockConsumer {
 public:
  virtual ~BlockConsumer() = default;
  // Blocks begin at multiples of these, and end there or where c does. They do not depend on who
  // computes the product.
  virtual int64_t rows() const = 0;
  virtual int64_t columns() const = 0;
  // Elements [rows, columns) of c, of the call's dtype; data: the first of them. Each element comes
  // once, in no fixed order; several threads call at once.
  virtual void consume(Range rows, Range columns, const void* data, int64_t ld) const = 0;
};

// c[m,n] = Σ_k a[m,k]·b[n,k] (transpose_b) or a[m,k]·b[k,n]; a is read as a[k,m] with transpose_a.
// Row-major, leading dimensions in elements. All three have `dtype` (f32, f64, f16, bf16); sums run
// in f32, or f64 for f64.
struct ProductCall {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t lda = 0;
  const void* b = nullptr;
  int64_t ldb = 0;
  bool transpose_b = false;
  void* c = nullptr;
  int64_t ldc = 0;
  ingot_dtype dtype = INGOT_F32;
  bool transpose_a = false;
  const std::byte* packed_b = nullptr;  // made by pack() (packed.h), or nullptr
  // Only for a provider that consumes() the call. With one, c may be nullptr: nothing is kept then.
  const BlockConsumer* consumer = nullptr;
  // n elements added to each row of c: of f32, rounded as they would be afterwards; of 16 bits,
  // before the product is rounded to them. Only for a provider that adds_row().
  const void* row = nullptr;
};

class ProductProvider {
 public:
  virtual ~ProductProvider() = default;
  virtual std::string name() const = 0;
  // False where it cannot, or where another is known to be faster.
  virtual bool takes(const ProductCall& call) const = 0;
  // False if it found that it cannot after all; the next provider is then asked.
  virtual bool run(const ProductCall& call) const = 0;
  // Whether fp32 products are made of products of fewer bits (docs/numerics.md has their bounds).
  virtual bool splits() const { return false; }
  // Whether run() would hand c's blocks to the call's consumer while they are in cache.
  virtual bool consumes(const ProductCall&) const { return false; }
  // Whether run() would add a row to the call's product.
  virtual bool adds_row(const ProductCall&) const { return false; }
  // b of this call packed once for many, in memory aligned to 64 bytes: how much of it, 0 where
  // that gains nothing. Results are the same bit by bit.
  virtual size_t packed_bytes(const ProductCall&) const { return 0; }
  virtual void pack(const ProductCall&, std::byte* /*memory*/) const {}
};

using Providers = std::vector<std::shared_ptr<const ProductProvider>>;

// In order of preference on a machine with these features. Cheap; holds what it returns alive.
Providers product_providers(const Isa& isa);
// Those of them that take the call. They change with registered_products() and, by what providers
// ask, with the number of threads and in a forked child.
Providers providers_of(const Isa& isa, const ProductCall& call);

// Whether fp32 products run on AMX, and why: for doctor. Measures where that was not done yet.
std::string use_of_amx(const Isa& isa);

// Runs a call that all of them take: the first that does not find that it cannot gives its name.
std::string run_product(const Providers& providers, const ProductCall& call);

// The host process's own product (ingot_set_host_product); fn == nullptr removes it.
void set_host_product(const std::string& name, ingot_product_fn fn, void* context);
// Another number whenever one was registered or removed.
uint64_t registered_products();

}  // namespace ingot::cpu
