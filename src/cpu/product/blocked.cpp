// Panels packed for a register tile, blocked for three levels of cache (Goto and van de Geijn,
// 2008). Threads take rectangles of c; within one, blocks of c are summed through all of k in a
// buffer of the thread's own, so that c is written once and can be consumed while it is in cache.
// Every element of c is summed in the same order whatever the rectangle, the block or the tile:
// bits depend neither on the number of threads nor on what was packed before.
#include "cpu/product/blocked.h"

#include <algorithm>
#include <numeric>

#include "cpu/product/buffers.h"
#include "cpu/product/ranges.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

// A panel of b, kBlockK × tile columns, stays in L1; some rows of a, kPackedRows × kBlockK, in L2;
// the block of c, kBlockRows × kBlockElements / kBlockRows, and the panels of b that it needs, in
// L3, from where they stream.
constexpr int64_t kBlockK = 256;
constexpr int64_t kPackedRows = 448;
constexpr int64_t kBlockRows = 1024;
constexpr int64_t kBlockElements = 1024 * 1024;
constexpr int64_t kBlockColumns = 4096;
// Between the rows of a thread's sums: rows a power of two apart would share few sets of a cache.
constexpr int64_t kRowPadding = 16;
constexpr int64_t kLineBytes = 64;
// Larger working memory is given back after a call.
constexpr size_t kKeptBytes = size_t{16} << 20;
// Below this a second thread costs more than it brings. Moving an element takes as long as so many
// operations.
constexpr double kFlopsPerThread = 1e6, kFlopsPerElement = 32;
// Where no more panels of b than this read a's rows, those are read as they lie rather than packed,
// if they are at most so long (bytes from one to the next): longer ones share few sets of a cache.
constexpr int64_t kPlainPanels = 2, kPlainStride = 1024;
constexpr int64_t kFetchedBytes = 256;
// With so little to sum c is what costs: it is written along its rows.
constexpr int64_t kShortK = 16;

Buffer& thread_memory() {
  static thread_local Buffer memory;
  return memory;
}

// What c is cut into multiples of: a consumer's blocks of whole panels of b.
struct Unit {
  int64_t rows, columns;
};

Unit unit_of(const BlockConsumer* consumer, int64_t tile_columns) {
  if (consumer == nullptr) return {1, tile_columns};
  return {consumer->rows(), std::lcm(consumer->columns(), tile_columns)};
}

// The blocks of c in which a thread works through so many rows and columns.
struct Block {
  int64_t rows, columns;
};

Block block_of(int64_t rows, int64_t columns, Unit unit) {
  const int64_t most_rows = std::max(
      std::min(kBlockRows, kBlockElements / unit.columns) / unit.rows * unit.rows, unit.rows);
  Block block{};
  block.rows = round_up(ceil_div(rows, ceil_div(rows, most_rows)), unit.rows);
  const int64_t most_columns =
      std::max(std::min(kBlockColumns, kBlockElements / block.rows) / unit.columns * unit.columns,
               unit.columns);
  block.columns = round_up(ceil_div(columns, ceil_div(columns, most_columns)), unit.columns);
  return block;
}

template <class T>
class Rectangle {
 public:
  Rectangle(const ProductKernels<T>& kernels, const Operands<T>& operands, Range rows,
            Range columns)
      : kernels_(kernels), o_(operands), rows_(rows), columns_(columns) {
    const Unit unit = unit_of(o_.consumer, kernels.tile_columns);
    const Block block = block_of(rows.size(), columns.size(), unit);
    high_ = block.rows;
    wide_ = block.columns;
    plain_ = !o_.transpose_a && columns.size() <= kPlainPanels * kernels.tile_columns &&
             o_.lda * static_cast<int64_t>(sizeof(T)) <= kPlainStride;
    place_buffers();
  }
  ~Rectangle() { thread_memory().release_above(kKeptBytes); }
  Rectangle(const Rectangle&) = delete;
  Rectangle& operator=(const Rectangle&) = delete;

