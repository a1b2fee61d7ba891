#include "cuda/launcher.h"

#include <algorithm>
#include <array>

namespace ingot::cuda {
namespace {

CUtensorMap encode_map(const hopper::TensorMapSpec& spec, void* base) {
  CUtensorMap map{};
  check(hopper::encode_map<CUtensorMap>(&map, driver().cuTensorMapEncodeTiled, spec, base),
        "describing a matrix to the copy engine");
  return map;
}

bool same_matrix(const hopper::TensorMapSpec& a, const hopper::TensorMapSpec& b) {
  return a.element == b.element && a.columns == b.columns && a.rows == b.rows &&
         a.row_bytes == b.row_bytes && a.box_columns == b.box_columns && a.box_rows == b.box_rows &&
         a.eights == b.eights && a.entries == b.entries && a.entry_bytes == b.entry_bytes;
}

// A map follows from its arguments alone, and calls in a row mostly describe the same matrices:
// each thread keeps those that it encoded last.
const CUtensorMap& map_of(const hopper::TensorMapSpec& spec, void* base) {
  struct Encoded {
    hopper::TensorMapSpec spec;
    void* base = nullptr;
    CUtensorMap map;
  };
  constexpr size_t kKept = 16;
  static thread_local std::array<Encoded, kKept> kept;
  const uint64_t mixed = (reinterpret_cast<uintptr_t>(base) >> 8) * 0x9e3779b97f4a7c15u;
  Encoded& encoded = kept[mixed >> 60];
  if (encoded.base != base || !same_matrix(encoded.spec, spec)) {
    encoded.base = nullptr;
    encoded.map = encode_map(spec, base);
    encoded.spec = spec;
    encoded.base = base;
  }
  return encoded.map;
}

void launch_kernel(const Step& step, CUfunction function, const CallMemory& memory, CUstream stream,
                   bool dependent) {
  const Arguments& arguments = step.arguments;
  alignas(Arguments::kAlignment) std::byte bytes[Arguments::kMostBytes];
  std::memcpy(bytes, arguments.bytes.data(), arguments.bytes.size());
  for (const Arguments::Slot& slot : arguments.addresses) {
    const std::byte* address = memory.at(slot.address);
    std::memcpy(bytes + slot.at, &address, sizeof(address));
  }
  for (const Arguments::MapSlot& map : arguments.maps) {
    std::memcpy(bytes + map.at, &map_of(map.spec, memory.at(map.matrix)), sizeof(CUtensorMap));
  }
  void* starts[Arguments::kMost];
  for (size_t i = 0; i < arguments.starts.size(); ++i) starts[i] = bytes + arguments.starts[i];

  const Grid grid = {step.blocks, step.threads, step.shared_bytes, step.cluster};
  LaunchAttribute attributes[2] = {};
  const unsigned count = fill_attributes(grid, dependent, attributes);
  const LaunchConfig config = {static_cast<unsigned>(grid.blocks),
                               1,
                               1,
                               static_cast<unsigned>(grid.threads),
                               1,
                               1,
                               static_cast<unsigned>(grid.shared_bytes),
                               stream,
                               attributes,
                               count};
  check(driver().cuLaunchKernelEx(&config, function, starts, nullptr), "launching a kernel");
}

// A library product's own.
const Address& workspace_of(const Step& step) {
  return step.arguments.addresses[3].address;
}

}  // namespace

std::vector<int> units_of(const LaunchProgram& program) {
  std::vector<int> units;
  for (const Step& step : program.steps) {
    if (step.unit >= 0) units.push_back(step.unit);
  }
  return units;
}

size_t needed_workspace(const LaunchProgram& program, Context& context) {
  size_t bytes = program.workspace_bytes;
  for (const Step& step : program.steps) {
    if (step.kind != StepKind::library_product) continue;
    const size_t own = context.cublas().workspace(step.product);
    if (own > 0) bytes = std::max(bytes, workspace_of(step).offset + own);
  }
  return bytes;
}

void launch(const LaunchProgram& program, Context& context, Modules& modules,
            const CallMemory& memory, CUstream stream, bool dependent) {
  for (const Step& step : program.steps) {
    if (step.kind == StepKind::library_product) {
      const auto address = [&](size_t i) { return memory.at(step.arguments.addresses[i].address); };
      context.cublas().run(step.product,
                           {address(0), address(1), address(2), address(3),
                            step.product.bias ? address(4) : nullptr},
                           stream);
      continue;
    }
    const LoadedUnit* loaded = modules.find(context, step.unit);
    if (loaded == nullptr) {
      modules.load(context, units_of(program));
      loaded = modules.find(context, step.unit);
    }
    launch_kernel(step, loaded->functions[static_cast<size_t>(step.function)], memory, stream,
                  dependent);
  }
}

}  // namespace ingot::cuda
