// The product part of a sweep: operands from strides to leading dimensions, and the call.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "cpu/loops.h"
#include "cpu/product/packed.h"
#include "cpu/sweep.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<std::byte[], Free>;

int64_t width_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
      return 4;
    default:
      return 2;
  }
}

// A matrix of `batch` × `rows` × `columns` with strides in elements.
struct Matrix {
  std::byte* data;
  int64_t batch_stride, row_stride, column_stride;
  DType dtype;
  Bytes owned;  // where it had to be copied
};

void copy_row(const std::byte* from, int64_t from_stride, DType from_dtype, std::byte* to,
              int64_t to_stride, DType to_dtype, int64_t n, Level level) {
  // Through float, or double where either side is.
  constexpr int64_t kBlock = 512;
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t count = std::min(kBlock, n - j);
    const std::byte* source = from + j * from_stride * width_of(from_dtype);
    std::byte* target = to + j * to_stride * width_of(to_dtype);
    const auto in = static_cast<size_t>(from_dtype), out = static_cast<size_t>(to_dtype);
    if (from_dtype == DType::f64 || to_dtype == DType::f64) {
      double block[kBlock];
      primitives<double>(level).load[in](block, source, from_stride, count);
      primitives<double>(level).store[out](target, to_stride, block, count);
    } else {
      float block[kBlock];
      primitives<float>(level).load[in](block, source, from_stride, count);
      primitives<float>(level).store[out](target, to_stride, block, count);
    }
  }
}

Bytes allocate(int64_t elements, DType dtype) {
  const auto bytes = static_cast<size_t>(std::max<int64_t>(1, elements) * width_of(dtype));
  auto* p = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (p == nullptr)
    fail(INGOT_FAILED, "CPU: no memory for a copy of {} bytes of an operand", bytes);
  return Bytes(p);
}

// A dense copy in another dtype or order.
Matrix densify(const Matrix& m, int64_t batch, int64_t rows, int64_t columns, DType dtype,
               Level level) {
  Matrix out{nullptr, rows * columns, columns, 1, dtype, allocate(batch * rows * columns, dtype)};
  out.data = out.owned.get();
  parallel_for(batch * rows, [&](int64_t row, int) {
    const int64_t from = row / rows * m.batch_stride + row % rows * m.row_stride;
    copy_row(m.data + from * width_of(m.dtype), m.column_stride, m.dtype,
             out.data + row * columns * width_of(dtype), 1, dtype, columns, level);
  });
  return out;
}

bool aligned(const Matrix& m) {
  return reinterpret_cast<uintptr_t>(m.data) % static_cast<uintptr_t>(width_of(m.dtype)) == 0;
}

// Whether rows lie at least their length apart, as every BLAS asks; broadcast and overlapping ones
// do not.
bool rows_apart(int64_t rows, int64_t stride, int64_t columns) {
  return rows <= 1 || stride >= columns;
}

// How a product reads b where it lies: [n, k] if transposed, else [k, n].
struct RightLayout {
  bool transposed;
  int64_t ld;
};

// transpose: b has n rows and k columns. Bᵀ lying as B is the other layout; anything else has to be
// copied.
std::optional<RightLayout> layout_of(const Matrix& b, bool transpose, int64_t n, int64_t k,
                                     DType dtype) {
  const int64_t rows = transpose ? n : k, columns = transpose ? k : n;
  if (b.dtype != dtype || !aligned(b)) return std::nullopt;
  // The stride of a single row means nothing, but is checked.
  if ((b.column_stride == 1 || columns == 1) && rows_apart(rows, b.row_stride, columns)) {
    return RightLayout{transpose, std::max(b.row_stride, columns)};
  }
  if ((b.row_stride == 1 || rows == 1) && rows_apart(columns, b.column_stride, rows)) {
    return RightLayout{!transpose, std::max(b.column_stride, rows)};
  }
  return std::nullopt;
}

Matrix matrix_of(const Memory& memory) {
  return {memory.data,           memory.strides[kBatch],
          memory.strides[kRows], memory.strides[kFeatures],
          memory.dtype,          nullptr};
}

}  // namespace

// As describe() and runs_with() take it to be: operands dense, one matrix.
ProductCall SweepRunner::typical_call(int64_t batch) const {
  ProductCall call;
  const Node& node = plan_.graph[sweep_.matmul];
  call.m = (node.shape.batched ? batch : 1) * node.shape.rows;
  call.n = node.shape.features;
  call.k = plan_.graph[node.args[0]].shape.features;
  call.lda = call.k;
  call.ldb = node.transpose_b ? call.k : call.n;
  call.ldc = call.n;
  call.transpose_b = node.transpose_b;
  call.dtype = static_cast<ingot_dtype>(node.dtype);
  return call;
}

// Any batch size that a provider packs operands for, when it is not known.
constexpr int64_t kTypicalBatch = 1024;

size_t SweepRunner::frozen_bytes() const {
  if (sweep_.matmul == kNoValue) return 0;
  const Node& node = plan_.graph[sweep_.matmul];
  const Node& weight = plan_.graph[behind_views(plan_.graph, node.args[1])];
  const bool kept = weight.kind == NodeKind::leaf && weight.role == LeafRole::parameter &&
                    !plan_.graph[node.args[1]].shape.batched && weight.dtype == node.dtype;
  if (!kept) return 0;
  const ProductCall call = typical_call(kTypicalBatch);
  const auto provider = provider_of(isa_, call);
  return provider == nullptr ? 0 : provider->packed_bytes(call);
}