  void run() {
    for (int64_t j = columns_.begin; j < columns_.end; j += wide_) {
      for (int64_t i = rows_.begin; i < rows_.end; i += high_) {
        run_block({i, std::min(rows_.end, i + high_)}, {j, std::min(columns_.end, j + wide_)});
      }
    }
  }

 private:
  void place_buffers() {
    const int64_t depth = std::min(o_.k, kBlockK);
    const int64_t slack = kLineBytes / static_cast<int64_t>(sizeof(T));
    const int64_t a = plain_ ? 0 : round_up(std::min(high_, kPackedRows) * depth + slack, slack);
    const int64_t b = o_.packed_b != nullptr ? 0 : round_up(wide_, kernels_.tile_columns) * depth;
    sums_ld_ = round_up(wide_, slack) + kRowPadding;
    const int64_t sums = o_.k > kBlockK || o_.c == nullptr ? high_ * sums_ld_ : 0;
    std::byte* memory = thread_memory().reserve(static_cast<size_t>(a + b + sums) * sizeof(T));
    packed_a_ = reinterpret_cast<T*>(memory);
    packed_b_ = packed_a_ + a;
    sums_ = packed_b_ + b;
  }

  void run_block(Range rows, Range columns) {
    for (int64_t p = 0; p < o_.k; p += kBlockK) {
      const Range depth{p, std::min(o_.k, p + kBlockK)};
      const bool along_rows = o_.k <= kShortK && columns.size() > kernels_.tile_columns;
      const int64_t bands = ceil_div(rows.size(), along_rows ? kernels_.tile_rows : kPackedRows);
      for (int64_t band = 0; band < bands; ++band) {
        multiply(part_of(rows, bands, band), rows, columns, depth, band == 0);
      }
    }
    if (o_.consumer == nullptr) return;
    if (o_.c != nullptr) {
      o_.consumer->consume(rows, columns, o_.c + rows.begin * o_.ldc + columns.begin, o_.ldc);
    } else {
      o_.consumer->consume(rows, columns, sums_, sums_ld_);
    }
  }

  // Some rows of a block through some of k: each panel of b against all panels of a.
  void multiply(Range band, Range rows, Range columns, Range depth, bool first_band) {
    const int64_t panels = ceil_div(band.size(), kernels_.tile_rows);
    const int64_t height = ceil_div(band.size(), panels);
    for (int64_t i = 0; i < panels && !plain_; ++i) {
      const Range some = panel_of(band, height, i);
      pack_a(some, depth, packed_a_ + (some.begin - band.begin) * depth.size());
    }
    const bool first = depth.begin == 0, last = depth.end == o_.k && o_.c != nullptr;
    const int64_t width = kernels_.tile_columns;
    TileTask<T> task{};
    task.k = depth.size();
    task.lda = o_.lda;
    const auto& tile = plain_ ? kernels_.plain_tile : kernels_.tile;
    for (int64_t j = columns.begin; j < columns.end; j += width) {
      T* const own = packed_b_ + (j - columns.begin) * depth.size();
      if (o_.packed_b == nullptr && first_band) pack_b(j, depth, own);
      task.b = o_.packed_b != nullptr ? whole_b(j, depth) : own;
      task.columns = std::min(width, columns.end - j);
      task.row = last && o_.row != nullptr ? o_.row + j : nullptr;
      Ahead next;
      if (o_.packed_b == nullptr && first_band) next = source_of_b(j + width, columns, depth);
      const int64_t share = ceil_div(next.rows, panels);
      for (int64_t i = 0; i < panels; ++i) {
        const Range some = panel_of(band, height, i);
        T* const sums = sums_ + (some.begin - rows.begin) * sums_ld_ + j - columns.begin;
        task.a = plain_ ? o_.a + some.begin * o_.lda + depth.begin
                        : packed_a_ + (some.begin - band.begin) * depth.size();
        task.add = first ? nullptr : sums;
        task.add_ld = sums_ld_;
        task.c = last ? o_.c + some.begin * o_.ldc + j : sums;
        task.ldc = last ? o_.ldc : sums_ld_;
        if (plain_ && j == columns.begin) {
          task.ahead = source_of_a(some.end, depth);
        } else {
          task.ahead = next;
          task.ahead.data += i * share * next.stride;
          task.ahead.rows = std::clamp<int64_t>(next.rows - i * share, 0, share);
        }
        tile[some.size() - 1](task);
      }
    }
  }

