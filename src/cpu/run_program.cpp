// Runs a host program: fills the addresses of a call in and does its steps in order, each on the
// host's threads.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "common/monoid.cuh"
#include "cpu/host_program.h"
#include "cpu/loops.h"
#include "cpu/product/packed.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

// Elements of statistics that one task merges.
constexpr int64_t kMergeElements = 2048;
// Below this much work a second thread costs more than it brings: elements, once for every two
// steps of a sweep.
constexpr int64_t kElementsForThreads = 32768;
constexpr int64_t kStepsOfElement = 2;
// Multiplications of a product of a batch, from which its own threads are worth more than one for
// each product.
constexpr int64_t kProductForThreads = int64_t{1} << 21;
// Elements that a copy holds between its two halves, and what one task copies at least.
constexpr int64_t kCopyBlock = 512;
constexpr int64_t kCopyElements = 16384;

Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// The tiles of one task.
struct TileRange {
  Box strip;
  int64_t begin, end;  // along the batch
};

TileRange range_of(const Tiling& tiling, int64_t task) {
  const int64_t chunk = task / tiling.strips;
  TileRange range{tiling.strip(task % tiling.strips), chunk * tiling.batch_chunk, 0};
  range.end = std::min(tiling.space[kBatch], range.begin + tiling.batch_chunk);
  return range;
}

// Runs the tiles of one task; after_tile(interpreter, batch entries done before it).
template <class AfterTile>
void run_tiles(const Phase& phase, const Bindings& bindings, Level level, const Tiling& tiling,
               const TileRange& range, AfterTile&& after_tile) {
  Interpreter interpreter(phase, bindings, level, tiling.tile, &thread_scratch());
  Box tile = range.strip;
  interpreter.begin_strip(tile);
  for (int64_t b = range.begin; b < range.end; b += tiling.tile[kBatch]) {
    tile.begin[kBatch] = b;
    tile.size[kBatch] = std::min(tiling.tile[kBatch], range.end - b);
    interpreter.run_tile(tile);
    after_tile(interpreter, b - range.begin);
  }
}

Extents dense_over(const Extents& sizes) {
  Extents strides{};
  int64_t stride = 1;
  for (size_t a = kAxes; a-- > 0;) {
    strides[a] = stride;
    stride *= sizes[a];
  }
  return strides;
}

// Elements of a batch entry that one statistic takes into each of its states.
double elements_of(const Phase& phase, const StateStep& statistic) {
  return static_cast<double>(phase.space.only(statistic.axes).static_elements());
}

// One task of a phase; statistics go to their place in `partials`.
void run_task(const PhaseStep& step, const Bindings& bindings, Level level, int64_t task,
              double* partials) {
  const Phase& phase = *step.phase;
  const Tiling& tiles = step.tiles;
  const TileRange range = range_of(tiles, task);
  const size_t count = phase.statistics.size();
  if (count == 0) {
    run_tiles(phase, bindings, level, tiles, range, [](auto&&...) {});
    return;
  }
  Extents begin = range.strip.begin, sizes = range.strip.size;
  for (size_t a = 0; a < kAxes; ++a) {
    if (step.kept[a] == 1) sizes[a] = 1;
  }
  // A task's states, dense, until it is done; then they go to their place among all.
  const int64_t n = product_of(sizes), kept = product_of(step.kept);
  static thread_local std::vector<double> local;
  local.resize(static_cast<size_t>(n) * 2 * count);
  const auto states_of = [&](size_t s) {
    double* const first = local.data() + static_cast<int64_t>(2 * s) * n;
    return TileStates{first, first + n};
  };
  for (size_t s = 0; s < count; ++s) clear_states(phase.statistics[s].monoid, states_of(s), n);
  run_tiles(phase, bindings, level, tiles, range, [&](Interpreter& interpreter, int64_t done) {
    for (size_t s = 0; s < count; ++s) {
      const StateStep& statistic = phase.statistics[s];
      interpreter.gather(statistic, states_of(s),
                         static_cast<double>(done) * elements_of(phase, statistic));
    }
  });
  const int64_t chunk = task / tiles.strips;
  const Extents kept_strides = dense_over(step.kept);
  for (size_t s = 0; s < count; ++s) {
    double* to =
        partials + (chunk * static_cast<int64_t>(count) + static_cast<int64_t>(s)) * 2 * kept;
    Loops<2> loops;
    loops.build(sizes, {kept_strides, dense_over(sizes)});
    int64_t base = 0;
    for (size_t a = 1; a < kAxes; ++a) base += begin[a] * kept_strides[a];
    loops.for_each_row([&](const std::array<int64_t, 2>& offset) {
      std::copy_n(states_of(s).first + offset[1], loops.size[0], to + base + offset[0]);
      std::copy_n(states_of(s).second + offset[1], loops.size[0], to + kept + base + offset[0]);
    });
  }
}

