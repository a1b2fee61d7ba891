// What the programs of all backends have in common: kinds of steps, the memory of a call and where
// a plan's values are in it, and how people are told of them.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/ingot.h"
#include "plan/plan.h"

namespace ingot {

enum class StepKind : uint8_t {
  pack,             // an operand into the form that a product reads
  product,          // and what is done to its elements before they leave registers or cache
  library_product,  // cuBLASLt's
  sweep,            // a generated kernel, or a phase on tiles
  merge,            // partial states, and what follows once they are whole
  copy              // into memory that lies as what follows reads it, or as the caller wants it
};
std::string_view name_of(StepKind kind);

// A place in the memory of a call.
struct Address {
  enum class Base : uint8_t { none, tensor, workspace, frozen } base = Base::none;
  int tensor = 0;     // among the call's: leaves, then results
  size_t offset = 0;  // bytes

  Address operator+(size_t bytes) const { return {base, tensor, offset + bytes}; }
  friend bool operator==(const Address&, const Address&) = default;
};

// A tensor as a sweep walks it, with its address still to be filled in.
struct BoundTensor {
  Address address;
  std::array<int64_t, kAxes> strides{};
};

// Memory that steps hand on to one another, for people. Earlier steps may have had something else
// there.
struct Buffer {
  std::string name;
  Address address;
  size_t bytes = 0;
  size_t first_step = 0;
};

// Where a program's addresses are, for one call.
struct CallMemory {
  std::span<const ingot_tensor> tensors;
  std::byte* workspace = nullptr;
  std::byte* frozen = nullptr;

  std::byte* at(const Address& address) const;
};

// Where a plan's values are in the memory of a call with tensors laid out like these.
struct Places {
  const Plan& plan;
  int64_t batch;
  std::span<const ingot_tensor> tensors;  // leaves, then results
  size_t leaf_count;
  const std::vector<size_t>& buffer_offsets;
  std::span<const int> hosts{};  // by buffer the result in whose memory it lies, or -1; none

  // Of a plan's buffer, in the workspace or in a result.
  Address place_of(size_t buffer) const;

  // The caller's tensor that holds a leaf, result or update; -1 for workspace buffers.
  int tensor_of(ValueId value) const;
  // Where a value is and how a sweep that sees it as `seen` walks it.
  BoundTensor bind(ValueId value, const Shape& seen) const;
  // The same of a tensor of the caller's that has the axes of `own`.
  BoundTensor bind_tensor(int index, const Shape& own, const Shape& seen) const;
  // Of an address: what it is modulo 16, and the largest power of two ≤ 16 that divides it.
  unsigned low_bits(const Address& address) const;
  int alignment_of(const Address& address) const;
};

// Whether elements lie without gaps in the order of the axes.
bool is_dense(const ingot_tensor& tensor);
// A call's tensors as they usually are; without addresses.
std::vector<ingot_tensor> dense_tensors(const Graph& graph, int64_t batch);

// "%7 (bn)".
std::string called(const Graph& graph, ValueId value);
// Adds those of the plan's buffers that a sweep, lowered from step `step` on, is the first to
// write.
void add_plan_buffers(const Places& places, int sweep, size_t step, std::vector<Buffer>& buffers);

// Text of all that a program launches, hashed: 16 hexadecimal digits.
std::string text_of(const Address& address);
std::string hash_of_text(std::string_view text);

// Programs told to people.
class Describer {
 public:
  Describer(const Graph& graph, const std::vector<Buffer>& buffers);
  // Names of the places that step number `step` reads and writes, each once.
  nlohmann::json memory(std::span<const Address> addresses, size_t step) const;
  nlohmann::json buffers() const;

 private:
  std::string place(const Address& address, size_t step) const;

  const std::vector<Buffer>& buffers_;
  std::vector<std::string> tensors_;  // names of leaves, then of results
};

}  // namespace ingot
