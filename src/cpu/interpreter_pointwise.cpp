// Runs of pointwise steps, block by block: what one step hands to the next stays in the level-1
// cache, whatever the size of the tile.
#include <algorithm>

#include "cpu/interpreter.h"
#include "cpu/loops.h"

namespace ingot::cpu {
namespace {

// Pieces of a long row end on full vectors.
constexpr int64_t kWhole = 64;

// An operand of the run: where the block begins, and how far it is to the next row and column.
template <class T>
struct Operand {
  T* data;
  int64_t row_stride, column_stride;
};

// A step whose operands are known but for where the block begins.
template <class T>
struct BoundStep {
  typename Primitives<T>::Map map;
  const Step* step;
  unsigned constants;
  bool flat;  // a block's rows follow each other in every operand: one long row
};

template <class T>
typename Primitives<T>::Map map_of(const Step& step, unsigned variant,
                                   const Primitives<T>& primitives) {
  if (step.composite != Composite::none) {
    return primitives.composite[static_cast<int>(step.composite)];
  }
  if (step.op == PointwiseOp::cast_) return primitives.round[static_cast<int>(step.dtype)];
  return primitives.map[static_cast<int>(step.op)][variant];
}

template <class T>
BoundStep<T> bind_step(const Step& step, const Operand<T>* operands, int64_t columns,
                       const Primitives<T>& primitives) {
  unsigned variant = 0;
  bool flat = true;
  for (int i = 0; i <= step.arity; ++i) {
    const Operand<T>& operand = operands[step.operands[static_cast<size_t>(i)]];
    flat = flat && operand.row_stride == columns * operand.column_stride;
    if (i > 0 && columns > 1 && operand.column_stride == 0) variant |= 1u << (i - 1);
  }
  return {map_of(step, variant, primitives), &step, variant, flat};
}

template <class T>
void run_step(const BoundStep<T>& bound, const Operand<T>* operands, int64_t rows,
              int64_t columns) {
  const Step& step = *bound.step;
  const Operand<T>& out = operands[step.operands[0]];
  MapBlock<T> block;
  block.out = out.data;
  block.out_stride = out.row_stride;
  for (size_t i = 0; i < static_cast<size_t>(step.arity); ++i) {
    const Operand<T>& in = operands[step.operands[i + 1]];
    block.in[i] = in.data;
    block.in_stride[i] = in.row_stride;
  }
  block.rows = bound.flat ? 1 : rows;
  block.columns = bound.flat ? rows * columns : columns;
  block.constants = bound.constants;
  bound.map(block);
}

}  // namespace

void Interpreter::run_pointwise(const Run& run) {
  constexpr size_t kFew = 6;
  const bool few = run.outer.size() <= kFew;
  if (phase_.steps[static_cast<size_t>(run.begin)].cls == Class::wide) {
    few ? run_blocks<double, kFew>(run, wide_) : run_blocks<double, kMaxOperands>(run, wide_);
  } else {
    few ? run_blocks<float, kFew>(run, single_) : run_blocks<float, kMaxOperands>(run, single_);
  }
}

template <class T, size_t outer>
void Interpreter::run_blocks(const Run& run, const Primitives<T>& primitives) {
  std::array<Extents, outer> strides{};
  std::array<T*, outer> begin{};
  for (size_t o = 0; o < run.outer.size(); ++o) {
    const Register& reg = registers_[static_cast<size_t>(run.outer[o])];
    strides[o] = reg.strides;
    begin[o] = reinterpret_cast<T*>(reg.data);
  }
  const Step* const first = &phase_.steps[static_cast<size_t>(run.begin)];
  Loops<outer> loops;
  loops.build(sizes_of(phase_.slots[static_cast<size_t>(first->out)]), strides, order_);

  const int64_t rows = loops.size[1], columns = loops.size[0];
  const int64_t pieces = (columns + kBlockElements - 1) / kBlockElements;
  const int64_t width =
      pieces == 1 ? columns : std::min((columns / pieces / kWhole + 1) * kWhole, kBlockElements);
  const int64_t height = std::clamp<int64_t>(kBlockElements / width, 1, pieces == 1 ? rows : 1);

  Operand<T> operands[kMaxOperands + kMaxRunSteps];
  for (size_t o = 0; o < run.outer.size(); ++o) {
    operands[o] = {nullptr, loops.stride[1][o], loops.stride[0][o]};
  }
  for (size_t i = 0; i < run.inner.size(); ++i) {
    std::byte* const data = registers_[static_cast<size_t>(run.inner[i])].data;
    operands[run.outer.size() + i] = {reinterpret_cast<T*>(data), width, 1};
  }
  const int steps = run.end - run.begin;
  BoundStep<T> bound[kMaxRunSteps];
  for (int s = 0; s < steps; ++s) bound[s] = bind_step(first[s], operands, columns, primitives);

  loops.for_each_outer([&](const typename Loops<outer>::Offsets& offset) {
    for (int64_t i = 0; i < rows; i += height) {
      for (int64_t j = 0; j < columns; j += width) {
        for (size_t o = 0; o < run.outer.size(); ++o) {
          operands[o].data = begin[o] + offset[o] + i * loops.stride[1][o] + j * loops.stride[0][o];
        }
        const int64_t n = std::min(height, rows - i), m = std::min(width, columns - j);
        for (int s = 0; s < steps; ++s) run_step(bound[s], operands, n, m);
      }
    }
  });
}

}  // namespace ingot::cpu
