#include "program/program.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

namespace ingot {
namespace {

constexpr std::string_view kStepNames[] = {"pack",  "product", "library_product",
                                           "sweep", "merge",   "copy"};
constexpr uintptr_t kLowBits = 15;

}  // namespace

std::string_view name_of(StepKind kind) {
  return kStepNames[static_cast<size_t>(kind)];
}

std::byte* CallMemory::at(const Address& address) const {
  switch (address.base) {
    case Address::Base::tensor:
      return static_cast<std::byte*>(tensors[static_cast<size_t>(address.tensor)].data) +
             address.offset;
    case Address::Base::workspace:
      return workspace + address.offset;
    case Address::Base::frozen:
      return frozen + address.offset;
    case Address::Base::none:
      break;
  }
  return nullptr;
}

int Places::tensor_of(ValueId value) const {
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  switch (placement.kind) {
    case Placement::Kind::leaf:
      return placement.index;
    case Placement::Kind::result:
      return static_cast<int>(leaf_count) + placement.index;
    case Placement::Kind::update: {
      const ValueId buffer = plan.graph.updates[static_cast<size_t>(placement.index)].buffer;
      return plan.placements[static_cast<size_t>(buffer)].index;
    }
    case Placement::Kind::workspace:
    case Placement::Kind::none:
      break;
  }
  return -1;
}

BoundTensor Places::bind(ValueId value, const Shape& seen) const {
  if (const int index = tensor_of(value); index >= 0) {
    return bind_tensor(index, plan.graph[value].shape, seen);
  }
  const Placement& placement = plan.placements[static_cast<size_t>(value)];
  if (placement.kind != Placement::Kind::workspace) {
    throw std::logic_error("a sweep reads a value that is nowhere");
  }
  return {place_of(static_cast<size_t>(placement.index)), dense_strides(seen)};
}

Address Places::place_of(size_t buffer) const {
  if (!hosts.empty() && hosts[buffer] >= 0) {
    return {Address::Base::tensor, static_cast<int>(leaf_count) + hosts[buffer], 0};
  }
  return {Address::Base::workspace, 0, buffer_offsets[buffer]};
}

BoundTensor Places::bind_tensor(int index, const Shape& own, const Shape& seen) const {
  const ingot_tensor& tensor = tensors[static_cast<size_t>(index)];
  const Address address = {Address::Base::tensor, index, 0};
  if (is_dense(tensor)) return {address, dense_strides(seen)};
  std::array<int64_t, kAxes> strides{};
  std::copy(std::begin(tensor.strides), std::end(tensor.strides), strides.begin());
  return {address, strides_in(own, strides, seen)};
}

unsigned Places::low_bits(const Address& address) const {
  uintptr_t bits = address.offset;
  if (address.base == Address::Base::tensor) {
    bits += reinterpret_cast<uintptr_t>(tensors[static_cast<size_t>(address.tensor)].data);
  }
  return static_cast<unsigned>(bits & kLowBits);
}

int Places::alignment_of(const Address& address) const {
  const unsigned bits = low_bits(address) | (kLowBits + 1);
  return static_cast<int>(bits & (~bits + 1));
}

bool is_dense(const ingot_tensor& tensor) {
  int64_t expected = 1;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    if (tensor.sizes[axis] == 1) continue;
    if (tensor.strides[axis] != expected) return false;
    expected *= tensor.sizes[axis];
  }
  return true;
}

std::vector<ingot_tensor> dense_tensors(const Graph& graph, int64_t batch) {
  std::vector<ingot_tensor> tensors;
  const auto add = [&](ValueId value) {
    const Shape& shape = graph[value].shape;
    ingot_tensor tensor{};
    for (int axis = 0; axis < kAxes; ++axis) {
      tensor.sizes[axis] = shape.extent(static_cast<Axis>(axis), batch);
      tensor.strides[axis] = dense_strides(shape)[static_cast<size_t>(axis)];
    }
    tensor.dtype = static_cast<int32_t>(graph[value].dtype);
    tensors.push_back(tensor);
  };
  for (const ValueId leaf : graph.leaves()) add(leaf);
  for (const Result& result : graph.results) add(result.value);
  return tensors;
}

std::string called(const Graph& graph, ValueId value) {
  const std::string& name = graph[value].name;
  return name.empty() ? fmt::format("%{}", value) : fmt::format("%{} ({})", value, name);
}

void add_plan_buffers(const Places& places, int sweep, size_t step, std::vector<Buffer>& buffers) {
  const Plan& plan = places.plan;
  for (size_t value = 0; value < plan.placements.size(); ++value) {
    const Placement& placement = plan.placements[value];
    if (placement.kind != Placement::Kind::workspace) continue;
    const auto index = static_cast<size_t>(placement.index);
    const WorkspaceBuffer& buffer = plan.buffers[index];
    const Address address = places.place_of(index);
    if (buffer.first_sweep != sweep || address.offset == Plan::kNowhere) continue;
    const auto elements = static_cast<size_t>(buffer.shape.elements(places.batch));
    buffers.push_back({called(plan.graph, static_cast<ValueId>(value)), address,
                       elements * size_of(buffer.dtype), step});
  }
}

std::string text_of(const Address& address) {
  return fmt::format("{}:{}+{} ", static_cast<int>(address.base), address.tensor, address.offset);
}

std::string hash_of_text(std::string_view text) {
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

Describer::Describer(const Graph& graph, const std::vector<Buffer>& buffers) : buffers_(buffers) {
  for (const ValueId leaf : graph.leaves()) tensors_.push_back(graph[leaf].name);
  for (const Result& result : graph.results) tensors_.push_back(result.name);
}

std::string Describer::place(const Address& address, size_t step) const {
  if (address.base == Address::Base::tensor) return tensors_[static_cast<size_t>(address.tensor)];
  const Buffer* found = nullptr;
  for (const Buffer& buffer : buffers_) {
    if (buffer.address == address && buffer.first_step <= step) found = &buffer;
  }
  if (found != nullptr) return found->name;
  const char* base = address.base == Address::Base::frozen ? "frozen weights" : "workspace";
  return fmt::format("{} + {}", base, address.offset);
}

nlohmann::json Describer::memory(std::span<const Address> addresses, size_t step) const {
  nlohmann::json places = nlohmann::json::array();
  for (const Address& address : addresses) {
    if (address.base == Address::Base::none) continue;
    const std::string name = place(address, step);
    if (std::find(places.begin(), places.end(), name) == places.end()) places.push_back(name);
  }
  return places;
}

nlohmann::json Describer::buffers() const {
  nlohmann::json list = nlohmann::json::array();
  for (const Buffer& buffer : buffers_) {
    const bool frozen = buffer.address.base == Address::Base::frozen;
    std::string in = frozen ? "frozen" : "workspace";
    if (buffer.address.base == Address::Base::tensor) in = place(buffer.address, 0);
    list.push_back({{"name", buffer.name},
                    {"in", in},
                    {"offset", buffer.address.offset},
                    {"bytes", buffer.bytes}});
  }
  return list;
}

}  // namespace ingot
