#include "cpu/interpreter.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "common/monoid.cuh"
#include "cpu/loops.h"
#include "support/align.h"
#include "support/error.h"

namespace ingot::cpu {
namespace {

constexpr size_t kLine = 64;
// Keeps buffers off the same places of different pages, which processors take for one another.
constexpr size_t kStagger = 2 * kLine;
// Elements that a conversion holds between its two halves.
constexpr int64_t kConvertElements = 1024;

size_t width_of(Class cls) {
  return cls == Class::wide ? sizeof(double) : sizeof(float);
}

size_t width_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::boolean:
      return 1;
  }
  return 0;
}

Extents masked(const std::array<bool, kAxes>& varies, const Extents& sizes) {
  Extents out;
  for (size_t a = 0; a < kAxes; ++a) out[a] = varies[a] ? sizes[a] : 1;
  return out;
}

Extents dense(const std::array<bool, kAxes>& varies, const Extents& sizes, const AxisOrder& order) {
  Extents strides{};
  int64_t stride = 1;
  for (size_t i = kAxes; i-- > 0;) {
    const size_t a = order[i];
    if (!varies[a]) continue;
    strides[a] = stride;
    stride *= sizes[a];
  }
  return strides;
}

int64_t offset_of(const Extents& begin, const Extents& strides) {
  int64_t offset = 0;
  for (size_t a = 0; a < kAxes; ++a) offset += begin[a] * strides[a];
  return offset;
}

std::byte* at_element(std::byte* data, int64_t elements, size_t width) {
  return data + elements * static_cast<int64_t>(width);
}

bool holds(DType dtype, Class cls) {
  return (dtype == DType::f32 && cls == Class::single) ||
         (dtype == DType::f64 && cls == Class::wide);
}

// Whether the inner two loops transpose: one operand runs along the innermost, the other along the
// next.
bool turned(const Loops<2>& loops, size_t along_inner, size_t along_next) {
  return loops.size[0] > 1 && loops.size[1] > 1 && loops.stride[0][along_inner] == 1 &&
         loops.stride[1][along_next] == 1;
}

}  // namespace

std::byte* Scratch::reserve(size_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    size_ = 0;
    data_ = static_cast<std::byte*>(std::aligned_alloc(kLine, align_up(bytes, kLine)));
    if (data_ == nullptr) fail(INGOT_FAILED, "CPU: no memory for {} bytes of scratch", bytes);
    size_ = bytes;
  }
  return data_;
}

Scratch::~Scratch() {
  std::free(data_);
}

Interpreter::Interpreter(const Phase& phase, const Bindings& bindings, Level level,
                         const Extents& tile, Scratch* scratch)
    : phase_(phase),
      bindings_(bindings),
      single_(primitives<float>(level)),
      wide_(primitives<double>(level)),
      registers_(phase.slots.size()),
      constants_(phase.slots.size()) {
  size_t total = 0;
  for (const BufferClass& buffer : phase.buffers) {
    buffer_offsets_.push_back(total);
    const int64_t elements =
        buffer.block ? kBlockElements : product_of(masked(buffer.varies, tile));
    total += align_up(static_cast<size_t>(elements) * width_of(buffer.cls), kLine) + kStagger;
  }
  states_capacity_ = 1;
  AxisMask reduced = 0;
  for (const StateStep& state : phase.reductions) {
    reduced |= state.axes;
    Extents kept = tile;
    for (size_t a = 0; a < kAxes; ++a) {
      if ((state.axes >> a & 1) != 0) kept[a] = 1;
    }
    states_capacity_ = std::max(states_capacity_, product_of(kept));
  }
  // Statistics are gathered into states in natural order.
  if (phase.statistics.empty()) order_ = register_order(tile, reduced);
  const size_t states = align_up(static_cast<size_t>(states_capacity_) * 2 * sizeof(double), kLine);
  scratch_ = scratch->reserve(total + states + kLine);
  states_ = reinterpret_cast<double*>(scratch_ + total);
  for (size_t i = 0; i < phase.slots.size(); ++i) {
    const Slot& slot = phase.slots[i];
    if (slot.kind != Slot::Kind::constant) continue;
    if (slot.cls == Class::wide) {
      constants_[i] = slot.constant;
    } else {
      const float value = static_cast<float>(slot.constant);
      std::memcpy(&constants_[i], &value, sizeof value);
    }
    registers_[i].data = reinterpret_cast<std::byte*>(&constants_[i]);
  }
}

Extents Interpreter::sizes_of(const Slot& slot) const {
  return masked(slot.varies, tile_.size);
}

Interpreter::Register Interpreter::scratch_register(const Slot& slot) {
  return {scratch_ + buffer_offsets_[static_cast<size_t>(slot.buffer)],
          dense(slot.varies, tile_.size, order_)};
}

