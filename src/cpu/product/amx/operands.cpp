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

size_t PackedRight::bytes(const Operand& right) {
  const int64_t slots = right.panels() * right.blocks();
  return PanelStore::bytes(slots) + static_cast<size_t>(slots) * sizeof(Scheme) +
         static_cast<size_t>(right.panels() * kPanelRows);
}

PackedRight::PackedRight(const Operand& right, const std::byte* memory)
    : panels_(right.panels()), blocks_(right.blocks()), tiles_(memory) {
  const int64_t slots = panels_ * blocks_;
  exponents_ = reinterpret_cast<const float*>(memory + slots * kPanelBytes[1]);
  schemes_ = reinterpret_cast<const Scheme*>(memory + PanelStore::bytes(slots));
  nonfinite_ = reinterpret_cast<const unsigned char*>(schemes_ + slots);
}

void PackedRight::pack(const Engine& engine, Scheme wanted, const Operand& right,
                       std::byte* memory) {
  const PackedRight packed(right, memory);
  const int64_t blocks = right.blocks();
  PanelStore store;
  store.place(memory, right.panels() * blocks);
  parallel_for(right.panels(), [&](int64_t panel, int) {
    uint32_t nonfinite = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t slot = panel * blocks + block;
      const PanelReport report = store.pack(engine, wanted, right.source(panel, block), slot);
      const_cast<Scheme*>(packed.schemes_)[slot] = report.scheme;
      nonfinite |= report.nonfinite;
    }
    auto* const rows = const_cast<unsigned char*>(packed.nonfinite_) + panel * kPanelRows;
    for (int i = 0; i < kPanelRows; ++i) rows[i] = static_cast<unsigned char>(nonfinite >> i & 1u);
  });
}

PackedPanel PackedRight::panel(int64_t panel, int64_t block) const {
  const int64_t slot = panel * blocks_ + block;
  return {tiles_ + slot * kPanelBytes[1], exponents_ + slot * kPanelRows, schemes_[slot]};
}

std::vector<int64_t> PackedRight::nonfinite_rows() const {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < panels_ * kPanelRows; ++i) {
    if (nonfinite_[i] != 0) rows.push_back(i);
  }
  return rows;
}

}  // namespace ingot::cpu::amx
