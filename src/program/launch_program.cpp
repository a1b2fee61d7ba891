#include "program/launch_program.h"

#include <xxhash.h>

#include <algorithm>

#include "support/align.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr std::string_view kNames[] = {"pack",  "product", "library_product",
                                       "sweep", "merge",   "copy"};

// All that a launch follows from, as text: a struct's padding is nobody's business.
std::string text_of(const Address& address) {
  return fmt::format("{}:{}+{} ", static_cast<int>(address.base), address.tensor, address.offset);
}

std::string text_of(const Arguments& arguments) {
  std::string text;
  for (const std::byte byte : arguments.bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  }
  for (const Arguments::Slot& slot : arguments.addresses) {
    text += fmt::format(" {}=", slot.at) + text_of(slot.address);
  }
  for (const Arguments::MapSlot& map : arguments.maps) {
    text += fmt::format(" map {}={} {} {} {} {} {} {}", map.at, text_of(map.matrix),
                        static_cast<int>(map.spec.element), map.spec.columns, map.spec.rows,
                        map.spec.row_bytes, map.spec.box_columns, map.spec.box_rows);
    if (map.spec.eights) text += " in eights";
    if (map.spec.entries > 0) {
      text += fmt::format(" {} entries {}", map.spec.entries, map.spec.entry_bytes);
    }
  }
  return text;
}

std::string text_of(const LibraryProduct& p) {
  const auto operand = [](const LibraryProduct::Operand& o) {
    return fmt::format(" {} {} {} {}", o.row_stride, o.k_stride, o.batch_stride, o.alignment);
  };
  return fmt::format("{} {} {} {}{}{} {} {} {} {} {} {}", p.batches, p.m, p.n, p.k, operand(p.x),
                     operand(p.w), p.y_stride, p.y_batch_stride, p.y_alignment, name_of(p.operands),
                     name_of(p.result), p.tf32);
}

std::string text_of(const Step& step) {
  return fmt::format("{} {} {:016x} {} {} {} {} {} | {} | {}\n", name_of(step.kind), step.kernel,
                     step.text, step.function, step.blocks, step.threads, step.shared_bytes,
                     step.cluster, text_of(step.arguments), text_of(step.product));
}

class Describer {
 public:
  Describer(const LaunchProgram& program, const std::vector<std::string>& tensors)
      : program_(program), tensors_(tensors) {}

  std::string place(const Address& address) const {
    if (address.base == Address::Base::tensor) {
      return tensors_[static_cast<size_t>(address.tensor)];
    }
    for (const Buffer& buffer : program_.buffers) {
      if (buffer.address == address) return buffer.name;
    }
    const char* base = address.base == Address::Base::frozen ? "frozen weights" : "workspace";
    return fmt::format("{} + {}", base, address.offset);
  }

  nlohmann::json memory(const Step& step) const {
    nlohmann::json places = nlohmann::json::array();
    const auto add = [&](const Address& address) {
      const std::string name = place(address);
      if (std::find(places.begin(), places.end(), name) == places.end()) places.push_back(name);
    };
    for (const Arguments::MapSlot& map : step.arguments.maps) add(map.matrix);
    for (const Arguments::Slot& slot : step.arguments.addresses) add(slot.address);
    return places;
  }

 private:
  const LaunchProgram& program_;
  const std::vector<std::string>& tensors_;
};

}  // namespace

std::string_view name_of(StepKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

size_t Arguments::add_zeros(size_t count) {
  const size_t start = align_up(bytes.size(), kAlignment);
  if (start + count > kMostBytes || starts.size() == kMost) {
    throw std::logic_error("a kernel with more arguments than a launch can have");
  }
  bytes.resize(start + count);
  starts.push_back(start);
  return start;
}

void Arguments::add_address(const Address& address) {
  set(add_zeros(sizeof(void*)), address);
}

void Arguments::add_tensors(std::span<const BoundTensor> tensors) {
  constexpr size_t kTensorBytes = sizeof(void*) + kAxes * sizeof(int64_t);
  // Where there are none, a kernel takes one that it does not look at.
  const size_t start = add_zeros(std::max<size_t>(1, tensors.size()) * kTensorBytes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t at = start + i * kTensorBytes;
    set(at, tensors[i].address);
    std::memcpy(bytes.data() + at + sizeof(void*), tensors[i].strides.data(),
                kAxes * sizeof(int64_t));
  }
}

void Arguments::add_map(const hopper::TensorMapSpec& spec, const Address& matrix) {
  constexpr size_t kMapBytes = 128;
  maps.push_back({add_zeros(kMapBytes), matrix, spec});
}

void Arguments::set(size_t at, const Address& address) {
  if (address.base != Address::Base::none) addresses.push_back({at, address});
}

std::string hash_of(const LaunchProgram& program) {
  std::string text;
  for (const Step& step : program.steps) text += text_of(step);
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

nlohmann::json describe(const LaunchProgram& program, const Plan& plan,
                        const std::vector<std::string>& tensors) {
  const Describer describer(program, tensors);
  nlohmann::json steps = nlohmann::json::array(), buffers = nlohmann::json::array();
  for (const Step& step : program.steps) {
    nlohmann::json json = {{"kind", name_of(step.kind)},
                           {"sweep", plan.sweeps[static_cast<size_t>(step.sweep)].name},
                           {"memory", describer.memory(step)}};
    if (step.kind == StepKind::library_product) {
      json["m"] = step.product.m;
      json["n"] = step.product.n;
      json["k"] = step.product.k;
      json["batches"] = step.product.batches;
    } else {
      json["kernel"] = step.kernel;
      json["blocks"] = step.blocks;
      json["threads"] = step.threads;
      json["shared_bytes"] = step.shared_bytes;
      json["cluster"] = std::max(1u, step.cluster);
    }
    steps.push_back(std::move(json));
  }
  for (const Buffer& buffer : program.buffers) {
    const bool frozen = buffer.address.base == Address::Base::frozen;
    buffers.push_back({{"name", buffer.name},
                       {"in", frozen ? "frozen" : "workspace"},
                       {"offset", buffer.address.offset},
                       {"bytes", buffer.bytes}});
  }
  return {{"hash", hash_of(program)}, {"steps", steps}, {"buffers", buffers}};
}

}  // namespace ingot
