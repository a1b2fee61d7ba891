// Products: operands from strides to leading dimensions, copied where they do not lie so; who
// computes them, and what is done to their elements before they leave registers or cache.
#include <fmt/format.h>

#include <algorithm>

#include "cpu/program_lowering.h"
#include "support/align.h"
#include "support/checked.h"

namespace ingot::cpu {
namespace {

// Rows of a product's block where the body behind it gathers no statistics, which ask for more.
constexpr int64_t kMapRows = 64;
// Any batch size that a provider packs operands for, when it is not known.
constexpr int64_t kTypicalBatch = 1024;

// Whether rows lie at least their length apart, as every BLAS asks; broadcast and overlapping ones
// do not.
bool rows_apart(int64_t rows, int64_t stride, int64_t columns) {
  return rows <= 1 || stride >= columns;
}

BoundMemory dense_matrices(const Address& address, int64_t rows, int64_t columns, DType dtype) {
  return {address, {rows * columns, columns, 0, 1}, dtype};
}

size_t bytes_of(const Extents& sizes, DType dtype) {
  return checked_product(static_cast<size_t>(product_of(sizes)), size_of(dtype));
}

// As operands are packed for: dense ones.
ProductCall typical_call(const Graph& graph, const Node& product) {
  ProductCall call;
  call.m = (product.shape.batched ? kTypicalBatch : 1) * product.shape.rows;
  call.n = product.shape.features;
  call.k = graph[product.args[0]].shape.features;
  call.lda = call.k;
  call.ldb = product.transpose_b ? call.k : call.n;
  call.ldc = call.n;
  call.transpose_b = product.transpose_b;
  call.dtype = static_cast<ingot_dtype>(product.dtype);
  return call;
}

}  // namespace

BoundMemory ProgramLowering::operand(const Sweep& sweep, int index) const {
  const ValueId seen = graph_[sweep.matmul].args[static_cast<size_t>(index)];
  return bind(product_operand(graph_, sweep, index), graph_[seen].shape);
}

// Bᵀ lying as B is the other layout; anything else has to be copied.
std::optional<ProgramLowering::RightLayout> ProgramLowering::right_layout(const BoundMemory& b,
                                                                          const Node& product,
                                                                          int64_t n,
                                                                          int64_t k) const {
  const bool transpose = product.transpose_b;
  const int64_t rows = transpose ? n : k, columns = transpose ? k : n;
  const int64_t row_stride = b.strides[kRows], column_stride = b.strides[kFeatures];
  if (b.dtype != product.dtype || !is_aligned(b)) return std::nullopt;
  // The stride of a single row means nothing, but is checked.
  if ((column_stride == 1 || columns == 1) && rows_apart(rows, row_stride, columns)) {
    return RightLayout{transpose, std::max(row_stride, columns)};
  }
  if ((row_stride == 1 || rows == 1) && rows_apart(columns, column_stride, rows)) {
    return RightLayout{!transpose, std::max(column_stride, rows)};
  }
  return std::nullopt;
}

BoundMemory ProgramLowering::copied(const BoundMemory& from, const Sweep& sweep, int index,
                                    int64_t count, int64_t rows, int64_t columns) {
  const DType dtype = graph_[sweep.matmul].dtype;
  const std::string operand = called(graph_, product_operand(graph_, sweep, index));
  const Extents sizes = {count, rows, 1, columns};
  const size_t bytes = bytes_of(sizes, dtype);
  const BoundMemory to = dense_matrices(take(operand + " copied", bytes), rows, columns, dtype);
  if (bytes == 0) return to;
  add(CopyStep{from, to, sizes, {}}, from.dtype != dtype
                                         ? fmt::format("the product reads {}", name_of(dtype))
                                         : "it does not lie as the product reads it");
  return to;
}

bool ProgramLowering::is_direct(const BoundMemory& c, const Node& product) const {
  const bool adjacent = c.strides[kFeatures] == 1 || product.shape.features == 1;
  return c.dtype == product.dtype && adjacent && is_aligned(c);
}

ProductStep ProgramLowering::step_into(const Product& p, const BoundMemory& c) const {
  const auto width = static_cast<int64_t>(size_of(p.node.dtype));
  const bool a_moves = graph_[p.node.args[0]].shape.batched;
  const bool b_moves = graph_[p.node.args[1]].shape.batched;
  ProductStep step;
  step.batches = p.c_count;
  step.a = p.a.address, step.b = p.b.address, step.c = c.address;
  step.a_step = a_moves ? p.a.strides[kBatch] * width : 0;
  step.b_step = b_moves ? p.b.strides[kBatch] * width : 0;
  step.c_step = c.strides[kBatch] * width;
  step.packed_b = p.packed_b;
  ProductCall& call = step.call;
  call.m = p.rows, call.n = p.n, call.k = p.k;
  call.lda = p.a.strides[kRows], call.ldb = p.right.ld, call.ldc = c.strides[kRows];
  call.transpose_b = p.right.transposed;
  call.dtype = static_cast<ingot_dtype>(p.node.dtype);
  const auto one_matrix = [&](const BoundMemory& m) {
    return p.rows == 1 || m.strides[kBatch] == p.rows * m.strides[kRows];
  };
  if (!b_moves && (a_moves || p.c_count == 1) && one_matrix(p.a) && one_matrix(c)) {
    call.m = p.c_count * p.rows;
    step.batches = 1;
    if (p.rows == 1) call.lda = p.a.strides[kBatch], call.ldc = c.strides[kBatch];
  }
  // The stride of a single row means nothing, but is checked.
  call.lda = std::max(call.lda, p.k), call.ldc = std::max(call.ldc, p.n);
  step.providers = providers_of(host_.isa, call);
  return step;
}

bool ProgramLowering::lower_product(const Turn& turn) {
  sweep_ = turn.sweep;
  const Sweep& sweep = sweep_at(turn.sweep).sweep;
  const Node& node = graph_[sweep.matmul];
  const Shape &a_shape = graph_[node.args[0]].shape, &b_shape = graph_[node.args[1]].shape;
  const auto count = [&](const Shape& shape) { return shape.batched ? batch_ : 1; };
  Product p{
      node,           node.shape.rows,   node.shape.features, a_shape.features, count(a_shape),
      count(b_shape), count(node.shape), operand(sweep, 0),   operand(sweep, 1)};
  if (p.c_count * p.rows * p.n == 0) return false;
  const bool apart = rows_apart(p.rows, p.a.strides[kRows], p.k) &&
                     (p.rows > 1 || rows_apart(p.a_count, p.a.strides[kBatch], p.k));
  const bool adjacent = p.a.strides[kFeatures] == 1 || p.k <= 1;
  if (p.a.dtype != node.dtype || !adjacent || !is_aligned(p.a) || !apart) {
    p.a = copied(p.a, sweep, 0, p.a_count, p.rows, p.k);
  }
  if (const auto right = right_layout(p.b, node, p.n, p.k)) {
    p.right = *right;
    if (!b_shape.batched) p.packed_b = frozen_at(turn.sweep);
  } else {
    p.b = node.transpose_b ? copied(p.b, sweep, 1, p.b_count, p.n, p.k)
                           : copied(p.b, sweep, 1, p.b_count, p.k, p.n);
    p.right = {node.transpose_b, p.b.strides[kRows]};
  }

  if (turn.next >= 0 && !turn.kept && add_with_row(turn, p)) return true;
  const BoundMemory c = bind(sweep.matmul, node.shape);
  if (is_direct(c, node)) {
    ProductStep step = step_into(p, c);
    if (turn.next >= 0) hand_blocks(turn, &step);
    const bool with_next = step.behind.has_value();
    add(std::move(step));
    return with_next;
  }
  const Extents sizes = {p.c_count, p.rows, 1, p.n};
  const Address memory =
      take(called(graph_, sweep.matmul) + " to be copied", bytes_of(sizes, node.dtype));
  const BoundMemory dense = dense_matrices(memory, p.rows, p.n, node.dtype);
  add(step_into(p, dense));
  add(CopyStep{dense, c, sizes, {}}, "it does not lie as the product writes it");
  return false;
}

// Where its provider can read it; nothing where it lies otherwise. In 16 bits a row that the body
// casts is cast beforehand.
std::optional<BoundMemory> ProgramLowering::added_row(const AddedRow& added,
                                                      const Product& product) {
  const BoundMemory source = bind(added.source, graph_[added.source].shape);
  if (added.source == added.row) {
    return is_direct(source, product.node) ? std::optional(source) : std::nullopt;
  }
  const DType dtype = graph_[added.row].dtype;
  const Extents sizes = {1, 1, 1, product.n};
  const Address memory = take(called(graph_, added.row), bytes_of(sizes, dtype));
  const BoundMemory row = dense_matrices(memory, 1, product.n, dtype);
  add(CopyStep{source, row, sizes, {}}, fmt::format("the product adds {}", name_of(dtype)));
  return row;
}

bool ProgramLowering::add_with_row(const Turn& turn, const Product& product) {
  const HostSweep& next = sweep_at(turn.next);
  const AddedRow& added = next.added_row;
  if (added.product == kNoValue || added.product != sweep_at(turn.sweep).sweep.matmul) return false;
  const std::vector<ValueId>& stores = next.sweep.stores;
  const bool stored = std::find(stores.begin(), stores.end(), added.sum) != stores.end();
  const ValueId written = stored ? added.sum : added.product;
  const BoundMemory sum = bind(written, product.node.shape);
  if (!is_direct(sum, product.node)) return false;
  ProductStep step = step_into(product, sum);
  if (step.providers.empty() || !step.providers[0]->adds_row(step.call)) return false;
  const std::optional<BoundMemory> row = added_row(added, product);
  if (!row) return false;
  step.row = row->address;
  step.follower = turn.next;
  step.behind = body_step(next, tiling(next));
  // Where the provider cannot after all, the row is added where the product then lies.
  const BoundMemory seen = bind(written, next.sweep.shapes.at(added.product));
  for (size_t i = 0; i < step.behind->loads.size(); ++i) {
    if (next.body.loads[i] == added.product) step.behind->loads[i] = seen;
  }
  if (!added.is_all) {
    PhaseStep& rest = step.behind_row.emplace(*step.behind);
    rest.phase = &next.behind_row;
    rest.loads.clear(), rest.stores.clear();
    for (const ValueId value : next.behind_row.loads) {
      rest.loads.push_back(value == added.sum ? seen : bind_load(next.sweep, value));
    }
    for (const Phase::Store& store : next.behind_row.stores) {
      rest.stores.push_back(bind(store.value, next.sweep.shapes.at(store.value)));
    }
  }
  add(std::move(step));
  return true;
}

void ProgramLowering::hand_blocks(const Turn& turn, ProductStep* step) {
  if (step->batches != 1 || step->providers.empty()) return;
  const HostSweep& next = sweep_at(turn.next);
  Tiling tiles = tiling(next);
  if (!next.gathers()) {
    tiles = make_tiling(next.sweep.space, batch_, next.body.whole_axes, true, 1);
    tiles.batch_chunk = round_up(std::min(kMapRows, tiles.batch_chunk), tiles.tile[kBatch]);
    tiles.chunks = ceil_div(tiles.space[kBatch], tiles.batch_chunk);
  }
  PhaseStep asked;
  asked.tiles = tiles;
  const BodyBlocks blocks(asked);
  ProductCall call = step->call;
  call.consumer = &blocks;
  if (blocks.columns() == 0 || !step->providers[0]->consumes(call)) return;
  step->behind = body_step(next, tiles);
  step->follower = turn.next;
  step->is_kept = turn.kept;
  const ValueId product = sweep_at(turn.sweep).sweep.matmul;
  for (size_t i = 0; i < next.body.loads.size(); ++i) {
    if (next.body.loads[i] == product) step->behind->product_loads.push_back(i);
  }
}

Address ProgramLowering::frozen_at(int sweep) const {
  const auto index = static_cast<size_t>(sweep);
  if (index >= frozen_.size() || frozen_[index] == 0) return {};
  size_t offset = 0;
  for (const size_t bytes : frozen_.first(index)) offset += bytes;
  return {Address::Base::frozen, 0, offset};
}

HostProgram ProgramLowering::packing() {
  for (size_t i = 0; i < frozen_.size(); ++i) {
    if (frozen_[i] == 0) continue;
    sweep_ = static_cast<int>(i);
    const Node& node = graph_[plan_.sweeps[i].matmul];
    const BoundMemory b = operand(plan_.sweeps[i], 1);
    PackStep step{typical_call(graph_, node), nullptr, b.address, frozen_at(sweep_)};
    const auto layout = right_layout(b, node, step.call.n, step.call.k);
    if (!layout) continue;
    step.call.ldb = layout->ld;
    step.call.transpose_b = layout->transposed;
    const Providers providers = providers_of(host_.isa, step.call);
    // The layout may make it another provider's.
    if (providers.empty() || providers[0]->packed_bytes(step.call) > frozen_[i]) continue;
    step.provider = providers[0];
    add(std::move(step));
  }
  return std::move(program_);
}

std::vector<size_t> frozen_bytes(const HostPlan& host) {
  const Graph& graph = host.plan.graph;
  std::vector<size_t> bytes;
  for (const Sweep& sweep : host.plan.sweeps) {
    bytes.push_back(0);
    if (sweep.matmul == kNoValue) continue;
    const Node& node = graph[sweep.matmul];
    const Node& weight = graph[behind_views(graph, node.args[1])];
    if (weight.kind != NodeKind::leaf || weight.role != LeafRole::parameter ||
        graph[node.args[1]].shape.batched || weight.dtype != node.dtype) {
      continue;
    }
    const ProductCall call = typical_call(graph, node);
    const Providers providers = providers_of(host.isa, call);
    if (!providers.empty()) {
      bytes.back() = align_up(providers[0]->packed_bytes(call), kWorkspaceAlignment);
    }
  }
  return bytes;
}

}  // namespace ingot::cpu