// Operations want each operand dense or constant along the innermost axis.
bool Interpreter::usable_in_place(const Slot& slot, const Memory& memory) const {
  if (!holds(memory.dtype, slot.cls)) return false;
  if (reinterpret_cast<uintptr_t>(memory.data) % width_of(slot.cls) != 0) return false;
  for (size_t i = kAxes; i-- > 0;) {
    const size_t a = order_[i];
    if (slot.varies[a] && tile_.size[a] > 1) return memory.strides[a] == 1;
  }
  return true;
}

void Interpreter::bind_loads(bool hoisted) {
  for (size_t i = 0; i < phase_.loads.size(); ++i) {
    const auto index = static_cast<size_t>(phase_.load_slots[i]);
    const Slot& slot = phase_.slots[index];
    if (slot.varies[kBatch] == hoisted) continue;
    const Memory& memory = bindings_.loads[i];
    if (usable_in_place(slot, memory)) {
      const int64_t offset = offset_of(tile_.begin, memory.strides);
      registers_[index] = {at_element(memory.data, offset, width_of(slot.cls)), memory.strides};
    } else {
      registers_[index] = scratch_register(slot);
      copy_in(slot, memory, registers_[index]);
    }
  }
}

void Interpreter::bind_computed(const std::vector<int>& slots) {
  for (const int index : slots) {
    const auto i = static_cast<size_t>(index);
    const Slot& slot = phase_.slots[i];
    if (slot.inner) {
      registers_[i].data = scratch_ + buffer_offsets_[static_cast<size_t>(slot.buffer)];
      continue;
    }
    if (slot.store >= 0) {
      const Memory& memory = bindings_.stores[static_cast<size_t>(slot.store)];
      // Along an axis where it does not vary a value is computed by every tile but written by one.
      bool everywhere = true;
      for (size_t a = 0; a < kAxes; ++a) {
        everywhere = everywhere && (slot.varies[a] || phase_.space_is_one(a));
      }
      if (everywhere && usable_in_place(slot, memory)) {
        const int64_t offset = offset_of(tile_.begin, memory.strides);
        registers_[i] = {at_element(memory.data, offset, width_of(slot.cls)), memory.strides};
        continue;
      }
    }
    registers_[i] = scratch_register(slot);
  }
}

void Interpreter::begin_strip(const Box& strip) {
  tile_ = strip;
  bind_loads(true);
  bind_computed(phase_.strip_slots);
  run_steps(true);
}

void Interpreter::run_tile(const Box& tile) {
  tile_ = tile;
  bind_loads(false);
  bind_computed(phase_.tile_slots);
  run_steps(false);
  run_stores();
}

void Interpreter::run_steps(bool hoisted) {
  for (const Run& run : phase_.runs) {
    const Step& step = phase_.steps[static_cast<size_t>(run.begin)];
    if (step.hoisted != hoisted) continue;
    switch (step.kind) {
      case Step::Kind::pointwise:
        run_pointwise(run);
        break;
      case Step::Kind::convert:
        run_convert(step);
        break;
      case Step::Kind::reduce:
        run_reduce(step);
        break;
    }
  }
}

// Through the memory format of the target dtype, which rounds.
void Interpreter::run_convert(const Step& step) {
  const auto in_index = static_cast<size_t>(step.in[0]), out_index = static_cast<size_t>(step.out);
  const Class from = phase_.slots[in_index].cls, to = phase_.slots[out_index].cls;
  const Register &in = registers_[in_index], &out = registers_[out_index];
  Loops<2> loops;
  loops.build(sizes_of(phase_.slots[out_index]), {out.strides, in.strides}, order_);
  const auto dtype = static_cast<size_t>(step.dtype);
  alignas(kLine) std::byte rounded[kConvertElements * sizeof(double)];
  loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
    for (int64_t j = 0; j < loops.size[0]; j += kConvertElements) {
      const int64_t n = std::min(kConvertElements, loops.size[0] - j);
      const std::byte* source =
          at_element(in.data, offset[1] + j * loops.stride[0][1], width_of(from));
      std::byte* target = at_element(out.data, offset[0] + j, width_of(to));
      if (from == Class::wide) {
        wide_.store[dtype](rounded, 1, reinterpret_cast<const double*>(source), n);
      } else {
        single_.store[dtype](rounded, 1, reinterpret_cast<const float*>(source), n);
      }
      if (to == Class::wide) {
        wide_.load[dtype](reinterpret_cast<double*>(target), rounded, 1, n);
      } else {
        single_.load[dtype](reinterpret_cast<float*>(target), rounded, 1, n);
      }
    }
  });
}

