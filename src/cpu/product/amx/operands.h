// The two operands of a product as packing sees them, panel by panel, and a right operand packed
// beforehand.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/product/amx/engine.h"
#include "cpu/product/buffers.h"
#include "cpu/product/packed.h"

namespace ingot::cpu::amx {

// Element (row, k) is data[row · ld + k], or data[k · ld + row] where across.
struct Operand {
  const float* data = nullptr;
  int64_t ld = 0;
  int64_t rows = 0, depth = 0;
  bool across = false, right = false;

  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
  int64_t blocks() const { return (depth + kBlockK - 1) / kBlockK; }
  int panel_rows(int64_t panel) const {
    return static_cast<int>(std::min<int64_t>(kPanelRows, rows - panel * kPanelRows));
  }
  int block_depth(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlockK, depth - block * kBlockK));
  }
  PanelSource source(int64_t panel, int64_t block) const {
    const int64_t row = panel * kPanelRows, k = block * kBlockK;
    return {data + (across ? k * ld + row : row * ld + k),
            ld,
            panel_rows(panel),
            block_depth(block),
            across,
            right};
  }
};

Operand left_of(const ProductCall& call);
Operand right_of(const ProductCall& call);

// One panel's block, packed.
struct PackedPanel {
  const std::byte* tiles = nullptr;
  const float* exponents = nullptr;
  Scheme scheme = Scheme::b6;
};

// Room for packed panels by number, each for either scheme.
class PanelStore {
 public:
  static size_t bytes(int64_t slots);
  void reserve(int64_t slots) { place(memory_.reserve(bytes(slots)), slots); }
  // In somebody else's memory, 64-byte aligned.
  void place(std::byte* memory, int64_t slots);
  // Packs into a slot; other slots may be packed at the same time by other threads.
  PanelReport pack(const Engine& engine, Scheme wanted, const PanelSource& source, int64_t slot);
  PackedPanel operator[](int64_t slot) const {
    return {tiles_ + slot * kPanelBytes[1], exponents_ + slot * kPanelRows,
            schemes_[static_cast<size_t>(slot)]};
  }
  void release_above(size_t bytes) { memory_.release_above(bytes); }

 private:
  Buffer memory_;
  std::byte* tiles_ = nullptr;
  float* exponents_ = nullptr;
  std::vector<Scheme> schemes_;
};

// A whole right operand, in somebody else's memory, 64-byte aligned.
class PackedRight {
 public:
  static size_t bytes(const Operand& right);
  static void pack(const Engine& engine, Scheme wanted, const Operand& right, std::byte* memory);
  PackedRight(const Operand& right, const std::byte* memory);
  PackedPanel panel(int64_t panel, int64_t block) const;
  std::vector<int64_t> nonfinite_rows() const;

 private:
  int64_t panels_, blocks_;
  const std::byte* tiles_;
  const float* exponents_;
  const Scheme* schemes_;           // as the slots of tiles_, a panel's blocks one after the other
  const unsigned char* nonfinite_;  // by row
};

}  // namespace ingot::cpu::amx
