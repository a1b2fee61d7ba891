// One thread's share of a product: a rectangle of c, 256 columns at a time through all of k.
#pragma once

#include "cpu/product/amx/blocking.h"
#include "cpu/product/amx/operands.h"

namespace ingot::cpu::amx {

// What a run did, for tests and benchmarks: pairs of panels by scheme, rows and columns recomputed.
struct Counts {
  int64_t pairs[2] = {0, 0};
  int64_t rows = 0, columns = 0;
};

struct Problem {
  const Engine& engine;
  Scheme scheme;  // f3: where the guards allow it
  Operand left, right;
  const PackedRight* packed_right;  // or nullptr
  float* c;
  int64_t ldc;
};

class Rectangle {
 public:
  // strip: panels of the left operand packed in `packed_left`, [block][panel of the strip].
  // nonfinite: one for each row of the right operand, set to 1 where it is met.
  Rectangle(const Problem& problem, const PanelStore& packed_left, Range strip,
            unsigned char* nonfinite);
  // Panels of left and right operands.
  void run(Range rows, Range columns);
  const Counts& counts() const { return counts_; }

 private:
  struct Memory;
  static Memory& thread_memory();

  void run_slab(Range rows, Range columns, int64_t block);
  void prepare_right(Range rows, Range columns, int64_t block);
  PackedPanel right_panel(int64_t index, Scheme scheme, int64_t panel, int64_t block);
  PackedPanel left_panel(Scheme scheme, int64_t panel, int64_t block);
  PackedPanel packed_left(int64_t panel, int64_t block) const;
  Ahead source_ahead(Range rows, Range columns, int64_t block) const;
  void note_nonfinite(int64_t panel, uint32_t rows);
  void finish() { problem_.engine.finish(&pending_); }

  const Problem& problem_;
  const PanelStore& left_;
  Range strip_, columns_{0, 0};
  unsigned char* nonfinite_;
  Memory& memory_;
  float* partial_ = nullptr;  // sums of the slab's columns, in blocks of 32×32
  float* sums_ = nullptr;     // two such blocks, used in turn
  Update pending_;
  Counts counts_;
  int flip_ = 0;
};

}  // namespace ingot::cpu::amx