void Interpreter::copy_in(const Slot& slot, const Memory& memory, const Register& out) {
  Loops<2> loops;
  loops.build(sizes_of(slot), {out.strides, memory.strides}, order_);
  const auto dtype = static_cast<size_t>(memory.dtype);
  std::byte* base =
      at_element(memory.data, offset_of(tile_.begin, memory.strides), width_of(memory.dtype));
  if (memory.dtype == DType::f32 && slot.cls == Class::single && turned(loops, 0, 1)) {
    loops.for_each_outer([&](const std::array<int64_t, 2>& offset) {
      single_.transpose(at_element(out.data, offset[0], sizeof(float)), loops.stride[1][0],
                        at_element(base, offset[1], sizeof(float)), loops.stride[0][1],
                        loops.size[0], loops.size[1]);
    });
    return;
  }
  loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
    const std::byte* source = at_element(base, offset[1], width_of(memory.dtype));
    std::byte* target = at_element(out.data, offset[0], width_of(slot.cls));
    if (slot.cls == Class::wide) {
      wide_.load[dtype](reinterpret_cast<double*>(target), source, loops.stride[0][1],
                        loops.size[0]);
    } else {
      single_.load[dtype](reinterpret_cast<float*>(target), source, loops.stride[0][1],
                          loops.size[0]);
    }
  });
}

void Interpreter::copy_out(const Slot& slot, const Register& in, const Memory& memory) {
  Loops<2> loops;
  loops.build(sizes_of(slot), {memory.strides, in.strides}, order_);
  const auto dtype = static_cast<size_t>(memory.dtype);
  std::byte* base =
      at_element(memory.data, offset_of(tile_.begin, memory.strides), width_of(memory.dtype));
  if (memory.dtype == DType::f32 && slot.cls == Class::single && turned(loops, 1, 0)) {
    loops.for_each_outer([&](const std::array<int64_t, 2>& offset) {
      single_.transpose(at_element(base, offset[0], sizeof(float)), loops.stride[0][0],
                        at_element(in.data, offset[1], sizeof(float)), loops.stride[1][1],
                        loops.size[1], loops.size[0]);
    });
    return;
  }
  loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
    std::byte* target = at_element(base, offset[0], width_of(memory.dtype));
    const std::byte* source = at_element(in.data, offset[1], width_of(slot.cls));
    if (slot.cls == Class::wide) {
      wide_.store[dtype](target, loops.stride[0][0], reinterpret_cast<const double*>(source),
                         loops.size[0]);
    } else {
      single_.store[dtype](target, loops.stride[0][0], reinterpret_cast<const float*>(source),
                           loops.size[0]);
    }
  });
}

void Interpreter::run_stores() {
  for (size_t i = 0; i < phase_.stores.size(); ++i) {
    const auto index = static_cast<size_t>(phase_.stores[i].slot);
    const Slot& slot = phase_.slots[index];
    const Memory& memory = bindings_.stores[i];
    bool mine = true;
    for (size_t a = 0; a < kAxes; ++a) mine = mine && (slot.varies[a] || tile_.begin[a] == 0);
    if (!mine) continue;
    const std::byte* there =
        at_element(memory.data, offset_of(tile_.begin, memory.strides), width_of(memory.dtype));
    const Register& reg = registers_[index];
    if (slot.kind == Slot::Kind::computed && slot.store == static_cast<int>(i) && reg.data == there)
      continue;
    copy_out(slot, reg, memory);
  }
}

// Walks the box of a reduction's argument so that each call merges a run, or rows of columns.
template <class T>
void Interpreter::reduce_box(const StateStep& state, TileStates states, double count,
                             const Primitives<T>& primitives) {
  const auto index = static_cast<size_t>(state.arg);
  const Register& x = registers_[index];
  std::array<bool, kAxes> kept{};
  for (size_t a = 0; a < kAxes; ++a) kept[a] = (state.axes >> a & 1) == 0;
  Extents positions{};  // along the reduced axes, flattened
  int64_t per_position = 1;
  for (size_t a = kAxes; a-- > 0;) {
    if (kept[a]) continue;
    positions[a] = per_position;
    per_position *= tile_.size[a];
  }
  // Reduced axes begin at 0 in every tile but along the batch.
  const int64_t first_position = kept[kBatch] ? 0 : tile_.begin[kBatch] * positions[kBatch];
  Loops<3> loops;
  loops.build(tile_.size, {x.strides, dense(kept, tile_.size, order_), positions}, order_);
  const auto monoid = static_cast<size_t>(state.monoid);
  const T* data = reinterpret_cast<const T*>(x.data);
  const auto block = [&](int64_t kept_offset, int64_t position) {
    return StateBlock{states.first + kept_offset, states.second + kept_offset,
                      count + static_cast<double>(position), first_position + position};
  };
  const bool run = loops.stride[0][1] == 0;              // the innermost axis is reduced
  const bool columns = !run && loops.stride[1][1] == 0;  // rows of columns
  const auto reduce_rows = primitives.reduce_rows[monoid];
  const bool states_follow = loops.stride[1][1] == 1 && loops.stride[1][2] == 0;
  const bool rows = run && reduce_rows != nullptr && loops.size[0] <= kLongestRow &&
                    (loops.size[1] == 1 || states_follow);
  if (rows) {
    loops.for_each_outer([&](const std::array<int64_t, 3>& offset) {
      reduce_rows(data + offset[0], loops.stride[1][0], loops.size[1], loops.size[0],
                  block(offset[1], offset[2]));
    });
  } else if (columns) {
    loops.for_each_outer([&](const std::array<int64_t, 3>& offset) {
      primitives.reduce_columns[monoid](data + offset[0], loops.stride[1][0], loops.size[1],
                                        loops.size[0], block(offset[1], offset[2]));
    });
  } else {
    loops.for_each_row([&](const std::array<int64_t, 3>& offset) {
      if (run) {
        primitives.reduce_run[monoid](data + offset[0], loops.size[0], block(offset[1], offset[2]));
      } else {
        primitives.reduce_columns[monoid](data + offset[0], 0, 1, loops.size[0],
                                          block(offset[1], offset[2]));
      }
    });
  }
}