Bindings bind(const PhaseStep& step, const CallMemory& memory) {
  Bindings bindings;
  bindings.loads.reserve(step.loads.size());
  bindings.stores.reserve(step.stores.size());
  for (const BoundMemory& load : step.loads) bindings.loads.push_back(load.in(memory));
  for (const BoundMemory& store : step.stores) bindings.stores.push_back(store.in(memory));
  return bindings;
}

double* doubles_at(const Address& address, const CallMemory& memory) {
  return reinterpret_cast<double*>(memory.at(address));
}

void run_step(const PhaseStep& step, const CallMemory& memory, Level level) {
  const Bindings bindings = bind(step, memory);
  double* const partials = doubles_at(step.partials, memory);
  const auto steps = static_cast<int64_t>(step.phase->steps.size());
  const int64_t work = step.tiles.elements() * std::max<int64_t>(1, steps / kStepsOfElement);
  const bool small = work < kElementsForThreads;
  parallel_for(
      step.tiles.tasks(),
      [&](int64_t task, int) { run_task(step, bindings, level, task, partials); }, small ? 1 : 0);
}

template <template <class> class Monoid>
void merge_values(double* first, const double* other, int64_t n) {
  for (int64_t i = 0; i < n; ++i) first[i] = Monoid<double>::merge({first[i]}, {other[i]}).value;
}

// Merges partial states of `other_count` elements into states of `count`.
void merge_states(ReduceMonoid monoid, TileStates into, double count, TileStates other,
                  double other_count, int64_t n) {
  switch (monoid) {
    case ReduceMonoid::sum:
      return merge_values<Sum>(into.first, other.first, n);
    case ReduceMonoid::max:
      return merge_values<Max>(into.first, other.first, n);
    case ReduceMonoid::min:
      return merge_values<Min>(into.first, other.first, n);
    case ReduceMonoid::argmax:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged =
            ArgMax<double>::merge({into.first[i], static_cast<i64>(into.second[i])},
                                  {other.first[i], static_cast<i64>(other.second[i])});
        into.first[i] = merged.value;
        into.second[i] = static_cast<double>(merged.index);
      }
      return;
    case ReduceMonoid::moments:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged = Moments<double>::merge({count, into.first[i], into.second[i]},
                                                   {other_count, other.first[i], other.second[i]});
        into.first[i] = merged.mean;
        into.second[i] = merged.m2;
      }
      return;
    case ReduceMonoid::log_sum_exp:
      for (int64_t i = 0; i < n; ++i) {
        const auto merged = LogSumExp<double>::merge({into.first[i], into.second[i]},
                                                     {other.first[i], other.second[i]});
        into.first[i] = merged.max;
        into.second[i] = merged.sum;
      }
      return;
    case ReduceMonoid::count_:
      return;
  }
}