  static Range panel_of(Range band, int64_t height, int64_t index) {
    const int64_t begin = std::min(band.end, band.begin + index * height);
    return {begin, std::min(band.end, begin + height)};
  }

  void pack_a(Range some, Range depth, T* packed) const {
    if (o_.transpose_a) {
      kernels_.pack_columns(o_.a + depth.begin * o_.lda + some.begin, o_.lda, some.size(),
                            depth.size(), some.size(), packed);
    } else {
      kernels_.pack_rows(o_.a + some.begin * o_.lda + depth.begin, o_.lda, some.size(),
                         depth.size(), some.size(), packed);
    }
  }

 public:
  static void pack_b(const ProductKernels<T>& kernels, const Operands<T>& o, int64_t column,
                     Range depth, T* packed) {
    const int64_t width = kernels.tile_columns, count = std::min(width, o.n - column);
    if (o.transpose_b) {
      kernels.pack_rows(o.b + column * o.ldb + depth.begin, o.ldb, count, depth.size(), width,
                        packed);
    } else {
      kernels.pack_columns(o.b + depth.begin * o.ldb + column, o.ldb, count, depth.size(), width,
                           packed);
    }
  }

 private:
  void pack_b(int64_t column, Range depth, T* packed) const {
    pack_b(kernels_, o_, column, depth, packed);
  }

  // pack_whole_b()'s panel.
  const T* whole_b(int64_t column, Range depth) const {
    return o_.packed_b + round_up(o_.n, kernels_.tile_columns) * depth.begin +
           column * depth.size();
  }

  // Of a tile that begins at some row. Short rows follow each other closely enough for the
  // processor to see them coming.
  Ahead source_of_a(int64_t row, Range depth) const {
    constexpr auto kElements = static_cast<int64_t>(sizeof(T));
    if (depth.size() * kElements < kFetchedBytes) return {};
    const T* source = o_.a + row * o_.lda + depth.begin;
    return {reinterpret_cast<const char*>(source), o_.lda * kElements,
            std::min<int64_t>(kernels_.tile_rows, rows_.end - row),
            ceil_div(depth.size() * kElements, kLineBytes)};
  }

  Ahead source_of_b(int64_t column, Range columns, Range depth) const {
    if (column >= columns.end) return {};
    constexpr auto kElements = static_cast<int64_t>(sizeof(T));
    const int64_t count = std::min<int64_t>(kernels_.tile_columns, columns.end - column);
    const int64_t along = o_.transpose_b ? depth.size() : count;
    const T* source = o_.transpose_b ? o_.b + column * o_.ldb + depth.begin
                                     : o_.b + depth.begin * o_.ldb + column;
    return {reinterpret_cast<const char*>(source), o_.ldb * kElements,
            o_.transpose_b ? count : depth.size(), ceil_div(along * kElements, kLineBytes)};
  }

  const ProductKernels<T>& kernels_;
  const Operands<T>& o_;
  Range rows_, columns_;
  int64_t high_ = 0, wide_ = 0;  // of a block of c
  bool plain_ = false;           // a is read as it lies
  T *packed_a_ = nullptr, *packed_b_ = nullptr, *sums_ = nullptr;
  int64_t sums_ld_ = 0;
};

struct Grid {
  int64_t over_m = 1, over_n = 1;
  double cost = 0;  // of the slowest thread, in multiplications for each of k
};

// Packing an element costs about as much as so many multiplications, writing one of c to memory and
// reading it again as so many.
constexpr double kPackingCost = 32, kPassCost = 40;