void Interpreter::gather(const StateStep& statistic, TileStates states, double count) {
  if (phase_.slots[static_cast<size_t>(statistic.arg)].cls == Class::wide) {
    reduce_box<double>(statistic, states, count, wide_);
  } else {
    reduce_box<float>(statistic, states, count, single_);
  }
}

void Interpreter::run_reduce(const Step& step) {
  const StateStep& state = phase_.reductions[static_cast<size_t>(step.state)];
  Extents kept = tile_.size;
  int64_t reduced = 1;
  for (size_t a = 0; a < kAxes; ++a) {
    if ((state.axes >> a & 1) == 0) continue;
    reduced *= kept[a];
    kept[a] = 1;
  }
  const TileStates states{states_, states_ + states_capacity_};
  clear_states(state.monoid, states, product_of(kept));
  gather(state, states, 0);
  for (const StateStep::Read& read : state.reads) {
    if (phase_.slots[static_cast<size_t>(read.slot)].cls == Class::wide) {
      read_state<double>(read, kept, static_cast<double>(reduced), wide_);
    } else {
      read_state<float>(read, kept, static_cast<double>(reduced), single_);
    }
  }
}

template <class T>
void Interpreter::read_state(const StateStep::Read& read, const Extents& kept, double count,
                             const Primitives<T>& primitives) {
  const Register& out = registers_[static_cast<size_t>(read.slot)];
  const auto finish = primitives.read[static_cast<int>(reading_of(read.finish))];
  Loops<2> loops;
  loops.build(kept, {out.strides, dense({true, true, true, true}, kept, order_)}, order_);
  T* to = reinterpret_cast<T*>(out.data);
  const double *first = states_, *second = states_ + states_capacity_;
  const bool contiguous = loops.stride[0][0] == 1 && loops.stride[0][1] == 1;
  loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
    const int64_t step = contiguous ? loops.size[0] : 1;
    for (int64_t j = 0; j < loops.size[0]; j += step) {
      const int64_t from = offset[1] + j * loops.stride[0][1];
      finish(first + from, second + from, count, to + offset[0] + j * loops.stride[0][0], step);
    }
  });
}

void clear_states(ReduceMonoid monoid, TileStates states, int64_t n) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  double first = 0, second = 0;
  switch (monoid) {
    case ReduceMonoid::max:
    case ReduceMonoid::log_sum_exp:
      first = -infinity;
      break;
    case ReduceMonoid::min:
      first = infinity;
      break;
    case ReduceMonoid::argmax:
      first = -infinity;
      second = static_cast<double>(ArgMax<double>::kNowhere);
      break;
    default:
      break;
  }
  std::fill_n(states.first, n, first);
  std::fill_n(states.second, n, second);
}

Reading reading_of(Finish finish) {
  switch (finish) {
    case Finish::sum:
    case Finish::max:
    case Finish::min:
    case Finish::max_exponent:
      return Reading::first;
    case Finish::argmax:
      return Reading::second;
    case Finish::mean:
      return Reading::mean;
    case Finish::variance:
      return Reading::variance;
    case Finish::variance_unbiased:
      return Reading::variance_unbiased;
    case Finish::sum_exp:
      return Reading::sum_exp;
    case Finish::log_sum_exp:
      return Reading::log_sum_exp;
  }
  fail(INGOT_FAILED, "CPU: unknown finish");
}

}  // namespace ingot::cpu
