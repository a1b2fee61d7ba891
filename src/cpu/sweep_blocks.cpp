// A sweep's body on the blocks of a product, each as soon as it is finished and while it is in
// cache, in the thread that finished it. Where nothing else reads the product it is never written.
#include <algorithm>
#include <memory>

#include "cpu/sweep.h"

namespace ingot::cpu {
namespace {

// Rows of a block where the body gathers no statistics, which ask for more.
constexpr int64_t kMapRows = 64;

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

class SweepRunner::BodyBlocks final : public BlockConsumer {
 public:
  BodyBlocks(const SweepRunner& sweep, ValueId product, int64_t batch)
      : sweep_(sweep), product_(product), tiles_(tiling_of(sweep, batch)) {}

  void bind(const Addresses& addresses, std::byte* workspace) {
    const Layout layout = sweep_.layout(addresses.batch());
    bindings_ = sweep_.bind(sweep_.body_, addresses, workspace, layout);
    partials_ = reinterpret_cast<double*>(workspace + layout.partials);
  }

  int64_t rows() const override { return tiles_.batch_chunk; }
  int64_t columns() const override { return columns_of_strip(tiles_); }

  void consume(Range rows, Range columns, const void* data, int64_t ld) const override {
    const Bindings bindings = reading(data, rows.begin * ld + columns.begin, ld);
    const int64_t last_chunk = ceil_div(rows.end, this->rows());
    const int64_t last_strip = ceil_div(columns.end, this->columns());
    for (int64_t strip = columns.begin / this->columns(); strip < last_strip; ++strip) {
      for (int64_t chunk = rows.begin / this->rows(); chunk < last_chunk; ++chunk) {
        sweep_.run_body_task(bindings, tiles_, chunk * tiles_.strips + strip, partials_);
      }
    }
  }

 private:
  static Tiling tiling_of(const SweepRunner& sweep, int64_t batch) {
    if (!sweep.body_.statistics.empty()) return sweep.tiling(batch);
    Tiling t = make_tiling(sweep.sweep_.space, batch, sweep.body_.whole_axes, true, 1);
    t.batch_chunk = round_up(std::min(kMapRows, t.batch_chunk), t.tile[kBatch]);
    t.chunks = ceil_div(t.space[kBatch], t.batch_chunk);
    return t;
  }

  // The sweep's memory, with the product's element `first` at `data`.
  Bindings reading(const void* data, int64_t first, int64_t ld) const {
    Bindings bindings = bindings_;
    const Node& node = sweep_.plan_.graph[product_];
    std::array<int64_t, kAxes> strides{};
    strides[kBatch] = ld;
    strides[kFeatures] = 1;
    for (size_t i = 0; i < bindings.loads.size(); ++i) {
      if (sweep_.body_.loads[i] != product_) continue;
      // The interpreter only reads loads.
      auto* elements = const_cast<std::byte*>(static_cast<const std::byte*>(data));
      bindings.loads[i] = {elements - first * static_cast<int64_t>(size_of(node.dtype)),
                           strides_in(node.shape, strides, sweep_.sweep_.shapes.at(product_)),
                           node.dtype};
    }
    return bindings;
  }

  const SweepRunner& sweep_;
  ValueId product_;
  Tiling tiles_;
  Bindings bindings_;
  double* partials_ = nullptr;
};

bool SweepRunner::can_follow(const Sweep& product) const {
  const auto read = sweep_.shapes.find(product.matmul);
  if (!has_body_ || sweep_.matmul != kNoValue || read == sweep_.shapes.end()) return false;
  const Node& node = plan_.graph[product.matmul];
  const Shape& seen = read->second;
  const Shape& space = sweep_.space;
  const bool fills = seen.batched && space.batched && seen.rows == space.rows &&
                     seen.groups == space.groups && seen.features == space.features;
  return fills && node.shape.batched && node.shape.rows == 1 && node.shape.groups == 1 &&
         node.dtype == DType::f32;
}

// As the provider would do it: one row of the product's type and width, and the sum alone is kept.
SweepRunner::AddedRow SweepRunner::find_added_row() const {
  const Graph& graph = plan_.graph;
  if (sweep_.matmul != kNoValue || has_tail_ || !body_.statistics.empty() ||
      sweep_.body.size() != 1 || sweep_.stores != sweep_.body) {
    return {};
  }
  const Node& sum = graph[sweep_.body[0]];
  if (sum.kind != NodeKind::pointwise || sum.op != PointwiseOp::add_) return {};
  for (const size_t first : {0, 1}) {
    const ValueId product = sum.args[first], row = sum.args[1 - first];
    const Node& added = graph[row];
    const bool one_row = !added.shape.batched && added.shape.rows == 1 && added.shape.groups == 1;
    if (graph[product].kind == NodeKind::matmul && added.kind != NodeKind::constant && one_row &&
        added.shape.features == graph[product].shape.features && added.dtype == sum.dtype &&
        graph[product].dtype == sum.dtype) {
      return {product, row, sweep_.body[0]};
    }
  }
  return {};
}

bool SweepRunner::adds_row_of(const SweepRunner& next, bool kept, int64_t batch) const {
  return !kept && next.added_row_.product != kNoValue && next.added_row_.product == sweep_.matmul &&
         some_provider_adds_row(isa_, typical_call(batch));
}

bool SweepRunner::runs_with(const SweepRunner& next, bool kept, int64_t batch) const {
  if (batch <= 0) return false;
  if (adds_row_of(next, kept, batch)) return true;
  const BodyBlocks blocks(next, sweep_.matmul, batch);
  if (blocks.columns() == 0) return false;
  ProductCall call = typical_call(batch);
  call.consumer = &blocks;
  return some_provider_consumes(isa_, call);
}

bool SweepRunner::run_with(const SweepRunner& next, bool kept, const Addresses& addresses,
                           std::byte* workspace, const std::byte* packed) const {
  // Before anything is copied for a call that no provider would serve.
  if (!runs_with(next, kept, addresses.batch())) return false;
  if (adds_row_of(next, kept, addresses.batch()) &&
      run_product(addresses, workspace, packed, {.adds = &next})) {
    return true;
  }
  BodyBlocks blocks(next, sweep_.matmul, addresses.batch());
  blocks.bind(addresses, workspace);
  if (!run_product(addresses, workspace, packed, {.consumer = &blocks, .kept = kept})) return false;
  next.finish(addresses, workspace, next.layout(addresses.batch()));
  return true;
}

}  // namespace ingot::cpu