void run_step(const MergeStep& step, const CallMemory& memory, Level level) {
  const Phase& phase = *step.phase;
  const Tiling& tiles = step.tiles;
  const int64_t kept = step.kept;
  double* const states = doubles_at(step.states, memory);
  double* const partials = doubles_at(step.partials, memory);
  const auto count = static_cast<int64_t>(phase.statistics.size());
  const int64_t chunks = tiles.elements() == 0 ? 0 : tiles.chunks;
  const Primitives<double>& finishes = primitives<double>(level);
  const auto merge = [&](int64_t task, int) {
    const int64_t begin = task * kMergeElements, n = std::min(kMergeElements, kept - begin);
    auto finished = step.finished.begin();
    for (int64_t s = 0; s < count; ++s) {
      const StateStep& statistic = phase.statistics[static_cast<size_t>(s)];
      const TileStates into{states + 2 * s * kept + begin, states + (2 * s + 1) * kept + begin};
      clear_states(statistic.monoid, into, n);
      const double each = elements_of(phase, statistic);
      double merged = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        double* const partial = partials + (chunk * count + s) * 2 * kept + begin;
        const int64_t rows =
            std::min(tiles.batch_chunk, tiles.space[kBatch] - chunk * tiles.batch_chunk);
        const double more = static_cast<double>(rows) * each;
        merge_states(statistic.monoid, into, merged, {partial, partial + kept}, more, n);
        merged += more;
      }
      for (const StateStep::Read& read : statistic.reads) {
        finishes.read[static_cast<int>(reading_of(read.finish))](
            into.first, into.second, merged, doubles_at(*finished++, memory) + begin, n);
      }
    }
  };
  const bool small = kept * chunks * count < kElementsForThreads;
  parallel_for(ceil_div(kept, kMergeElements), merge, small ? 1 : 0);
}

template <class T>
void copy_run(const Memory& from, const Memory& to, const std::array<int64_t, 2>& offset,
              const std::array<int64_t, 2>& stride, int64_t n, Level level) {
  const Primitives<T>& loops = primitives<T>(level);
  const auto at = [](const Memory& memory, int64_t element) {
    return memory.data + element * static_cast<int64_t>(size_of(memory.dtype));
  };
  T block[kCopyBlock];
  for (int64_t j = 0; j < n; j += kCopyBlock) {
    const int64_t count = std::min(kCopyBlock, n - j);
    loops.load[static_cast<size_t>(from.dtype)](block, at(from, offset[1] + j * stride[1]),
                                                stride[1], count);
    loops.store[static_cast<size_t>(to.dtype)](at(to, offset[0] + j * stride[0]), stride[0], block,
                                               count);
  }
}

void run_step(const CopyStep& step, const CallMemory& memory, Level level) {
  Memory from = step.from.in(memory);
  const Memory to = step.to.in(memory);
  // It is only read.
  if (step.constant) {
    from.data = reinterpret_cast<std::byte*>(const_cast<double*>(&*step.constant));
  }
  Loops<2> loops;
  loops.build(step.sizes, {to.strides, from.strides});
  const bool wide = class_of(from.dtype) == Class::wide || class_of(to.dtype) == Class::wide;
  // A task takes some rows, or a part of a long one.
  const int64_t length = loops.size[0], rows = loops.size[1] * loops.size[2] * loops.size[3];
  const int64_t part = std::min(length, kCopyElements), parts = ceil_div(length, part);
  const int64_t some = std::max<int64_t>(1, kCopyElements / length);
  const auto copy = [&](int64_t task, int) {
    const int64_t begin = task % parts * part, n = std::min(part, length - begin);
    const int64_t first = task / parts * some;
    for (int64_t row = first; row < std::min(rows, first + some); ++row) {
      std::array<int64_t, 2> offset = loops.row(row);
      for (size_t o = 0; o < 2; ++o) offset[o] += begin * loops.stride[0][o];
      (wide ? copy_run<double> : copy_run<float>)(from, to, offset, loops.stride[0], n, level);
    }
  };
  const bool small = length * rows < kElementsForThreads;
  parallel_for(parts * ceil_div(rows, some), copy, small ? 1 : 0);
}

void run_step(const PackStep& step, const CallMemory& memory, Level) {
  ProductCall call = step.call;
  call.b = memory.at(step.b);
  step.provider->pack(call, memory.at(step.packed));
}

ProductCall of_batch(const ProductStep& step, ProductCall call, const CallMemory& memory,
                     int64_t i) {
  call.a = memory.at(step.a) + i * step.a_step;
  call.b = memory.at(step.b) + i * step.b_step;
  call.c = memory.at(step.c) + i * step.c_step;
  return call;
}

