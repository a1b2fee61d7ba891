#include "cpu/product/amx/operands.h"

#include <cstring>

#include "support/threads.h"

namespace ingot::cpu::amx {

Operand left_of(const ProductCall& call) {
  return {static_cast<const float*>(call.a), call.lda, call.m, call.k, call.transpose_a, false};
}

Operand right_of(const ProductCall& call) {
  return {static_cast<const float*>(call.b), call.ldb, call.n, call.k, !call.transpose_b, true};
}

size_t PanelStore::bytes(int64_t slots) {
  return static_cast<size_t>(slots) * (kPanelBytes[1] + kPanelRows * sizeof(float));
}

void PanelStore::place(std::byte* memory, int64_t slots) {
  const auto count = static_cast<size_t>(slots);
  tiles_ = memory;
  exponents_ = reinterpret_cast<float*>(memory + count * kPanelBytes[1]);
  if (schemes_.size() < count) schemes_.resize(count);
}

PanelReport PanelStore::pack(const Engine& engine, Scheme wanted, const PanelSource& source,
                             int64_t slot) {
  const PanelReport report =
      engine.pack(wanted, source, tiles_ + slot * kPanelBytes[1], exponents_ + slot * kPanelRows);
  schemes_[static_cast<size_t>(slot)] = report.scheme;
  return report;
}

PackedRight::PackedRight(const Engine& engine, Scheme wanted, const Operand& right)
    : engine_(engine),
      wanted_(wanted),
      right_(right),
      memory_(static_cast<size_t>(right.panels())),
      panels_(static_cast<size_t>(right.panels() * right.blocks())) {
  std::vector<uint32_t> nonfinite(memory_.size());
  parallel_for(right.panels(), [&](int64_t panel, int) {
    static thread_local PanelStore scratch;
    const int64_t blocks = right.blocks();
    scratch.reserve(blocks);
    size_t bytes = static_cast<size_t>(blocks) * kPanelRows * sizeof(float);
    for (int64_t block = 0; block < blocks; ++block) {
      const PanelReport report = scratch.pack(engine, wanted, right.source(panel, block), block);
      nonfinite[static_cast<size_t>(panel)] |= report.nonfinite;
      bytes += static_cast<size_t>(kPanelBytes[static_cast<int>(report.scheme)]);
    }
    std::byte* at = memory_[static_cast<size_t>(panel)].reserve(bytes);
    for (int64_t block = 0; block < blocks; ++block) {
      PackedPanel packed = scratch[block];
      const auto tile_bytes = static_cast<size_t>(kPanelBytes[static_cast<int>(packed.scheme)]);
      constexpr size_t kExponentBytes = kPanelRows * sizeof(float);
      std::memcpy(at, packed.tiles, tile_bytes);
      std::memcpy(at + tile_bytes, packed.exponents, kExponentBytes);
      packed.tiles = at;
      packed.exponents = reinterpret_cast<const float*>(at + tile_bytes);
      panels_[static_cast<size_t>(block * right.panels() + panel)] = packed;
      at += tile_bytes + kExponentBytes;
    }
  });
  for (size_t panel = 0; panel < nonfinite.size(); ++panel) {
    for (int i = 0; i < kPanelRows; ++i) {
      if ((nonfinite[panel] >> i & 1u) != 0) {
        nonfinite_.push_back(static_cast<int64_t>(panel) * kPanelRows + i);
      }
    }
  }
}

size_t PackedRight::bytes() const {
  size_t sum = 0;
  for (const Buffer& memory : memory_) sum += memory.size();
  return sum;
}

bool PackedRight::serves(const Engine& engine, Scheme wanted, const Operand& right) const {
  return &engine_ == &engine && wanted_ == wanted && right_.data == right.data &&
         right_.ld == right.ld && right_.rows == right.rows && right_.depth == right.depth &&
         right_.across == right.across;
}

}  // namespace ingot::cpu::amx