void SweepRunner::freeze(const Addresses& addresses, std::byte* packed, size_t bytes) const {
  const Graph& graph = plan_.graph;
  const Node& node = graph[sweep_.matmul];
  const Matrix b =
      matrix_of(addresses.locate(behind_views(graph, node.args[1]), graph[node.args[1]].shape));
  ProductCall call = typical_call(kTypicalBatch);
  const auto layout = layout_of(b, node.transpose_b, call.n, call.k, node.dtype);
  new (packed) PackedHeader();  // nobody's
  if (!layout) return;
  call.b = b.data;
  call.ldb = layout->ld;
  call.transpose_b = layout->transposed;
  const auto provider = provider_of(isa_, call);
  // The layout may make it another provider's.
  if (provider != nullptr && provider->packed_bytes(call) <= bytes) {
    provider->pack(call, packed);
  }
}

bool SweepRunner::run_product(const Addresses& addresses, std::byte* workspace,
                              const std::byte* packed, const Behind& behind) const {
  const Graph& graph = plan_.graph;
  const Node& node = graph[sweep_.matmul];
  const auto operand = [&](int i) {
    const Shape& seen = graph[node.args[static_cast<size_t>(i)]].shape;
    return matrix_of(addresses.locate(product_operand(graph, sweep_, i), seen));
  };
  const Shape &a_shape = graph[node.args[0]].shape, &b_shape = graph[node.args[1]].shape;
  const int64_t entries = addresses.batch();
  const int64_t a_batch = a_shape.batched ? entries : 1, b_batch = b_shape.batched ? entries : 1;
  const int64_t c_batch = node.shape.batched ? entries : 1;
  const int64_t rows = node.shape.rows, n = node.shape.features, k = a_shape.features;
  const bool alone = behind.consumer == nullptr && behind.adds == nullptr;
  if (c_batch * rows * n == 0) return alone;
  const bool transpose = node.transpose_b;
  const int64_t b_rows = transpose ? n : k, b_columns = transpose ? k : n;

  Matrix a = operand(0), b = operand(1);
  const Matrix c =
      matrix_of(behind.adds != nullptr ? addresses.locate(behind.adds->added_row_.sum, node.shape)
                                       : product_memory(addresses, workspace));
  const bool apart =
      rows_apart(rows, a.row_stride, k) && (rows > 1 || rows_apart(a_batch, a.batch_stride, k));
  if (a.dtype != node.dtype || (a.column_stride != 1 && k > 1) || !aligned(a) || !apart) {
    a = densify(a, a_batch, rows, k, node.dtype, isa_.level);
  }
  auto right = layout_of(b, transpose, n, k, node.dtype);
  if (!right) {
    b = densify(b, b_batch, b_rows, b_columns, node.dtype, isa_.level);
    right = RightLayout{transpose, b.row_stride};
    packed = nullptr;
  }
  Matrix target{c.data, c.batch_stride, c.row_stride, c.column_stride, c.dtype, nullptr};
  const bool direct = c.dtype == node.dtype && (c.column_stride == 1 || n == 1) && aligned(c);
  if (!direct && !alone) return false;
  if (!direct) {
    target = {nullptr, rows * n, n, 1, node.dtype, allocate(c_batch * rows * n, node.dtype)};
    target.data = target.owned.get();
  }

  ProductCall call;
  call.m = rows;
  call.n = n;
  call.k = k;
  call.lda = a.row_stride;
  call.ldb = right->ld;
  call.ldc = target.row_stride;
  call.transpose_b = right->transposed;
  call.packed_b = b_shape.batched ? nullptr : packed;
  call.dtype = static_cast<ingot_dtype>(node.dtype);
  int64_t calls = c_batch;
  const auto one_matrix = [&](const Matrix& m) {
    return rows == 1 || m.batch_stride == rows * m.row_stride;
  };
  if (!b_shape.batched && (a_shape.batched || c_batch == 1) && one_matrix(a) &&
      one_matrix(target)) {
    call.m = c_batch * rows;
    calls = 1;
    if (rows == 1) {
      call.lda = a.batch_stride;
      call.ldc = target.batch_stride;
    }
  }
  // The stride of a single row means nothing, but is checked.
  call.lda = std::max(call.lda, k);
  call.ldc = std::max(call.ldc, n);
  const int64_t width = width_of(node.dtype);
  if (!alone) {
    if (calls != 1) return false;
    call.a = a.data;
    call.b = b.data;
    call.c = behind.kept ? target.data : nullptr;
    if (behind.consumer != nullptr) {
      call.consumer = behind.consumer;
      return cpu::run_with_consumer(isa_, call);
    }
    const ValueId added = behind.adds->added_row_.row;
    const Matrix row = matrix_of(addresses.locate(added, graph[added].shape));
    if (row.dtype != node.dtype || (row.column_stride != 1 && n > 1) || !aligned(row)) return false;
    call.row = row.data;
    return cpu::run_with_row(isa_, call);
  }
  for (int64_t i = 0; i < calls; ++i) {
    call.a = a.data + (a_shape.batched ? i * a.batch_stride * width : 0);
    call.b = b.data + (b_shape.batched ? i * b.batch_stride * width : 0);
    call.c = target.data + i * target.batch_stride * width;
    cpu::run_product(isa_, call);
  }
  if (direct) return true;
  parallel_for(c_batch * rows, [&](int64_t row, int) {
    const int64_t to = row / rows * c.batch_stride + row % rows * c.row_stride;
    copy_row(target.data + row * n * width, 1, node.dtype, c.data + to * width_of(c.dtype),
             c.column_stride, c.dtype, n, isa_.level);
  });
  return true;
}

}  // namespace ingot::cpu