// threads = over_m × over_n, cutting m and n at multiples of units.
Grid grid_of(int64_t m, int64_t n, Unit unit, int64_t threads) {
  Grid best{1, 1, 1e300};
  for (int64_t over_m = 1; over_m <= threads; ++over_m) {
    if (threads % over_m != 0) continue;
    const int64_t over_n = threads / over_m;
    const auto largest = [](int64_t extent, int64_t cut, int64_t parts) {
      return std::min(extent, ceil_div(ceil_div(extent, cut), parts) * cut);
    };
    const int64_t rows = largest(m, unit.rows, over_m), columns = largest(n, unit.columns, over_n);
    const Block block = block_of(rows, columns, unit);
    const auto packed = static_cast<double>(rows * ceil_div(columns, block.columns) +
                                            columns * ceil_div(rows, block.rows));
    const double cost =
        static_cast<double>(rows) * static_cast<double>(columns) + kPackingCost * packed;
    if (cost < best.cost) best = {over_m, over_n, cost};
  }
  return best;
}

int64_t threads_of(int64_t m, int64_t n, int64_t k) {
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n),
             depth = static_cast<double>(k);
  return threads_for(2 * rows * columns * depth, rows * columns + rows * depth + columns * depth);
}

}  // namespace

int64_t threads_for(double flops, double elements) {
  const double useful = std::max(1.0, (flops + kFlopsPerElement * elements) / kFlopsPerThread);
  return static_cast<int64_t>(std::min(static_cast<double>(thread_count()), useful));
}

bool blocks_suit(const BlockConsumer& consumer, int64_t tile_columns, int64_t m, int64_t n,
                 int64_t k) {
  if (k <= 0) return false;
  const int64_t threads = threads_of(m, n, k);
  const double as_asked = grid_of(m, n, unit_of(&consumer, tile_columns), threads).cost;
  const double free = grid_of(m, n, unit_of(nullptr, tile_columns), threads).cost;
  const double saved = kPassCost * static_cast<double>(m) * static_cast<double>(n) /
                       static_cast<double>(threads * k);
  return as_asked <= free + saved;
}

template <class T>
void multiply_blocked(const ProductKernels<T>& kernels, const Operands<T>& o) {
  const Unit unit = unit_of(o.consumer, kernels.tile_columns);
  const Grid grid = grid_of(o.m, o.n, unit, threads_of(o.m, o.n, o.k));
  parallel_for(grid.over_m * grid.over_n, [&](int64_t task, int) {
    const Range rows = part_of({0, o.m}, grid.over_m, task % grid.over_m, unit.rows);
    const Range columns = part_of({0, o.n}, grid.over_n, task / grid.over_m, unit.columns);
    if (rows.size() > 0 && columns.size() > 0) Rectangle<T>(kernels, o, rows, columns).run();
  });
}

template <class T>
int64_t packed_elements(const ProductKernels<T>& kernels, int64_t n, int64_t k) {
  return round_up(n, kernels.tile_columns) * k + kLineBytes / static_cast<int64_t>(sizeof(T));
}

template <class T>
void pack_whole_b(const ProductKernels<T>& kernels, const Operands<T>& o, T* packed) {
  const int64_t width = kernels.tile_columns, panels = ceil_div(o.n, width);
  parallel_for(panels, [&](int64_t panel, int) {
    for (int64_t p = 0; p < o.k; p += kBlockK) {
      const Range depth{p, std::min(o.k, p + kBlockK)};
      Rectangle<T>::pack_b(kernels, o, panel * width, depth,
                           packed + panels * width * p + panel * width * depth.size());
    }
  });
}

#define INGOT_INSTANTIATE(T)                                                       \
  template void multiply_blocked<T>(const ProductKernels<T>&, const Operands<T>&); \
  template int64_t packed_elements<T>(const ProductKernels<T>&, int64_t, int64_t); \
  template void pack_whole_b<T>(const ProductKernels<T>&, const Operands<T>&, T*);
INGOT_INSTANTIATE(float)
INGOT_INSTANTIATE(double)
#undef INGOT_INSTANTIATE

}  // namespace ingot::cpu