// Calls run(call) for each product of the batch; small ones several at a time. (Those of 16 bits
// are the host process's, which may want its interpreter.)
template <class Run>
void for_each_product(const ProductStep& step, const ProductCall& call, const CallMemory& memory,
                      Run&& run) {
  const auto one = [&](int64_t i, int) { run(of_batch(step, call, memory, i)); };
  const bool single = call.dtype == INGOT_F32 || call.dtype == INGOT_F64;
  if (step.batches > 1 && single && call.m * call.n * call.k < kProductForThreads) {
    const bool small = step.batches * call.m * call.n * call.k < kElementsForThreads;
    return parallel_for(step.batches, one, small ? 1 : 0);
  }
  for (int64_t i = 0; i < step.batches; ++i) one(i, 0);
}

// Whether the step's provider did what is behind the product, too.
bool run_with_behind(const ProductStep& step, ProductCall call, const CallMemory& memory,
                     Level level) {
  if (step.row.base != Address::Base::none) {
    call.row = memory.at(step.row);
    std::atomic<bool> done{true};
    for_each_product(step, call, memory, [&](const ProductCall& one) {
      if (!step.providers[0]->run(one)) done = false;
    });
    if (!done) return false;
    if (step.behind_row) run_step(*step.behind_row, memory, level);
    return true;
  }
  const BodyBlocks blocks(*step.behind, level, memory);
  call.consumer = &blocks;
  if (!step.is_kept) call.c = nullptr;
  return step.providers[0]->run(call);
}

void run_step(const ProductStep& step, const CallMemory& memory, Level level) {
  ProductCall call = of_batch(step, step.call, memory, 0);
  call.packed_b = memory.at(step.packed_b);
  if (step.behind && run_with_behind(step, call, memory, level)) return;
  for_each_product(step, call, memory,
                   [&](const ProductCall& one) { run_product(step.providers, one); });
  if (step.behind) run_step(*step.behind, memory, level);
}

// The features of c that one strip of tiles takes, where all take as many, one after the other.
int64_t columns_of_strip(const Tiling& t) {
  constexpr std::array<size_t, 3> kInnermostFirst{kFeatures, kGroups, kRows};
  int64_t columns = 1;
  for (size_t i = 0; i < 3; ++i) {
    const size_t axis = kInnermostFirst[i];
    columns *= t.tile[axis];
    if (t.tile[axis] == t.space[axis]) continue;
    for (size_t outer = i + 1; outer < 3; ++outer) {
      if (t.tile[kInnermostFirst[outer]] != 1 || t.space[kInnermostFirst[outer]] != 1) return 0;
    }
    return columns;
  }
  return columns;
}

}  // namespace

BodyBlocks::BodyBlocks(const PhaseStep& body, Level level, const CallMemory& memory)
    : body_(body),
      level_(level),
      bindings_(bind(body, memory)),
      partials_(doubles_at(body.partials, memory)) {}

int64_t BodyBlocks::columns() const {
  return columns_of_strip(body_.tiles);
}

void BodyBlocks::consume(Range rows, Range columns, const void* data, int64_t ld) const {
  // The interpreter only reads loads.
  auto* const first = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  Bindings bindings = bindings_;
  for (const size_t i : body_.product_loads) {
    Memory& product = bindings.loads[i];
    product.strides[kBatch] = ld;
    product.data =
        first - (rows.begin * ld + columns.begin) * static_cast<int64_t>(size_of(product.dtype));
  }
  const int64_t height = this->rows(), width = this->columns();
  const int64_t last_chunk = ceil_div(rows.end, height);
  const int64_t last_strip = ceil_div(columns.end, width);
  for (int64_t strip = columns.begin / width; strip < last_strip; ++strip) {
    for (int64_t chunk = rows.begin / height; chunk < last_chunk; ++chunk) {
      run_task(body_, bindings, level_, chunk * body_.tiles.strips + strip, partials_);
    }
  }
}

void run(const HostProgram& program, const CallMemory& memory) {
  for (const HostStep& step : program.steps) {
    std::visit([&](const auto& what) { run_step(what, memory, program.level); }, step.what);
  }
}

}  // namespace ingot::cpu
