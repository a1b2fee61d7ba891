#include "program/launch_program.h"

#include <algorithm>

#include "support/align.h"
#include "support/error.h"

namespace ingot {
namespace {

std::string in_hexadecimal(const std::vector<std::byte>& bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

// All that a launch follows from, as text: a struct's padding is nobody's business.
std::string text_of(const Arguments& arguments) {
  std::string text = in_hexadecimal(arguments.bytes);
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
  return fmt::format("{} {} {} {}{}{} {} {} {} {} {} {}{}", p.batches, p.m, p.n, p.k, operand(p.x),
                     operand(p.w), p.y_stride, p.y_batch_stride, p.y_alignment, name_of(p.operands),
                     name_of(p.result), p.tf32, p.bias ? " bias" : "");
}

std::string text_of(const Step& step) {
  return fmt::format("{} {} {:016x} {} {} {} {} {} | {} | {}\n", name_of(step.kind), step.kernel,
                     step.text, step.function, step.blocks, step.threads, step.shared_bytes,
                     step.cluster, text_of(step.arguments), text_of(step.product));
}

}  // namespace

std::vector<Address> addresses_of(const Step& step) {
  std::vector<Address> addresses;
  for (const Arguments::MapSlot& map : step.arguments.maps) addresses.push_back(map.matrix);
  for (const Arguments::Slot& slot : step.arguments.addresses) addresses.push_back(slot.address);
  return addresses;
}

std::vector<bool> unused_buffers(const LaunchProgram& program, const Plan& plan, int64_t batch,
                                 const std::vector<size_t>& offsets) {
  std::vector<bool> unused(plan.buffers.size(), true);
  for (const Step& step : program.steps) {
    for (const Address& address : addresses_of(step)) {
      if (address.base != Address::Base::workspace) continue;
      for (size_t i = 0; i < unused.size(); ++i) {
        const WorkspaceBuffer& buffer = plan.buffers[i];
        // Those alive at the same time lie apart; a sweep may be lowered with its neighbour.
        if (step.sweep + 1 < buffer.first_sweep || buffer.last_sweep < step.sweep - 1) continue;
        const auto elements = static_cast<size_t>(buffer.shape.elements(batch));
        const size_t end = offsets[i] + elements * size_of(buffer.dtype);
        if (offsets[i] <= address.offset && address.offset < end) unused[i] = false;
      }
    }
  }
  return unused;
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
  return hash_of_text(text);
}

namespace {

// slots: [where an address belongs, its base, tensor, offset].
nlohmann::json arguments_of(const Step& step) {
  nlohmann::json slots = nlohmann::json::array();
  for (const Arguments::Slot& slot : step.arguments.addresses) {
    const Address& address = slot.address;
    slots.push_back({slot.at, static_cast<int>(address.base), address.tensor, address.offset});
  }
  return {{"bytes", in_hexadecimal(step.arguments.bytes)},
          {"starts", step.arguments.starts},
          {"slots", slots},
          {"tensor_maps", step.arguments.maps.size()}};
}

nlohmann::json strides_of(const LibraryProduct& product) {
  const auto of = [](const LibraryProduct::Operand& operand) {
    return nlohmann::json{operand.batch_stride, operand.row_stride, operand.k_stride};
  };
  return {{"x", of(product.x)},
          {"w", of(product.w)},
          {"y", {product.y_batch_stride, product.y_stride, 1}}};
}

}  // namespace

nlohmann::json describe(const LaunchProgram& program, const Plan& plan, bool arguments) {
  const Describer describer(plan.graph, program.buffers);
  nlohmann::json steps = nlohmann::json::array();
  for (const Step& step : program.steps) {
    nlohmann::json json = {{"kind", name_of(step.kind)},
                           {"sweep", plan.sweeps[static_cast<size_t>(step.sweep)].name},
                           {"memory", describer.memory(addresses_of(step), steps.size())}};
    if (step.kind == StepKind::library_product) {
      json["m"] = step.product.m;
      json["n"] = step.product.n;
      json["k"] = step.product.k;
      json["batches"] = step.product.batches;
      json["bias"] = step.product.bias;
    } else {
      json["kernel"] = step.kernel;
      json["blocks"] = step.blocks;
      json["threads"] = step.threads;
      json["shared_bytes"] = step.shared_bytes;
      json["cluster"] = std::max(1u, step.cluster);
      json["beside"] = step.turn == Turn::beside;
    }
    if (arguments) {
      json["arguments"] = arguments_of(step);
      if (step.kind == StepKind::library_product) {
        json["strides"] = strides_of(step.product);
        json["operands"] = name_of(step.product.operands);
        json["result"] = name_of(step.product.result);
      }
    }
    steps.push_back(std::move(json));
  }
  return {{"hash", hash_of(program)}, {"steps", steps}, {"buffers", describer.buffers()}};
}

}  // namespace ingot
