// What a call asks of a GPU, as data: kernels and library products in order, over the caller's
// tensors, its workspace and frozen weights. It is made of a plan without a GPU, and is the same
// for all calls whose tensors are laid out alike; a launcher fills in the addresses.
#pragma once

#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "product/hopper/launch.h"
#include "program/program.h"

namespace ingot {

// The arguments of a kernel behind one another, each from a multiple of kAlignment on, and where in
// them addresses and tensor maps belong.
struct Arguments {
  static constexpr size_t kAlignment = 64, kMostBytes = 8192, kMost = 8;
  struct Slot {
    size_t at = 0;
    Address address;
  };
  struct MapSlot {
    size_t at = 0;
    Address matrix;
    hopper::TensorMapSpec spec;
  };

  std::vector<std::byte> bytes;
  std::vector<size_t> starts;
  std::vector<Slot> addresses;
  std::vector<MapSlot> maps;

  // Gives where it starts.
  template <class T>
  size_t add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t start = add_zeros(sizeof(T));
    std::memcpy(bytes.data() + start, &value, sizeof(T));
    return start;
  }
  size_t add_zeros(size_t count);
  void add_address(const Address& address);
  void add_tensors(std::span<const BoundTensor> tensors);
  void add_map(const hopper::TensorMapSpec& spec, const Address& matrix);
  // Puts an address into an argument that was added.
  void set(size_t at, const Address& address);
};

// Row-major y[m, n] = Σ_k x[m, k] · w[n, k] (+ b[n]), `batches` times. An operand has stride 1
// along k or along its rows (m, n); the other stride is its leading dimension. Strides are in
// elements.
struct LibraryProduct {
  int64_t batches = 1, m = 0, n = 0, k = 0;
  struct Operand {
    int64_t row_stride = 0, k_stride = 1, batch_stride = 0;
    int alignment = 16;  // of its address, in bytes
    auto operator<=>(const Operand&) const = default;
  } x, w;
  int64_t y_stride = 0, y_batch_stride = 0;
  int y_alignment = 16;
  DType operands = DType::f32, result = DType::f32;
  bool tf32 = false;
  bool bias = false;  // b, dense and of the result's dtype
  auto operator<=>(const LibraryProduct&) const = default;
};

// When a kernel waits for its predecessors (dependent launches).
enum class Turn : uint8_t {
  ordinary,  // perhaps once it has let its successor start, which has to wait, too
  waits,     // before it lets its successor start, beside which it may run
  beside     // at its end: it runs beside a predecessor that waits first
};

struct Step {
  StepKind kind = StepKind::sweep;
  int sweep = 0;       // of the plan
  std::string kernel;  // its name; empty for a library's
  uint64_t text = 0;   // hash of the text that it is compiled from
  int unit = -1, function = 0;
  int64_t blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
  unsigned cluster = 0;  // blocks; 0: none
  Turn turn = Turn::ordinary;
  Arguments arguments;
  // library_product: addresses are x, w, y, the library's workspace and, of one with a bias, b.
  LibraryProduct product;
};

// What it is told of.
std::vector<Address> addresses_of(const Step& step);

struct LaunchProgram {
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  size_t workspace_bytes = 0;  // that the steps write, libraries' own scratch memory apart
};

// By buffer of the plan, which lie at these offsets: those that no step is told of.
std::vector<bool> unused_buffers(const LaunchProgram& program, const Plan& plan, int64_t batch,
                                 const std::vector<size_t>& offsets);

// 16 hexadecimal digits, the same for programs that launch the same.
std::string hash_of(const LaunchProgram& program);
// arguments: also what kernels and products are given, for tests that run them elsewhere.
nlohmann::json describe(const LaunchProgram& program, const Plan& plan, bool arguments = false);

}  // namespace ingot
