// The product on AMX tiles: fp32 in and out at fp32's accuracy, from fp16 or bf16 slices
// (engine.h).
//
// The left operand is packed a strip at a time by all threads, the right one slab by slab into the
// cache of the thread that uses it; every block of 256 of k starts from zeroed tiles and is added
// to fp32 partial sums; c is written once. Every 32×32 block of c is computed in one order,
// whatever the threads, the strips, and whether the right operand was packed before: so are its
// bits.
//
// Guards: a row's block (256 of k) whose small elements fp16 slices would lose sends its panel to
// bf16 slices; rows and columns with an Inf or a NaN are recomputed in fp32 arithmetic, and where
// there are many, the product is left to the next provider.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/product/amx/rectangle.h"
#include "cpu/product/amx/support.h"
#include "cpu/product/provider.h"

namespace ingot::cpu::amx {

class Product final : public ProductProvider {
 public:
  // scheme: f3 needs an engine that runs TDPFP16PS. takes_all: every fp32 product, not only those
  // where it is the faster one.
  Product(std::string name, const Engine& engine, Scheme scheme, const Isa& isa, bool takes_all);

  std::string name() const override { return name_; }
  bool takes(const ProductCall& call) const override;
  bool splits() const override { return true; }
  bool run(const ProductCall& call) const override { return run_counted(call, nullptr); }
  size_t packed_bytes(const ProductCall& call) const override;
  void pack(const ProductCall& call, std::byte* memory) const override;

  bool run_counted(const ProductCall& call, Counts* counts) const;

 private:
  PackedHeader header(const ProductCall& call) const;
  std::string name_;
  const Engine& engine_;
  Scheme scheme_;
  Isa isa_;
  bool takes_all_;
};

// How INGOT_CPU_PRODUCT may be set: "auto" (or nothing), "no-amx", "amx-fp16", "amx-bf16", and for
// tests "amx-fp16-emulated", "amx-bf16-emulated". Anything else is an error that says so, and so is
// what this machine cannot do.
enum class Choice { automatic, none, fp16, bf16, fp16_emulated, bf16_emulated };
Choice parse_choice(const std::string& text);
Choice choice_of_environment();  // read once
// Whether products run on AMX: for doctor.
std::string use_of(const Support& usable, Choice choice);

// nullptr where AMX is not used. By Choice::automatic a product that the caller is to measure first
// (product/measured.h).
std::shared_ptr<const ProductProvider> amx_product(const Isa& isa, Choice choice);

}  // namespace ingot::cpu::amx
