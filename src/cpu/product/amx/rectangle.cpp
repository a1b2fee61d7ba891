#include "cpu/product/amx/rectangle.h"

#include <atomic>

namespace ingot::cpu::amx {
namespace {

constexpr int kPairFloats = kPanelRows * kPanelRows;

}  // namespace

struct Rectangle::Memory {
  Buffer working_set;  // slab, partial sums and sums together, on one large page
  PanelStore slab;     // right panels as the guards would have them
  PanelStore slab_b6;  // their b6 versions, where a left panel asks for one
  bool has_b6[kSlabColumns] = {};
  PanelStore left_b6;  // the left panel's, where a right one asks for it
  int64_t left_b6_panel = -1;
};

Rectangle::Memory& Rectangle::thread_memory() {
  static thread_local Memory memory;
  return memory;
}

Rectangle::Rectangle(const Problem& problem, const PanelStore& packed_left, Range strip,
                     unsigned char* nonfinite)
    : problem_(problem),
      left_(packed_left),
      strip_(strip),
      nonfinite_(nonfinite),
      memory_(thread_memory()) {}

void Rectangle::run(Range rows, Range columns) {
  if (rows.size() <= 0 || columns.size() <= 0) return;
  columns_ = columns;
  const size_t slab_bytes = PanelStore::bytes(kSlabColumns);
  const auto partial_floats = static_cast<size_t>(rows.size() * kSlabColumns * kPairFloats);
  std::byte* const memory =
      memory_.working_set.reserve(slab_bytes + (partial_floats + 2 * kPairFloats) * sizeof(float));
  memory_.slab.place(memory, kSlabColumns);
  partial_ = reinterpret_cast<float*>(memory + slab_bytes);
  sums_ = partial_ + partial_floats;
  memory_.slab_b6.reserve(kSlabColumns);
  memory_.left_b6.reserve(1);
  problem_.engine.begin();
  for (int64_t j = columns.begin; j < columns.end; j += kSlabColumns) {
    const Range slab{j, std::min(columns.end, j + kSlabColumns)};
    for (int64_t block = 0; block < problem_.left.blocks(); ++block) run_slab(rows, slab, block);
  }
  finish();
  problem_.engine.end();
}

void Rectangle::note_nonfinite(int64_t panel, uint32_t rows) {
  for (int i = 0; rows != 0; ++i, rows >>= 1) {
    if ((rows & 1u) == 0) continue;
    // Several threads may pack the same panel.
    std::atomic_ref(nonfinite_[panel * kPanelRows + i]).store(1, std::memory_order_relaxed);
  }
}

PackedPanel Rectangle::packed_left(int64_t panel, int64_t block) const {
  return left_[block * strip_.size() + panel - strip_.begin];
}

// The slab is packed when its columns are first needed, into L2 and no farther.
void Rectangle::prepare_right(Range rows, Range columns, int64_t block) {
  finish();  // it may refer to the exponents that are overwritten now
  std::fill(std::begin(memory_.has_b6), std::end(memory_.has_b6), false);
  memory_.left_b6_panel = -1;
  if (problem_.packed_right != nullptr) return;
  Scheme wanted = Scheme::b6;
  for (int64_t i = rows.begin; i < rows.end && wanted == Scheme::b6; ++i) {
    wanted = packed_left(i, block).scheme;
  }
  for (int64_t j = columns.begin; j < columns.end; ++j) {
    const PanelReport report = memory_.slab.pack(
        problem_.engine, wanted, problem_.right.source(j, block), j - columns.begin);
    if (report.nonfinite != 0) note_nonfinite(j, report.nonfinite);
  }
}

PackedPanel Rectangle::right_panel(int64_t index, Scheme scheme, int64_t panel, int64_t block) {
  const PackedPanel as_packed = problem_.packed_right != nullptr
                                    ? problem_.packed_right->panel(panel, block)
                                    : memory_.slab[index];
  if (as_packed.scheme == scheme || as_packed.scheme == Scheme::b6) return as_packed;
  if (!memory_.has_b6[index]) {
    finish();
    memory_.slab_b6.pack(problem_.engine, Scheme::b6, problem_.right.source(panel, block), index);
    memory_.has_b6[index] = true;
  }
  return memory_.slab_b6[index];
}

PackedPanel Rectangle::left_panel(Scheme scheme, int64_t panel, int64_t block) {
  const PackedPanel as_packed = packed_left(panel, block);
  if (as_packed.scheme == scheme) return as_packed;
  if (memory_.left_b6_panel != panel) {
    finish();
    memory_.left_b6.pack(problem_.engine, Scheme::b6, problem_.left.source(panel, block), 0);
    memory_.left_b6_panel = panel;
  }
  return memory_.left_b6[0];
}

// The next slab's source comes to L2 in shares while this one is multiplied.
Ahead Rectangle::source_ahead(Range rows, Range columns, int64_t block) const {
  Ahead ahead;
  if (problem_.packed_right != nullptr) return ahead;
  Range next = columns;
  if (++block == problem_.right.blocks()) {
    block = 0;
    next = {columns.end, std::min(columns_.end, columns.end + kSlabColumns)};
    if (next.size() <= 0) return ahead;
  }
  const PanelSource source = problem_.right.source(next.begin, block);
  const int width = static_cast<int>(
      std::min(next.size() * kPanelRows, problem_.right.rows - next.begin * kPanelRows));
  const int count = source.across ? source.depth : width;
  const int length = source.across ? width : source.depth;
  ahead.source = reinterpret_cast<const std::byte*>(source.data);
  ahead.source_stride = source.ld * static_cast<int64_t>(sizeof(float));
  ahead.source_lines = (length + 15) / 16;
  ahead.source_rows = static_cast<int>(ceil_div(count, rows.size() * columns.size()));
  return ahead;
}

void Rectangle::run_slab(Range rows, Range columns, int64_t block) {
  prepare_right(rows, columns, block);
  const int64_t blocks = problem_.left.blocks();
  const int steps = (problem_.left.block_depth(block) + kStep - 1) / kStep;
  const Ahead source = source_ahead(rows, columns, block);
  const int source_share = std::min(source.source_rows, steps);
  const std::byte* source_row = source.source;
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const Scheme left_scheme = packed_left(i, block).scheme;
    const bool last_row = i + 1 == rows.end;
    const PackedPanel next = packed_left(last_row ? rows.begin : i + 1,
                                         last_row ? std::min(block + 1, blocks - 1) : block);
    const int64_t shares = columns.size() * steps;
    Ahead ahead = source;
    ahead.packed = next.tiles;
    ahead.lines =
        static_cast<int>(ceil_div(kPanelBytes[static_cast<int>(next.scheme)] / 64, shares));
    ahead.source_rows = source_share;
    for (int64_t j = columns.begin; j < columns.end; ++j) {
      const int64_t index = j - columns.begin;
      const PackedPanel right = right_panel(index, left_scheme, j, block);
      const PackedPanel left = left_panel(right.scheme, i, block);
      float* const own_sums = sums_ + (flip_ ^= 1) * kPairFloats;
      ahead.source = source_row;
      problem_.engine.multiply[static_cast<int>(right.scheme)](
          {left.tiles, right.tiles, steps, own_sums, ahead}, &pending_);
      ++counts_.pairs[static_cast<int>(right.scheme)];
      ahead.packed += ahead.lines * 64 * steps;
      source_row += source_share * source.source_stride;
      pending_ = {own_sums,
                  left.exponents,
                  right.exponents,
                  partial_ + ((i - rows.begin) * kSlabColumns + index) * kPairFloats,
                  problem_.c + i * kPanelRows * problem_.ldc + j * kPanelRows,
                  problem_.ldc,
                  problem_.left.panel_rows(i),
                  problem_.right.panel_rows(j),
                  0,
                  block == 0,
                  block + 1 == blocks};
    }
  }
}

}  // namespace ingot::cpu::amx
